"""What hierarchical costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from fractions import Fraction
from math import log2

import pytest

from pycollective.schedule import Topology, make_schedule
from pycollective.schedule.steps import Receive, Send, Type
from tests.schedule.proved import bytes_sent, every, proved

BLOCKS = [(2, 4), (4, 4), (8, 8), (2, 8), (16, 4), (32, 2), (64, 1), (1, 8)]


@pytest.mark.parametrize(("hosts", "local"), BLOCKS)
def test_hierarchical_on_aligned_blocks(hosts: int, local: int) -> None:
    """A leaf to each carrier of the host, one node a host across, and the same way back.

    Up to 8 hosts carriers send straight to the owner; from 16 on they halve, in log2(hosts) steps.
    """
    n = hosts * local
    straight = hosts <= 8
    inside = Fraction(2 * (local - 1), local)
    node = 4 if local > 1 else 2
    if straight or local > 1:
        up = Fraction(node * (hosts - 1), n)
    else:  # leaves in the first step of halving, which takes half of the shards
        up = 1 + Fraction(4 * (hosts // 2 - 1), n)
    back = Fraction(2 * (hosts - 1), n)
    steps = (1 if straight else int(log2(hosts))) if hosts > 1 else 0
    messages = local - 1 + (hosts - 1 if straight else steps)
    within = local > 1  # else the first step, and the last, is nobody's
    for operation, phases, sent in (
        ("all_reduce", 2, inside + up + back + inside),
        ("reduce_scatter", 1, inside + up),
        ("all_gather", 1, back + inside),
    ):
        traffic = proved(operation, "hierarchical", n, f"{hosts}x{local}")
        assert traffic.messages == every(phases * messages, n)
        assert bytes_sent(traffic) == every(sent, n)
        last_is_idle = not within and operation != "reduce_scatter"
        assert traffic.steps == phases * (1 + steps) - last_is_idle


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 8), (8, 8), (16, 4), (3, 4), (11, 2)])
def test_hierarchical_sends_one_node_a_host_across(hosts: int, local: int) -> None:
    """Hosts of an aligned block each, any number of them: binary blocks of hosts keep the order."""
    topology = Topology.parse(f"{hosts}x{local}", hosts * local)
    schedule = make_schedule("reduce_scatter", "hierarchical", topology)
    for shard in range(schedule.shards):
        across = set()
        for rank, (steps, types) in schedule.lowered(shard).items():
            for step in steps:
                if isinstance(step, Send) and topology.host_of[rank] != topology.host_of[step.to]:
                    assert [types[buffer] for buffer in step.buffers] in (
                        [Type.NODE],
                        [Type.RESULT],
                    )
                    across.add(topology.host_of[rank])
        assert len(across) >= hosts - 1


def test_hierarchical_keeps_to_itself_what_it_can() -> None:
    """Every rank of a host carries its own part across: as many messages from each."""
    traffic = proved("all_reduce", "hierarchical", 16, "4x4")
    assert len(set(traffic.messages)) == 1
    topology = Topology.parse("4x4", 16)
    schedule = make_schedule("all_reduce", "hierarchical", topology)
    across = {
        (step.source, rank)
        for shard in range(16)
        for rank, (steps, _) in schedule.lowered(shard).items()
        for step in steps
        if isinstance(step, Receive) and topology.host_of[step.source] != topology.host_of[rank]
    }
    assert {(a % 4, b % 4) for a, b in across} == {(place, place) for place in range(4)}
