"""What the ring takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import not_

from pycollective.schedule.algorithms.circle import circle_of
from pycollective.schedule.algorithms.ring_room import handed_on, next_is_near
from pycollective.schedule.counts import NOTHING, Load, Phase, Phases
from pycollective.schedule.topology import Topology


def _busiest(sent: Iterable[tuple[int, int]], ranks: int) -> Load:
    """The load of the place that sends most."""
    loads = (Load(ranks - 1, leaves / ranks, nodes / ranks) for leaves, nodes in sent)
    return max(loads, key=lambda load: load.buffers, default=NOTHING)


def _both_ways(load: Load) -> Load:
    """Of a host, which receives as many messages as it sends."""
    return load.times(1, messages=2)


def _reduce_scatter_count(topology: Topology) -> Phases:
    n = topology.ranks
    if n == 1:
        return ()
    place_of = circle_of(topology).place
    sent = list(zip(*handed_on([place_of[rank] for rank in range(n)]), strict=True))
    near = next_is_near(topology)
    buffers = list(map(sum, sent))
    adds = max(buffers[place - 1] - buffers[place] for place in range(n)) + n - 1
    local, across = compress(sent, near), compress(sent, map(not_, near))
    return (Phase(_busiest(local, n), _both_ways(_busiest(across, n)), adds / n, n - 1),)


def _all_gather_count(topology: Topology) -> Phases:
    n, hosts = topology.ranks, len(topology.hosts)
    if n == 1:
        return ()
    load = Load(n - 1, results=(n - 1) / n)
    across = _both_ways(load) if hosts > 1 else NOTHING
    return (Phase(load if hosts < n else NOTHING, across, 0, n - 1),)


COUNTS = {
    "all_reduce": lambda topology: _reduce_scatter_count(topology) + _all_gather_count(topology),
    "reduce_scatter": _reduce_scatter_count,
    "all_gather": _all_gather_count,
}
