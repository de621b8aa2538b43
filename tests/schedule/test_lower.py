"""Lowering: what transfers become, and which make no sense."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective.schedule import (
    OPERATIONS,
    ScheduleError,
    Topology,
    Transfer,
    algorithms_for,
    make_schedule,
)
from pycollective.schedule.lower import lower
from pycollective.schedule.proof import check_shard
from pycollective.schedule.steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Type

REDUCE = OPERATIONS["reduce"]
ALL_REDUCE = OPERATIONS["all_reduce"]
ALL_GATHER = OPERATIONS["all_gather"]


def test_what_three_ranks_do() -> None:
    """Rank 1 and then rank 2 to rank 0, and the root from there to rank 2."""
    lowered = lower(REDUCE, 0, 3, 2, [Transfer(0, 1, 0), Transfer(1, 2, 0), Transfer(2, 0, 2)])
    zero, one, two = (lowered[rank] for rank in range(3))
    assert one.steps == [Send(0, 0, (INPUT,))]
    assert two.steps == [Send(1, 0, (INPUT,)), Receive(2, 0, (OUTPUT,))]
    assert zero.steps == [
        Receive(0, 1, (2,)),
        Combine(0, 3, (0, 2), (((0, 1), INPUT), ((1, 2), 2)), False),
        Receive(1, 2, (4,)),
        Combine(1, 5, (0, 3), (((0, 2), 3), ((2, 3), 4)), True),
        Send(2, 2, (5,)),
    ]
    assert zero.types == [Type.LEAF, Type.RESULT, Type.LEAF, Type.NODE, Type.LEAF, Type.RESULT]


def test_what_arrives_together_is_combined_at_once() -> None:
    """One step over all operands: an engine reads each once, and writes nothing in between."""
    lowered = lower(REDUCE, 0, 5, 0, [Transfer(0, rank, 0) for rank in range(1, 5)])
    last = lowered[0].steps[-1]
    operands = tuple(((rank, rank + 1), rank + 1 if rank else INPUT) for rank in range(5))
    assert last == Combine(0, OUTPUT, (0, 5), operands, True)
    assert sum(isinstance(step, Combine) for step in lowered[0].steps) == 1


def test_nodes_are_sent_ascending() -> None:
    """Rank 4 gets leaf 3 first, and then leaf 0."""
    transfers = [Transfer(0, 3, 4), Transfer(1, 0, 4), Transfer(2, 4, 1)]
    lowered = lower(REDUCE, 0, 6, 1, transfers)
    assert lowered[4].steps == [
        Receive(0, 3, (2,)),
        Receive(1, 0, (3,)),
        Send(2, 1, (3, 2, INPUT)),
    ]


def test_only_what_is_lacking_is_sent() -> None:
    transfers = [Transfer(0, 0, 1), Transfer(1, 2, 3), Transfer(2, 3, 1), Transfer(3, 1, 3)]
    lowered = lower(ALL_REDUCE, 0, 4, 0, [*transfers, Transfer(4, 1, 0), Transfer(4, 3, 2)])
    # Rank 3 has (2, 4) when rank 1 has all: it needs no node, but the result.
    assert lowered[3].steps[-2] == Receive(3, 1, (OUTPUT,))
    assert lowered[1].steps[1].node == (0, 2)


def test_alone_a_rank_finishes_or_copies_its_input() -> None:
    assert lower(ALL_REDUCE, 0, 1, 0, [])[0].steps == [
        Combine(-1, OUTPUT, (0, 1), (((0, 1), INPUT),), True)
    ]
    assert lower(ALL_GATHER, 0, 1, 0, [])[0].steps == [Copy(-1, OUTPUT, INPUT)]


@pytest.mark.parametrize(
    ("operation", "transfers", "says"),
    [
        (
            ALL_REDUCE,
            [Transfer(0, 0, 1), Transfer(0, 2, 1), Transfer(1, 1, 2), Transfer(2, 1, 2)],
            "second time",
        ),
        (ALL_GATHER, [Transfer(0, 0, 1), Transfer(1, 1, 0)], "brings the result a second time"),
        (
            ALL_GATHER,
            [Transfer(0, 0, 1), Transfer(1, 1, 2), Transfer(1, 0, 2)],
            "brings the result a second",
        ),
        (ALL_GATHER, [Transfer(0, 1, 2)], "carries nothing"),
        (
            REDUCE,
            [Transfer(0, 0, 1), Transfer(0, 0, 2), Transfer(1, 1, 2), Transfer(1, 0, 2)],
            "carries nothing",
        ),
    ],
)
def test_transfers_that_make_no_sense(operation, transfers: list[Transfer], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        lower(operation, 0, 3, 0, transfers)


def test_a_node_from_two_at_once_is_refused() -> None:
    transfers = [Transfer(0, 2, 0), Transfer(0, 2, 1), Transfer(1, 0, 3), Transfer(1, 1, 3)]
    with pytest.raises(ScheduleError, match=r"brings node \(2, 3\) a second time"):
        lower(ALL_REDUCE, 0, 5, 0, transfers)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["all_reduce", "reduce_scatter"]), st.integers(1, 30), st.randoms())
def test_the_transfers_may_come_in_any_order(
    operation: str, n: int, shuffler: random.Random
) -> None:
    for name in algorithms_for(operation):
        topology = Topology.of_hosts([rank % 3 for rank in range(n)])
        schedule = make_schedule(operation, name, topology)
        shard = shuffler.randrange(schedule.shards)
        transfers = schedule.transfers(shard)
        shuffler.shuffle(transfers)
        assert lower(schedule.operation, shard, n, 0, transfers) == schedule.lowered(shard)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 65), st.randoms())
def test_any_tree_at_all_keeps_the_order(n: int, shuffler: random.Random) -> None:
    """Ranks in any order hand all they have to any one that comes later, each when it may."""
    ranks = list(range(n))
    shuffler.shuffle(ranks)
    ready = [0] * n  # the step from which on a rank has all that it is given
    transfers = []
    for place, rank in enumerate(ranks[:-1]):
        target = ranks[shuffler.randrange(place + 1, n)]
        step = ready[rank] + shuffler.randrange(3)
        transfers.append(Transfer(step, rank, target))
        ready[target] = max(ready[target], step + 1)
    lowered = lower(REDUCE, 0, n, ranks[-1], transfers)
    check_shard(REDUCE, 0, n, ranks[-1], lowered)
    assert sum(isinstance(step, Send) for own in lowered.values() for step in own.steps) == n - 1
