"""Ring: each shard travels once around the ranks to be reduced, and once more as the result.

Each rank receives from the one before it and sends to the one after it, and neighbours share a host
where they can. Shard s of a reduction ends at rank s, from where its result is gathered.

The sum is added in one fixed tree order whatever the algorithm, so a rank forwards partial sums
that cannot be added yet: up to ``2 (log2 n - 1)`` tree nodes an element, where an ordinary ring
forwards one value (docs/inside/algorithms.md).

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
    """The ranks in the order of the ring, host by host, and each rank's place in it.

    Attributes:
        ranks: by place.
        place: by rank.
        is_identity: whether each rank's place is the rank, so that an arc is one range or two.
    """

    ranks: tuple[int, ...]
    place: dict[int, int]
    is_identity: bool

    def arc(self, first: int, length: int) -> Ranges:
        """The ranks at `length` places in a row, from place `first` on."""
        n = len(self.ranks)
        first %= n
        end = first + length
        if not self.is_identity:
            return ranges_of(self.ranks[first:end] + self.ranks[: max(0, end - n)])
        return ((first, end),) if end <= n else ((0, end - n), (first, n))


@lru_cache(maxsize=8)
def _ring(topology: Topology) -> _Ring:
    ranks = tuple(rank for host in topology.hosts for rank in host)
    place = {rank: place for place, rank in enumerate(ranks)}
    return _Ring(ranks, place, ranks == tuple(range(len(ranks))))


def _around(topology: Topology, first: int, rank: int, reduces: bool) -> list[Transfer]:
    """This rank's receive and send as a shard goes once around from place `first`.

    In step i the shard makes its hop i, from place ``first + i`` to the next. With `reduces` it
    carries the inputs of all ranks that it has passed, otherwise the result.
    """
    ring = _ring(topology)
    n = len(ring.ranks)
    place = ring.place[rank]
    hop = (place - first) % n  # how many hops bring the shard here
    transfers = []
    if hop:
        contributors = ring.arc(first, hop) if reduces else None
        transfers.append(Transfer(hop - 1, ring.ranks[place - 1], rank, contributors))
    if hop < n - 1:
        contributors = ring.arc(first, hop + 1) if reduces else None
        transfers.append(Transfer(hop, rank, ring.ranks[(place + 1) % n], contributors))
    return transfers


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
