"""Schedules on so many ranks, proved, and what they send: for tests of each algorithm's costs.

Bytes are those that a rank sends for each element of a bf16 buffer: 2 for a leaf or a result, 4 for
a node, which is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache

from pycollective.schedule import Schedule, Topology, make_schedule
from pycollective.schedule.proof import Traffic, verify
from pycollective.schedule.steps import Send, Type

POWERS = [2, 4, 8, 16, 32, 64]
ANY = [*range(1, 34), 47, 48, 63, 64, 65]


def one_host(operation: str, algorithm: str, n: int, root: int = 0) -> Schedule:
    return make_schedule(operation, algorithm, Topology.single_host(n), root)


@cache
def proved(operation: str, algorithm: str, n: int, hosts: str = "", root: int = 0) -> Traffic:
    topology = Topology.parse(hosts or f"1x{n}", n)
    return verify(make_schedule(operation, algorithm, topology, root))


def bytes_sent(traffic: Traffic) -> list[Fraction]:
    """By rank."""
    return [
        Fraction(traffic.bytes_sent(rank, 2, 4)).limit_denominator(1 << 20)
        for rank in range(traffic.ranks)
    ]


def every(value: float | Fraction, n: int) -> list[float | Fraction]:
    return [value] * n


def message_sizes(schedule: Schedule, shard: int) -> Iterator[tuple[Send, list[Type]]]:
    """Each send of a shard, and the types of its buffers."""
    for steps, types in schedule.lowered(shard).values():
        for step in steps:
            if isinstance(step, Send):
                yield step, [types[buffer] for buffer in step.buffers]
