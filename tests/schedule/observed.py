"""Counts what a schedule does, step by step, from the steps of all ranks lowered together.

`tests/schedule/test_cost.py` holds the cost model's counts to it, and it to what the proof counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from pycollective.schedule import Schedule, Topology, make_schedule
from pycollective.schedule.steps import Combine, Send, Type

KINDS = (Type.LEAF, Type.NODE, Type.RESULT)


@dataclass
class Step:
    """What happens at one step number: buffers of one shard, by message and kind; additions."""

    sent: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    adds: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Busiest:
    """The most over ranks or hosts, in some steps; buffers in whole ones, weighted by kind."""

    steps: int
    local_messages: float
    across_messages: float
    local: float
    across: float
    adds: float


@dataclass(frozen=True)
class Observed:
    schedule: Schedule
    steps: list[Step]  # those in which something is sent

    def busiest(self, first: int, count: int, wide: float) -> Busiest:
        """Of `count` steps; a node weighs `wide` times as much as a leaf or a result."""
        host_of = self.schedule.topology.host_of
        n = len(host_of)
        shards = n if self.schedule.operation.pieces == "pairs" else self.schedule.shards
        messages: tuple[Counter[object], ...] = (Counter(), Counter())  # local, across
        buffers: tuple[Counter[object], ...] = (Counter(), Counter())
        adds: Counter[int] = Counter()
        for step in self.steps[first : first + count]:
            adds.update(step.adds)
            for (source, target), (leaves, nodes, results) in step.sent.items():
                weight = leaves + nodes * wide + results
                far = host_of[source] != host_of[target]
                for way, rank in (("out", source), ("in", target)):
                    who = host_of[rank] if far else rank
                    messages[far]["both" if far else way, who] += 1
                    buffers[far][way, who] += weight
        most = [max(each.values(), default=0) for each in (*messages, *buffers, adds)]
        return Busiest(
            len(self.steps[first : first + count]),
            *most[:2],
            *(number / shards for number in most[2:]),
        )

    def sent_across(self, wide: float) -> list[float]:
        """What each host sends to others in all; as above."""
        topology = self.schedule.topology
        sent = [0.0] * len(topology.hosts)
        for step in self.steps:
            for (source, target), (leaves, nodes, results) in step.sent.items():
                if topology.host_of[source] != topology.host_of[target]:
                    sent[topology.host_of[source]] += leaves + nodes * wide + results
        return [number / self.schedule.shards for number in sent]


@cache
def observe(operation: str, algorithm: str, topology: Topology, root: int = 0) -> Observed:
    schedule = make_schedule(operation, algorithm, topology, root)
    steps: dict[int, Step] = {}
    for shard in range(schedule.shards):
        for rank, (own, types) in schedule.lowered(shard).items():
            for step in own:
                here = steps.setdefault(step.step, Step())
                if isinstance(step, Send):
                    sent = here.sent.setdefault((rank, step.to), [0, 0, 0])
                    for buffer in step.buffers:
                        sent[KINDS.index(types[buffer])] += 1
                elif isinstance(step, Combine):
                    here.adds[rank] += len(step.operands) - 1
    return Observed(schedule, [steps[number] for number in sorted(steps) if steps[number].sent])
