"""What the direct way takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from pycollective.schedule.counts import LEAF, RESULT, Load, Phase, Phases
from pycollective.schedule.topology import Topology


def _all_to_all_count(topology: Topology, shard: Load, adds: float = 0) -> Phases:
    """Every rank has a message for every other."""
    n, sizes = topology.ranks, {len(host) for host in topology.hosts}
    if n == 1:
        return ()
    widest = max(sizes)
    within, across = widest - 1, widest * (n - widest)
    return (Phase(shard.times(within / n, within), shard.times(across / n, 2 * across), adds),)


def _one_to_all_count(topology: Topology, shard: Load) -> Phases:
    """Rank 0 has a message for every other, or every other one for rank 0."""
    n, here = topology.ranks, len(topology.hosts[0])
    if n == 1:
        return ()
    return (Phase(shard.times(here - 1, here - 1), shard.times(n - here, n - here)),)


def _collect_count(topology: Topology) -> Phases:
    n = topology.ranks
    return _all_to_all_count(topology, LEAF, (n - 1) / n)


def _spread_count(topology: Topology) -> Phases:
    return _all_to_all_count(topology, RESULT)


def _gather_count(topology: Topology) -> Phases:
    return _one_to_all_count(topology, RESULT.times(1 / topology.ranks))


COUNTS = {
    "all_reduce": lambda topology: _collect_count(topology) + _spread_count(topology),
    "reduce_scatter": _collect_count,
    "all_gather": _spread_count,
    "reduce": lambda topology: _collect_count(topology) + _gather_count(topology),
    "broadcast": lambda topology: _one_to_all_count(topology, RESULT),
    "gather": _gather_count,
    "scatter": _gather_count,
    "all_to_all": _spread_count,
}
