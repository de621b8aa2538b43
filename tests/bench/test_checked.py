"""What the project's own benchmarks compare: each turn's result, with what as many calls make."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np
import pytest

from benchmarks import between_commits
from benchmarks.checked import Call, Sum, check, take_turns, take_turns_by_phase
from benchmarks.driver import Benchmark, Run
from pycollective import reference
from pycollective.bench import phase
from pycollective.testing.inputs import leaves

RANKS, RANK, COUNT, CALLS, ROUNDS = 3, 1, 100, 2, 2


def in_a_row(call: Call) -> tuple[float]:
    for _ in range(CALLS):
        call()
    return (1.0,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("apart", [False, True])
def test_each_turn_is_compared(dtype: str, apart: bool) -> None:
    inputs = leaves(dtype, "sum", RANKS, COUNT, 0)
    buffers = Sum(inputs, RANK, CALLS, apart=apart)
    bits = f"u{buffers.x.itemsize}"

    def reduce(order: list[int]) -> None:
        """As if this were rank 1, and the others had called, too."""
        begins = np.array_equal(buffers.x.view(bits), inputs[RANK].view(bits))
        leaves_now = inputs if begins else [buffers.x] * RANKS
        buffers.out[:] = reference.reduce([leaves_now[rank] for rank in order])

    def one_is_wrong() -> None:
        reduce([0, 1, 2])
        buffers.out.view(bits)[7] = 1

    calls: dict[str, Call] = {
        "right": lambda: reduce([0, 1, 2]),
        "one is wrong": one_is_wrong,
        "nothing": lambda: None,
        "another order": lambda: reduce([1, 2, 0]),
    }
    take_turns(calls, ROUNDS, buffers.turn(in_a_row))
    wrong = buffers.wrong(calls)
    assert wrong["right"] == 0
    assert wrong["one is wrong"] == ROUNDS
    assert wrong["nothing"] > ROUNDS * COUNT * 0.9  # neither stale results nor inputs pass
    assert wrong["another order"] > ROUNDS * COUNT / 3


@pytest.mark.parametrize(
    ("looks", "least", "found"),
    [
        ([40] * 8, 2, [("near", 2, 1.0, 10.0)]),
        ([40] * 4 + [200] * 4, 1, [("near", 1, 1.0, 10.0), ("far", 1, 5.0, 50.0)]),
        # The first turn flips, so it is repeated. Far has one turn of each, which is too few.
        ([40, 200] + [40] * 4 + [200] * 4, 2, [("mixed", 2, 3.0, 30.0)]),
        ([40, 200] * 3 + [40] * 6, 1, [("near", 1, 1.0, 10.0)]),
    ],
    ids=["one phase", "two", "too few", "one is dropped"],
)
def test_calls_are_compared_within_a_phase(
    looks: list[int], least: int, found: list[tuple[str, int, float, float]]
) -> None:
    planted, now = iter(looks), [0]
    takes = {"ours": 1.0, "theirs": 10.0}
    called = []

    def look() -> float:
        now[0] = next(planted)
        return now[0] * 1e-9

    def turn(call: Call) -> tuple[float]:
        call()
        return (takes[called[-1]] * (1 if now[0] < 120 else 5),)

    calls: dict[str, Call] = {name: lambda name=name: called.append(name) for name in takes}
    seen = [
        (each.phase, each.turns, each.medians["ours"][0], each.medians["theirs"][0])
        for each in take_turns_by_phase(calls, 2, turn, look, least)
    ]
    assert seen == found
    assert next(planted, None) is None


def test_commits_are_compared_within_a_phase() -> None:
    def rounds(*each: str) -> list[between_commits.Round]:
        """Each round's phases of the trees, where this one takes twice as long, far 5 times."""
        return [
            {
                name: phase.Turn(
                    1e-6 * (1 + (name == "this")) * (1 if now == "near" else 5),
                    *(now, 0.0, now == "mixed"),
                )
                for name, now in zip(between_commits.TREES, phases.split(), strict=True)
            }
            for phases in each
        ]

    seen = {
        "a": rounds("near near near", "far far far", "far far near", "near far far"),
        "b": rounds("near mixed near", "mixed mixed mixed"),
    }
    assert [" ".join(str(row).split()) for row in between_commits.rows_of(seen)] == [
        "a near 1.00 us again 1.000 this 2.000",
        "a far 5.00 us again 1.000 this 2.000",
    ]
    assert between_commits.phases_of(seen) == (
        "phases seen, in blocks: 7 near, 7 far, 4 mixed; 4 repeated, 12 dropped"
    )


def test_commits_are_compared_round_by_round() -> None:
    # A machine that becomes slower and slower: the medians of each tree say 1.25.
    took = [(1.0, 1.5), (2.0, 2.5), (9.0, 18.0)]
    seen = {
        "a": [
            {
                name: phase.Turn(this if name == "this" else other, "near", 0.0, 0)
                for name in between_commits.TREES
            }
            for other, this in took
        ]
    }
    [row] = between_commits.rows_of(seen)
    assert (row.rounds, row.seconds, row.again, row.this) == (3, 2.0, 1.0, 1.5)


def test_one_call_is_compared() -> None:
    out, wanted = np.zeros(9, np.float32), np.arange(9, dtype=np.float32)

    def make(wrong: int = 0) -> int:
        out[:] = wanted
        out.view("u4")[7] ^= wrong
        return 3

    check("right", make, [(out, wanted)], 3)
    for name, call in {"stale": lambda: 3, "one bit": lambda: make(1)}.items():
        with pytest.raises(AssertionError, match=f"{name} makes other bits"):
            check(name, call, [(out, wanted)], 3)
    with pytest.raises(AssertionError, match="short returns 3, not 4"):
        check("short", make, [(out, wanted)], 4)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ({"2 ranks": [{"wrong": 0, "gloo's wrong": 7}]}, 0),
        ({"2 ranks": [{"wrong": 0}, {"wrong": 3}], "4 ranks": [{"wrong": 2}]}, 5),
    ],
)
def test_a_benchmark_writes_what_it_measured_and_fails_where_elements_are_wrong(
    tmp_path, monkeypatch: pytest.MonkeyPatch, rows, wrong: int
) -> None:
    def measure(run: Run) -> dict[str, object]:
        return {"rounds": run.rounds, "place": run.options["place"], "rows": rows}

    benchmark = Benchmark("x", "What?", measure, options={"place": "here"}, file="y")
    arguments = ["x", "--out", str(tmp_path / "new"), "--rounds", "3", "--place", "there"]
    monkeypatch.setattr(sys, "argv", arguments)
    says = pytest.raises(SystemExit, match=f"^{wrong} elements are wrong: see .*/new/y.json")
    with says if wrong else contextlib.nullcontext():
        benchmark.main()
    record = json.loads((tmp_path / "new" / "y.json").read_text())
    assert (record["rounds"], record["place"], record["rows"]) == (3, "there", rows)
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["pycollective"]


def test_ranks_hand_over_what_rank_0_made(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "answer.json"
    for answer in (None, {"took": 1.5}):
        benchmark = Benchmark("x", "", lambda run: {}, lambda run, made=answer: made)
        monkeypatch.setattr(sys, "argv", ["x", "--on-a-rank", str(out), "--rounds", "1"])
        benchmark.main()
        assert out.exists() == (answer is not None)
    assert json.loads(out.read_text()) == {"took": 1.5}
