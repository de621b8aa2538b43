"""Direct: every rank sends each shard straight to its owner, who sends the result to all.

Two steps, and the fewest bytes that an all-reduce can do with, because only inputs and results
travel; but n - 1 messages a rank in each step.
"""

from __future__ import annotations

from .algorithm import Algorithm, a_shard_each
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
)
