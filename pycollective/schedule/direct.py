"""Direct: every rank sends each shard straight to its owner, who sends the result to all.

Two steps, and the fewest bytes that an all-reduce can do with, because only inputs and results
travel; but n - 1 messages a rank in each step.
"""

from __future__ import annotations

from .algorithm import Algorithm, a_shard_each
from .counts import LEAF, RESULT, Load, Phase, Phases
from .lower import Move
from .moves import later
from .topology import Topology


def collect(ranks: int, owner: int) -> list[Move]:
    """All ranks' leaves to `owner`; one step."""
    return [Move(0, rank, owner) for rank in range(ranks) if rank != owner]


def spread(ranks: int, owner: int) -> list[Move]:
    """The shard from `owner` to all; one step."""
    return [Move(0, owner, rank) for rank in range(ranks) if rank != owner]


def _straight(source: int, target: int) -> list[Move]:
    return [Move(0, source, target)] if source != target else []


def _all_reduce(topology: Topology, shard: int, _root: int) -> list[Move]:
    return collect(topology.ranks, shard) + later(spread(topology.ranks, shard), 1)


def _reduce(topology: Topology, shard: int, root: int) -> list[Move]:
    return collect(topology.ranks, shard) + later(_straight(shard, root), 1)


def _all_to_all(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _straight(*divmod(shard, topology.ranks))


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


DIRECT = Algorithm(
    "direct",
    "inputs straight to the owner of each shard, results straight to all",
    a_shard_each,
    {
        "all_reduce": _all_reduce,
        "reduce_scatter": lambda topology, shard, _: collect(topology.ranks, shard),
        "all_gather": lambda topology, shard, _: spread(topology.ranks, shard),
        "reduce": _reduce,
        "broadcast": lambda topology, _, root: spread(topology.ranks, root),
        "gather": lambda _, shard, root: _straight(shard, root),
        "scatter": lambda _, shard, root: _straight(root, shard),
        "all_to_all": _all_to_all,
    },
    {
        "all_reduce": lambda topology: _collect_count(topology) + _spread_count(topology),
        "reduce_scatter": _collect_count,
        "all_gather": _spread_count,
        "reduce": lambda topology: _collect_count(topology) + _gather_count(topology),
        "broadcast": lambda topology: _one_to_all_count(topology, RESULT),
        "gather": _gather_count,
        "scatter": _gather_count,
        "all_to_all": _spread_count,
    },
)
