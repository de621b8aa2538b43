"""Where two runs part: the step, leaf, parameter and ranks that are named."""

from __future__ import annotations

import pytest

from pycollective import ConfigurationError
from pycollective.ledger.compare import compare
from pycollective.ledger.layout import RESULT
from pycollective.ledger.reader import read
from pycollective.ledger.writer import Writer
from tests.ledger.made import alike, changed, header, note, run

W, B, LAST = "first.weight", "first.bias", "last.weight"


def compared(tmp_path, first="a", second="b"):
    return compare(read(tmp_path / first), read(tmp_path / second))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (6, 2), (8, 3)])
def test_runs_of_the_same_bits_are_the_same_on_any_ranks(tmp_path, sizes):
    run(tmp_path / "a", sizes[0])
    run(tmp_path / "b", sizes[1])
    found = compared(tmp_path)
    assert found.same
    assert str(found) == "4 steps have the same bits, to step 3"


def test_the_first_leaf_that_differs_is_named_with_both_ranks(tmp_path):
    where = [(2, 4, B), (2, 4, W), (2, 5, LAST), (2, RESULT, W), (3, 0, W)]
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 3, changed(*where))
    found = compared(tmp_path)
    assert not found.same
    assert str(found).splitlines() == [
        "step 2, first.bias, leaf 4: rank 0 of 1 gave other bits than rank 2 of 3",
        "so do 1 more parameters of this leaf, later in backward",
        "so do 1 more of 6 leaves of this step",
        "before that 2 steps have the same bits, to step 1",
    ]
    back = str(compared(tmp_path, "b", "a")).splitlines()
    assert back[0] == "step 2, first.bias, leaf 4: rank 2 of 3 gave other bits than rank 0 of 1"
    assert back[1:] == str(found).splitlines()[1:]


def test_an_average_alone(tmp_path):
    run(tmp_path / "a", 2)
    run(tmp_path / "b", 3, changed((0, RESULT, W), (0, RESULT, LAST)))
    assert str(compared(tmp_path)).splitlines() == [
        "step 0, last.weight, average: rank 0 of 2 has other bits than rank 0 of 3",
        "so do 1 more parameters of the averages",
        "all 6 leaves have the same bits, and the average differs: the sum or its order differs",
        "before that no step is in both runs",
    ]


def test_without_leaves_averages_are_compared(tmp_path):
    of = header(leaves=0, seed=0)
    for folder, bits in (("a", alike), ("b", changed((3, RESULT, B)))):
        for rank in range(2):
            note(tmp_path / folder, rank, 2, bits=bits, of=of)
    assert str(compared(tmp_path)).splitlines() == [
        "step 3, first.bias, average: rank 0 of 2 has other bits than rank 0 of 2",
        "before that 3 steps have the same bits, to step 2",
    ]


def test_the_odd_rank_of_one_run_is_named(tmp_path):
    run(tmp_path / "a", 2)
    for rank in range(3):
        note(tmp_path / "b", rank, 3, bits=changed((1, RESULT, W)) if rank == 1 else alike)
    first, *_ = str(compared(tmp_path)).splitlines()
    in_b = f"in {tmp_path / 'b'} rank 1 of 3 has other bits than rank 0 of 3, rank 2 of 3"
    assert first == f"step 1, first.weight, average: {in_b}"
    assert str(compared(tmp_path, "b", "b")).splitlines()[0] == first


def test_a_leaf_that_was_computed_twice(tmp_path):
    """By two ranks of an elastic run: the same bits are taken; others are a finding of their own,
    before what differs between the runs."""
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 4)
    for bits in (b"", b"!"):
        assert compared(tmp_path).same
        writer = Writer(tmp_path / "b", header(), 2, 4)
        writer.result(1, 0, alike(1, RESULT, W))
        writer.note_ranks(0, 3)
        writer.gradient(2, 3, 0, alike(2, 3, W) + bits)
        writer.end_leaf()
        writer.flush()
        writer.close()
    twice, *_ = str(compared(tmp_path)).splitlines()
    what, _, who = twice.partition(": ")
    assert what == f"leaf 3 of step 2 was computed twice with other bits, in {tmp_path / 'b'}"
    assert "rank 0 of 3" in who
    assert who.endswith("; first.weight is the first parameter")


def test_a_leaf_that_one_run_lacks_is_not_compared_and_a_parameter_is(tmp_path):
    run(tmp_path / "b", 2, steps=[0])
    note(tmp_path / "killed", steps=[0], leaves=[0, 1, 2, 3])
    assert compared(tmp_path, "killed").same
    note(tmp_path / "a", steps=[0], bits=changed((0, RESULT, W)), leaves=[0, 1, 2, 3])
    _, said, _ = str(compared(tmp_path)).splitlines()
    assert said == "4 of 6 leaves are in both, with the same bits"
    writer = Writer(tmp_path / "c", header(), 1, 2)
    for place in (2, 0):  # first.bias is not used
        writer.gradient(0, 4, place, alike(0, 4, header().parameters[place].name))
    writer.end_leaf()
    writer.flush()
    writer.close()
    has = "step 0, first.bias, leaf 4: rank 1 of 2 has a gradient of it, and rank 1 of 2 has none"
    assert str(compared(tmp_path, "b", "c")).splitlines()[0] == has
    assert str(compared(tmp_path, "c", "b")).splitlines()[0] == has


def test_a_run_that_was_resumed_and_one_that_is_shorter(tmp_path):
    run(tmp_path / "a", 2, steps=range(8))
    run(tmp_path / "b", 3, steps=range(5))
    assert str(compared(tmp_path)).splitlines() == [
        "5 steps have the same bits, to step 4",
        f"{tmp_path / 'a'} has 8 steps, 0 to 7",
        f"{tmp_path / 'b'} has 5 steps, 0 to 4",
    ]
    assert not compared(tmp_path).same
    run(tmp_path / "b", 1, steps=range(3, 8))  # from a checkpoint of step 3
    assert compared(tmp_path).same
    run(tmp_path / "c", 1, steps=range(9, 12))
    with pytest.raises(ConfigurationError, match=r"steps 0 to 7, and .* 9 to 11: none is in both"):
        compared(tmp_path, "a", "c")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (header(leaves=12), "leaves 6, and leaves 12"),
        (header(seed=1), "seed 3, and seed 1"),
        (header((W, B)), "3 parameters, and 2"),
        (header((W, "x", LAST)), "parameter first.bias of float32, shape (2, 3), and x of float32"),
    ],
)
def test_other_trainings_are_not_compared(tmp_path, other, what):
    note(tmp_path / "a")
    note(tmp_path / "b", of=other)
    with pytest.raises(ConfigurationError, match="are of different trainings") as raised:
        compared(tmp_path)
    assert what in str(raised.value)


def test_steps_of_any_number(tmp_path):
    far = (1 << 64) - 1
    run(tmp_path / "a", 1, steps=[5, far - 1, far])
    run(tmp_path / "b", 2, changed((far, 1, W)), steps=[5, far - 1, far])
    first, *_, last = str(compared(tmp_path)).splitlines()
    assert first.startswith(f"step {far}, first.weight, leaf 1: ")
    assert last == f"before that 2 steps have the same bits, to step {far - 1}"
