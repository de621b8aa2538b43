"""What `pycollective bench --tune` times: real inputs each turn, and the reference's result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pycollective import reference
from pycollective.bench import tune
from pycollective.bench.tune import _numbers, turns
from pycollective.schedule import algorithms_for
from tests.harness import results, run_ranks


class Alone:
    """The first of three ranks, which plays the others too, with what they begin with; of `wrong`
    algorithms the last bit is off."""

    rank, size, host_of = 0, 3, (0, 0, 0)

    def __init__(self, *wrong: str) -> None:
        self.wrong = wrong
        self.turns: list[np.ndarray] = []
        self.starts = True

    def barrier(self) -> None:
        self.starts = True

    def all_reduce(self, x: np.ndarray, op: str = "sum", algorithm: str = "auto") -> None:
        if op == "max":
            return
        if self.starts:
            self.turns.append(x.copy())
            self.starts = False
        others = [_numbers(rank, x.size, "float32") for rank in (1, 2)]
        x[:] = reference.reduce([x, *others], op)
        if algorithm in self.wrong:
            x.view(np.uint32)[-1] ^= 1


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that one plays cannot look at the machine together."""
    monkeypatch.setattr(tune, "cores_together", lambda communicator: [0, 1])
    monkeypatch.setattr(tune, "look_together", lambda communicator, cores: 4e-8)


def test_a_table_has_the_times_of_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    names = algorithms_for("all_reduce")
    planted = [(2e-7, 2e-7)] * len(names) + [(4e-8, 2e-7)] + [(4e-8, 4e-8)] * len(names)
    looks, now = iter([look for turn in planted for look in turn]), [0.0]

    def look(communicator: object, cores: object) -> float:
        now[0] = next(looks)
        return now[0]

    def timed(call: Callable[[], object], count: int) -> float:
        for _ in range(count):
            call()
        return count * (1e-3 if now[0] < 1e-7 else 5e-3)

    monkeypatch.setattr(tune, "look_together", look)
    monkeypatch.setattr(tune, "_timed", timed)
    phase, entry = tune.measure(Alone(), "all_reduce", 4096, "float32", rounds=2)
    assert phase == "near"
    assert entry.seconds == pytest.approx(dict.fromkeys(names, 1e-3))
    assert next(looks, None) is None  # and the turn that flipped was repeated


def test_each_turn_begins_with_the_same_inputs() -> None:
    alone = Alone()
    taken = turns(alone, "all_reduce", 4096, "float32", rounds=2)
    assert list(taken) == list(algorithms_for("all_reduce"))
    assert len(alone.turns) >= 3 * len(taken)
    inputs = alone.turns[0]
    assert len(np.unique(inputs)) > 900
    timed = alone.turns[-2 * len(taken) :]
    assert all(np.array_equal(each, inputs) for each in timed)


def test_other_bits_than_the_oracles_are_not_timed() -> None:
    every = algorithms_for("all_reduce")
    wrong = f"all_reduce of 4096 bytes: {every[0]} makes other bits than the reference"
    with pytest.raises(AssertionError, match=wrong):
        turns(Alone(*every), "all_reduce", 4096, "float32", rounds=1)


class Late(Alone):
    """By whom the last bit of a tree is off from its call of that number on."""

    def __init__(self, right: int) -> None:
        super().__init__()
        self.right = right

    def all_reduce(self, x: np.ndarray, op: str = "sum", algorithm: str = "auto") -> None:
        super().all_reduce(x, op, algorithm)
        if algorithm == "tree":
            self.right -= 1
            if self.right < 0:
                x.view(np.uint32)[-1] ^= 1


@pytest.mark.parametrize("seconds", [1e-6, 1.0])  # turns of one call, and of many
def test_the_last_call_of_a_turn_is_compared(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_TURN_SECONDS", seconds)
    monkeypatch.setattr(tune, "_MOST_CALLS", 5)
    rounds = 2
    calls = 1 + 2 + rounds * (1 if seconds < 1 else 5)  # one and two before the turns
    turns(Late(calls), "all_reduce", 4096, "float32", rounds)
    with pytest.raises(AssertionError, match="all_reduce of 4096 bytes: tree makes other bits"):
        turns(Late(calls - 1), "all_reduce", 4096, "float32", rounds)


class Spoiled:
    """A communicator by which no element is right."""

    def __init__(self, comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def __getattr__(self, operation):
        def call(out: np.ndarray, *arguments: np.ndarray, **how: str) -> None:
            getattr(self._comm, operation)(out, *arguments, **how)
            out.view(np.uint32)[:] ^= 1

        return call


def compared(comm, known: int) -> list[bool]:
    """Of each operation whether right bits pass and wrong ones do not."""
    tune.PERIOD, tune._MOST_COMPARED, tune._TURN_SECONDS = 1001, known, 1e-6
    found = []
    for operation in tune.OPERATIONS:
        turns(comm, operation, 24 << 10, "float32", rounds=1)
        try:
            turns(Spoiled(comm), operation, 24 << 10, "float32", rounds=1)
            found.append(False)
        except AssertionError as error:
            found.append("than the reference" in str(error))
    return found


@pytest.mark.parametrize("known", [8 << 20, 100])
def test_all_that_is_known_is_compared(known: int) -> None:
    """Of inputs that repeat, and where only some of all ranks' are made."""
    assert results(run_ranks(compared, 3, known)) == [[True] * len(tune.OPERATIONS)] * 3
