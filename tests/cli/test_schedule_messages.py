"""What `pycollective schedule` counts and follows: against the proof's counts, and by hand."""

from __future__ import annotations

from collections import Counter

from pycollective.cli import schedule_messages
from pycollective.cli.schedule_messages import Counts, Made, Sent
from pycollective.schedule import OPERATIONS, Topology, algorithms_for, make_schedule


def every_schedule(ranks):
    for operation, kind in OPERATIONS.items():
        for algorithm in algorithms_for(operation):
            for n in ranks:
                for topology in {
                    Topology.single_host(n),
                    Topology.of_hosts([r % 3 for r in range(n)]),
                }:
                    yield make_schedule(operation, algorithm, topology, n - 1 if kind.rooted else 0)


def test_messages_count_once_however_often_they_are_merged(monkeypatch):
    monkeypatch.setattr(schedule_messages, "_PENDING", 3)
    made = make_schedule("all_reduce", "hierarchical", Topology.parse("2x4", 8))
    counts = Counts(8)
    for shard in range(8):
        counts.add(made.lowered(shard))
    assert counts.messages().sum(1).tolist() == [24, 8, 8, 24]


def test_what_is_followed_adds_up_to_what_is_sent():
    """All shards' ways together are all messages, buffer for buffer."""
    for each in every_schedule((2, 3, 6, 8)):
        sent: dict[tuple[int, int, int], Counter[str]] = {}
        for shard in range(each.shards):
            for event in schedule_messages.follow(each, shard):
                if isinstance(event, Made):
                    assert event.finish == (event.node == (0, each.topology.ranks))
                    continue
                kinds = sent.setdefault(event.key, Counter())
                if not event.nodes:
                    kinds["result"] += 1
                for lo, hi in event.nodes:
                    kinds["leaf" if hi == lo + 1 else "node"] += 1
        found = schedule_messages.messages(each)
        assert {key: [k["leaf"], k["node"], k["result"]] for key, k in sent.items()} == {
            key: kinds.tolist() for key, kinds in found.items()
        }


def test_the_way_of_a_shard_on_a_ring():
    made = make_schedule("all_reduce", "ring", Topology.single_host(6))
    events = list(schedule_messages.follow(made, 2))
    sent = [event for event in events if isinstance(event, Sent)]
    around = [(3 + hop) % 6 for hop in range(11)]
    assert [each.key for each in sent] == [(hop, around[hop], around[hop + 1]) for hop in range(10)]
    # Leaves 3, 4, 5, 0 and 1 come along in this order; 4-5 and 0-1 are nodes.
    assert [each.nodes for each in sent] == [
        ((3, 4),),
        ((3, 4), (4, 5)),
        ((3, 4), (4, 6)),
        ((0, 1), (3, 4), (4, 6)),
        ((0, 2), (3, 4), (4, 6)),
        *[()] * 5,
    ]
    assert [(each.step, each.rank, each.node) for each in events if isinstance(each, Made)] == [
        (1, 5, (4, 6)),
        (3, 1, (0, 2)),
        (4, 2, (0, 6)),
    ]
