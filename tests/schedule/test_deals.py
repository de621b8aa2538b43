"""Schedules that begin with the nodes of a deal: their proof, a rank's own steps, their plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import _core
from pycollective.errors import ConfigurationError
from pycollective.leaves.deal import Deal
from pycollective.planning.planner import Planner
from pycollective.schedule import OPERATIONS, Schedule, Topology, algorithms_for, make_schedule
from pycollective.schedule.layout import lay_out, needed, workspace
from pycollective.schedule.lower import dealt_nodes
from pycollective.schedule.plan import make_plan
from pycollective.schedule.proof import Fault, check_shard
from pycollective.schedule.steps import Combine, Receive, Send, Type
from pycollective.schedule.transfer import ranges_of
from tests.schedule.test_proof import topologies

REDUCTIONS = [
    (op, name) for op in OPERATIONS if OPERATIONS[op].reduces for name in algorithms_for(op)
]


@st.composite
def deals(draw: st.DrawFn, ranks: int, most: int) -> Deal:
    """Runs, or any sets; to all ranks or to a few of them, which may be one."""
    leaves = draw(st.integers(1, most))
    if draw(st.booleans()):
        return Deal.contiguous(ranks, leaves)
    givers = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
    owners = [draw(st.sampled_from(givers)) for _ in range(leaves)]
    return Deal.of(
        leaves, [[leaf for leaf, own in enumerate(owners) if own == r] for r in range(ranks)]
    )


def prove(schedule: Schedule) -> None:
    ranks, deal = schedule.topology.ranks, schedule.deal
    for shard in range(schedule.shards):
        lowered = schedule.lowered(shard)
        check_shard(schedule.operation, shard, ranks, schedule.root, lowered, deal)


@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
@pytest.mark.parametrize("most", [16, pytest.param(40, marks=pytest.mark.storm)])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_every_schedule_of_a_deal_is_right(
    operation: str, algorithm: str, most: int, data: st.DataObject
) -> None:
    """And so are a rank's plan, and the workspace."""
    topology = data.draw(topologies(most), "topology")
    ranks = topology.ranks
    deal = data.draw(deals(ranks, 3 * most), "deal")
    root = data.draw(st.integers(0, ranks - 1), "root") if OPERATIONS[operation].rooted else 0
    schedule = make_schedule(operation, algorithm, topology, root, deal)
    prove(schedule)
    layouts = {rank: lay_out(schedule, rank) for rank in range(ranks)}
    assert workspace(schedule) == needed(layouts.values())
    rank = data.draw(st.integers(0, ranks - 1), "rank")
    plan = make_plan(schedule, rank)
    assert plan == make_plan(schedule, rank, layouts) == make_plan(schedule, rank, {})
    assert (plan.leaves, plan.rows) == (deal.leaves, len(deal.nodes(rank)))
    # Whoever would have heard of a call hears of it, whatever there is to send.
    assert plan.peers == make_plan(replace(schedule, deal=None), rank).peers


@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_one_block_each_sends_what_one_leaf_each_does(operation: str, algorithm: str) -> None:
    """Aligned blocks: the same steps, with nodes in place of leaves."""
    topology = Topology.parse("2x3", 6)
    plain = make_schedule(operation, algorithm, topology, 0)
    blocks = replace(plain, deal=Deal.contiguous(6, 24))
    for shard in range(plain.shards):
        for rank, (steps, types) in plain.lowered(shard).items():
            dealt = blocks.lowered(shard)[rank]
            wide = [Type.NODE if kind is Type.LEAF else kind for kind in types]
            assert dealt.types == wide
            moves = [step for step in steps if type(step) is not Combine]
            assert [step for step in dealt.steps if type(step) is not Combine] == moves


