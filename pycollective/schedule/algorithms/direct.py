"""Direct: every rank sends each shard straight to its owner, who sends the result to all.

Two steps, and the fewest bytes that an all-reduce can do with, because only inputs and results
travel; but n - 1 messages a rank in each step.
"""

from __future__ import annotations

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import Algorithm, Transfer, a_shard_each, later, leaf


def collect(ranks: int, owner: int, rank: int) -> list[Transfer]:
    """All ranks' inputs to `owner`; one step."""
    if rank != owner:
        return [Transfer(0, rank, owner, leaf(rank))]
    return [Transfer(0, other, owner, leaf(other)) for other in range(ranks) if other != owner]


def _spread(ranks: int, owner: int, rank: int) -> list[Transfer]:
    """The shard from `owner` to all; one step."""
    if rank != owner:
        return [Transfer(0, owner, rank)]
    return [Transfer(0, owner, other) for other in range(ranks) if other != owner]


def _straight(source: int, target: int, rank: int) -> list[Transfer]:
    """The shard from `source` to `target`; one step."""
    return [Transfer(0, source, target)] if source != target and rank in (source, target) else []


def _all_reduce(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    n = topology.ranks
    return collect(n, shard, rank) + later(_spread(n, shard, rank), 1)


def _reduce(topology: Topology, shard: int, root: int, rank: int) -> list[Transfer]:
    return collect(topology.ranks, shard, rank) + later(_straight(shard, root, rank), 1)


def _all_to_all(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    source, target = divmod(shard, topology.ranks)
    return _straight(source, target, rank)


DIRECT = Algorithm(
    "direct",
    "inputs straight to the owner of each shard, results straight to all",
    a_shard_each,
    {
        "all_reduce": _all_reduce,
        "reduce_scatter": lambda topology, shard, _, rank: collect(topology.ranks, shard, rank),
        "all_gather": lambda topology, shard, _, rank: _spread(topology.ranks, shard, rank),
        "reduce": _reduce,
        "broadcast": lambda topology, _, root, rank: _spread(topology.ranks, root, rank),
        "gather": lambda _, shard, root, rank: _straight(shard, root, rank),
        "scatter": lambda _, shard, root, rank: _straight(root, shard, rank),
        "all_to_all": _all_to_all,
    },
)
