"""Ring: each shard travels once around the ranks to be reduced, and once more as the result.

Each rank receives from the one before it and sends to the one after it, and neighbours share a host
where they can. What travels grows to at most ``2 (log2 n - 1)`` nodes on its way: the price of the
order (docs/algorithms.md).

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 3.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import (
    Algorithm,
    Ranges,
    Transfer,
    a_shard_each,
    later,
    ranges_of,
)


class _Ring(NamedTuple):
    """The ranks in the order of the ring, host by host, and each rank's place in it."""

    ranks: tuple[int, ...]
    place: dict[int, int]
    ascending: bool  # hosts hold blocks of ranks

    def arc(self, first: int, length: int) -> Ranges:
        """The inputs of the ranks at so many places, from `first` on."""
        n = len(self.ranks)
        first %= n
        end = first + length
        if not self.ascending:
            return ranges_of(self.ranks[first:end] + self.ranks[: max(0, end - n)])
        return ((first, end),) if end <= n else ((0, end - n), (first, n))


@lru_cache(maxsize=8)
def _ring(topology: Topology) -> _Ring:
    ranks = tuple(rank for host in topology.hosts for rank in host)
    place = {rank: place for place, rank in enumerate(ranks)}
    return _Ring(ranks, place, ranks == tuple(range(len(ranks))))


def _around(topology: Topology, first: int, rank: int, reduces: bool) -> list[Transfer]:
    """A shard that goes from place `first` all the way around to the place before it."""
    ring = _ring(topology)
    n = len(ring.ranks)
    place = ring.place[rank]
    hop = (place - first) % n
    found = []
    if hop:
        leaves = ring.arc(first, hop) if reduces else None
        found.append(Transfer(hop - 1, ring.ranks[place - 1], rank, leaves))
    if hop < n - 1:
        leaves = ring.arc(first, hop + 1) if reduces else None
        found.append(Transfer(hop, rank, ring.ranks[(place + 1) % n], leaves))
    return found


def _reduce_scatter(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    return _around(topology, _ring(topology).place[shard] + 1, rank, reduces=True)


def _all_gather(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    return _around(topology, _ring(topology).place[shard], rank, reduces=False)


def _all_reduce(topology: Topology, shard: int, root: int, rank: int) -> list[Transfer]:
    results = _all_gather(topology, shard, root, rank)
    return _reduce_scatter(topology, shard, root, rank) + later(results, topology.ranks - 1)


RING = Algorithm(
    "ring",
    "each shard once around the ranks to be reduced, once more as the result",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
)