def test_a_partial_of_ranks_is_all_that_their_leaves_come_to() -> None:
    turns = random.Random(3)
    for _ in range(200):
        leaves, ranks = turns.randrange(1, 40), turns.randrange(1, 9)
        owner = [turns.randrange(ranks) for _ in range(leaves)]
        deal = Deal.of(leaves, [[i for i in range(leaves) if owner[i] == r] for r in range(ranks)])
        some = [rank for rank in range(ranks) if turns.randrange(2)]
        mine = [[i for i in range(leaves) if owner[i] in some]]
        rest = [[i for i in range(leaves) if owner[i] not in some]]
        assert dealt_nodes(ranges_of(some), deal) == Deal.of(leaves, mine + rest).nodes(0)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ((((0, 4),), ((4, 8),), ((8, 12),)), "to 3 ranks, and there are 2"),
        ((((0, 4),), ((3, 8),)), "4 is not given once|3 is not given once"),
        ((((0, 4),), ((5, 8),)), "4 is not given once"),
        ((((0, 4),), ((4, 7),)), "7 of 8 leaves are dealt"),
        ((((0, 8),),), "to 1 ranks, and there are 2"),
    ],
)
def test_a_deal_that_is_none_is_no_proof(held: tuple, says: str) -> None:
    """A leaf twice, a leaf lacking, leaves that are not there, another number of ranks."""
    right = make_schedule(
        "all_reduce", "direct", Topology.single_host(2), deal=Deal.contiguous(2, 8)
    )
    none = Deal.of(8, [range(8)])
    object.__setattr__(none, "held", held)  # as Deal() refuses: the proof does not rely on that
    with pytest.raises(Fault, match=says):
        check_shard(right.operation, 0, 2, 0, right.lowered(0), none)


class Cleared(dict):
    """What is kept in it, another thread clears at once."""

    def __setitem__(self, key: object, value: object) -> None:
        self.clear()


def test_a_plan_is_returned_though_it_is_not_kept() -> None:
    planner = Planner(1, (0, 1), transport="gloo")
    planner._of_deals, planner._chosen = Cleared(), Cleared()
    program = planner.of_deal("all_reduce", Deal.contiguous(2, 7), 0, "auto", 4096)
    assert isinstance(program, _core.Program)


def test_a_spoiled_schedule_of_a_deal_is_caught() -> None:
    """Siblings swapped, a row lacking or taken for another, a root finished by a rank too soon."""
    schedule = make_schedule(
        "all_reduce", "ring", Topology.single_host(3), deal=Deal.contiguous(3, 11)
    )
    right = schedule.lowered(1)

    def caught(rank: int, index: int, step: object, says: str) -> None:
        steps = list(right[rank].steps)
        steps[index] = step
        spoiled = {**right, rank: right[rank]._replace(steps=steps)}
        with pytest.raises(Fault, match=says):
            check_shard(schedule.operation, 1, 3, 0, spoiled, schedule.deal)

    check_shard(schedule.operation, 1, 3, 0, right, schedule.deal)
    spoilt = 0
    for rank, own in right.items():
        for index, step in enumerate(own.steps):
            if isinstance(step, Combine) and len(step.operands) > 1:
                (first, a), (second, b), *rest = step.operands
                swapped = ((first, b), (second, a), *rest)
                caught(rank, index, step._replace(operands=swapped), r"takes \(")
                reverse = ((second, b), (first, a), *rest)
                caught(rank, index, step._replace(operands=reverse), "each once, in order")
                spoilt += 1
            elif isinstance(step, (Send, Receive)) and len(step.buffers) > 1:
                fewer = step._replace(buffers=step.buffers[1:])
                caught(rank, index, fewer, "buffers of|before it is written")
                spoilt += 1
    assert spoilt == 3


def test_a_deal_is_for_the_ranks_of_a_reduction() -> None:
    with pytest.raises(ConfigurationError, match="cannot have a deal of leaves to 3 ranks"):
        make_schedule("reduce", "tree", Topology.single_host(4), deal=Deal.contiguous(3, 8))
    with pytest.raises(ConfigurationError, match="broadcast on 4 ranks cannot have a deal"):
        make_schedule("broadcast", "tree", Topology.single_host(4), deal=Deal.contiguous(4, 8))
