"""The inputs must be such that a wrong order, a moved piece or a single bit is counted."""

import numpy as np
import pytest

from pycollective import reference
from pycollective.bench.operations import OPERATIONS, PERIOD, Problem
from pycollective.bench.ranks.case import Case
from pycollective.testing.inputs import leaves


def _case(operation, dtype="float32", size=1024, item_size=4, root=0):
    reduce_op = "sum" if OPERATIONS[operation].reduces else ""
    return Case(operation, dtype, item_size, reduce_op, root, size)


def _rows(case, ranks):
    problem = Problem(OPERATIONS[case.operation], case, ranks, seed=3)
    try:
        return np.fromfile(problem.path, np.uint8).reshape(ranks + 1, case.buffer)
    finally:
        problem.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_two_leaves_do_not_cancel_to_nothing(dtype):
    assert np.mean(reference.reduce(leaves(dtype, "sum", 2, 20_000, seed=1)) == 0) < 0.01


def test_all_reduce_has_the_oracles_answer():
    rows = _rows(_case("all_reduce"), ranks=3)
    inputs = [row.view(np.float32) for row in rows[:3]]
    assert np.array_equal(reference.reduce(inputs, "sum"), rows[3].view(np.float32))


def test_all_gather_starts_with_garbage_where_others_shards_go():
    rows = _rows(_case("all_gather", size=1020), ranks=3)
    answer = rows[3]
    for rank in range(3):
        own = slice(rank * 340, (rank + 1) * 340)
        assert np.array_equal(rows[rank][own], answer[own])
        assert np.count_nonzero(rows[rank] == answer) < 400  # the own shard, and chance


def test_broadcast_starts_with_garbage_everywhere_but_at_the_root():
    rows = _rows(_case("broadcast", root=1), ranks=2)
    assert np.array_equal(rows[1], rows[2])
    assert np.all(rows[0] == 0xA5)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "broadcast"])
def test_what_is_expected_of_each_rank_is_not_there_before(operation):
    case, ranks = _case(operation, size=1020, root=1), 3
    rows = _rows(case, ranks)
    for rank in range(ranks):
        before, expected = rows[rank][case.result(rank, ranks)], case.expected(rows, rank)
        same = np.mean(before == expected)
        if (operation, rank) in (("gather", 0), ("gather", 2), ("scatter", 1)):
            assert same == 1  # inputs alone, which must stay
        else:
            assert same < 0.4  # one shard of three, and chance


def test_all_to_all_expects_what_each_rank_had_for_this_one():
    case, ranks = _case("all_to_all", size=1020), 3
    rows = _rows(case, ranks)
    for rank in range(ranks):
        assert np.all(rows[rank][1020:] == 0xA5)
        parts = case.expected(rows, rank).reshape(ranks, 340)
        for source in range(ranks):
            assert np.array_equal(parts[source], rows[source][:1020].reshape(ranks, 340)[rank])
    leaves_of = rows[:ranks, :1020].reshape(ranks * ranks, 340)
    assert len(np.unique(leaves_of, axis=0)) == ranks * ranks  # none equals another


def test_no_piece_of_a_long_message_equals_another():
    """A period that a power of two divides would hide slots that changed places."""
    assert all(PERIOD % divisor for divisor in range(2, int(PERIOD**0.5) + 1))
    rows = _rows(_case("all_reduce", size=16 << 20), ranks=2)
    slot = 256 << 10
    pieces = rows[2].reshape(-1, slot)
    assert len(np.unique(pieces[:, :64], axis=0)) == len(pieces)
