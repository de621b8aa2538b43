"""Ring: each shard travels once around the ranks to be reduced, and once more as the result.

Each rank talks to two neighbours only, and neighbours share a host where they can. A partial grows
to at most ``2 (log2 n - 1)`` nodes on its way: the price of the order (docs/algorithms.md).

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 3.
"""

from __future__ import annotations

from functools import lru_cache

from .algorithm import Algorithm, a_shard_each
from .lower import Move
from .moves import later
from .topology import Topology


@lru_cache(maxsize=8)
def _circle(topology: Topology) -> tuple[tuple[int, ...], dict[int, int]]:
    """The ranks in the order of the ring, host by host, and each rank's place in it."""
    ranks = tuple(rank for host in topology.hosts for rank in host)
    return ranks, {rank: place for place, rank in enumerate(ranks)}


def _around(topology: Topology, first: int, hops: int) -> list[Move]:
    """`hops` moves along the ring, from place `first` on."""
    ranks, _ = _circle(topology)
    n = len(ranks)
    return [
        Move(hop, ranks[(first + hop) % n], ranks[(first + hop + 1) % n]) for hop in range(hops)
    ]


def _reduce_scatter(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, _circle(topology)[1][shard] + 1, topology.ranks - 1)


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, _circle(topology)[1][shard], topology.ranks - 1)


def _all_reduce(topology: Topology, shard: int, root: int) -> list[Move]:
    return _reduce_scatter(topology, shard, root) + later(
        _all_gather(topology, shard, root), topology.ranks - 1
    )


RING = Algorithm(
    "ring",
    "each shard once around the ranks to be reduced, once more as the result",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
)
