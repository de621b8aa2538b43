"""The proof accepts every schedule that is right; what is sent is what the transfers say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective.schedule import OPERATIONS, Topology, algorithms_for, make_schedule
from tests.schedule.proved import Proved, transfers_of

ALL = [(op, name) for op in OPERATIONS for name in algorithms_for(op)]


@st.composite
def topologies(draw: st.DrawFn, most: int) -> Topology:
    """1 rank to so many: on one host, in equal blocks, in turn, in unequal blocks, or shuffled."""
    kind = draw(st.sampled_from(["one host", "blocks", "round-robin", "uneven", "shuffled"]))
    if kind == "blocks":
        per_host = draw(st.integers(1, 16))
        hosts = draw(st.integers(1, most // per_host))
        return Topology.of_hosts([rank // per_host for rank in range(hosts * per_host)])
    ranks = draw(st.integers(1, most))
    if kind == "one host":
        return Topology.single_host(ranks)
    hosts = draw(st.integers(1, ranks))
    if kind == "round-robin":
        return Topology.of_hosts([rank % hosts for rank in range(ranks)])
    placed = [draw(st.integers(0, hosts - 1)) for _ in range(ranks)]
    return Topology.of_hosts(sorted(placed) if kind == "uneven" else placed)


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("most", [25, pytest.param(65, marks=pytest.mark.storm)])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_schedule_is_right(
    operation: str, algorithm: str, most: int, data: st.DataObject
) -> None:
    topology = data.draw(topologies(most), "topology")
    ranks = topology.ranks
    rooted = OPERATIONS[operation].rooted
    root = data.draw(st.integers(0, ranks - 1), "root") if rooted else 0
    schedule = make_schedule(operation, algorithm, topology, root)
    traffic = Proved(schedule)
    sent = [
        {each[:3] for each in transfers_of(schedule, shard)} for shard in range(schedule.shards)
    ]
    messages = set().union(*sent)
    assert traffic.messages == [
        sum(source == rank for _, source, _ in messages) for rank in range(ranks)
    ]
    assert traffic.steps == 1 + max((step for step, _, _ in messages), default=-1)
    if not OPERATIONS[operation].reduces:
        assert traffic.buffers.sum(0).tolist() == [0, 0, sum(map(len, sent))]
