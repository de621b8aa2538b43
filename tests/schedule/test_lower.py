"""Lowering: what transfers become, and which make no sense."""

from __future__ import annotations

import random
from itertools import groupby
from operator import itemgetter

from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective.schedule import (
    OPERATIONS,
    Topology,
    Transfer,
    algorithms_for,
    make_schedule,
)
from pycollective.schedule.lower import lower
from pycollective.schedule.operation import Operation
from pycollective.schedule.proof import check_shard
from pycollective.schedule.steps import INPUT, OUTPUT, Combine, Copy, RankSteps, Receive, Send, Type
from pycollective.schedule.transfer import ranges_of

REDUCE = OPERATIONS["reduce"]
ALL_REDUCE = OPERATIONS["all_reduce"]
ALL_GATHER = OPERATIONS["all_gather"]


def lower_all(
    operation: Operation, ranks: int, root: int, pairs: list[tuple[int, int, int]]
) -> dict[int, RankSteps]:
    """The steps of each rank, from who sends to whom in which step."""
    has = [{rank} for rank in range(ranks)]
    own: list[list[Transfer]] = [[] for _ in range(ranks)]
    for step, together in groupby(sorted(pairs), key=itemgetter(0)):
        arrived = []
        for _, source, target in together:
            leaves = None if len(has[source]) == ranks else ranges_of(sorted(has[source]))
            for rank in (source, target):
                own[rank].append(Transfer(step, source, target, leaves))
            arrived.append((target, {*has[source]}))
        for target, more in arrived:
            has[target] |= more
    steps = {rank: lower(operation, 0, ranks, root, rank, own[rank]) for rank in range(ranks)}
    return {rank: each for rank, each in steps.items() if each is not None}


def test_what_three_ranks_do() -> None:
    """Rank 1 and then rank 2 to rank 0, and the root from there to rank 2."""
    lowered = lower_all(REDUCE, 3, 2, [(0, 1, 0), (1, 2, 0), (2, 0, 2)])
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
    lowered = lower_all(REDUCE, 5, 0, [(0, rank, 0) for rank in range(1, 5)])
    last = lowered[0].steps[-1]
    operands = tuple(((rank, rank + 1), rank + 1 if rank else INPUT) for rank in range(5))
    assert last == Combine(0, OUTPUT, (0, 5), operands, True)
    assert sum(isinstance(step, Combine) for step in lowered[0].steps) == 1


def test_nodes_are_sent_ascending() -> None:
    """Rank 4 gets leaf 3 first, and then leaf 0."""
    lowered = lower_all(REDUCE, 6, 1, [(0, 3, 4), (1, 0, 4), (2, 4, 1)])
    assert lowered[4].steps == [
        Receive(0, 3, (2,)),
        Receive(1, 0, (3,)),
        Send(2, 1, (3, 2, INPUT)),
    ]


def test_alone_a_rank_finishes_or_copies_its_input() -> None:
    assert lower_all(ALL_REDUCE, 1, 0, [])[0].steps == [
        Combine(-1, OUTPUT, (0, 1), (((0, 1), INPUT),), True)
    ]
    assert lower_all(ALL_GATHER, 1, 0, [])[0].steps == [Copy(-1, OUTPUT, INPUT)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["all_reduce", "reduce_scatter"]), st.integers(1, 30), st.randoms())
def test_the_transfers_may_come_in_any_order(
    operation: str, n: int, shuffler: random.Random
) -> None:
    for name in algorithms_for(operation):
        topology = Topology.of_hosts([rank % 3 for rank in range(n)])
        schedule = make_schedule(operation, name, topology)
        shard, rank = shuffler.randrange(schedule.shards), shuffler.randrange(n)
        transfers = schedule.algorithm.transfers[operation](topology, shard, 0, rank)
        shuffler.shuffle(transfers)
        own = lower(schedule.operation, shard, n, 0, rank, transfers)
        assert own == schedule.steps_of(shard, rank)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 65), st.randoms())
def test_any_tree_at_all_keeps_the_order(n: int, shuffler: random.Random) -> None:
    """Ranks in any order hand all they have to any one that comes later, each when it may."""
    ranks = list(range(n))
    shuffler.shuffle(ranks)
    ready = [0] * n  # the step from which on a rank has all that it is given
    pairs = []
    for place, rank in enumerate(ranks[:-1]):
        target = ranks[shuffler.randrange(place + 1, n)]
        step = ready[rank] + shuffler.randrange(3)
        pairs.append((step, rank, target))
        ready[target] = max(ready[target], step + 1)
    lowered = lower_all(REDUCE, n, ranks[-1], pairs)
    check_shard(REDUCE, 0, n, ranks[-1], lowered)
    assert sum(isinstance(step, Send) for own in lowered.values() for step in own.steps) == n - 1
