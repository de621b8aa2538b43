"""Ring: each shard travels once around the ranks to be reduced, and once more as the result.

Each rank talks to two neighbours only, and neighbours share a host where they can. A partial grows
to at most ``2 (log2 n - 1)`` nodes on its way: the price of the order (docs/algorithms.md).

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 3.
"""

from __future__ import annotations

from pycollective.schedule import handing
from pycollective.schedule.algorithms.base import Algorithm, a_shard_each
from pycollective.schedule.algorithms.circle import Circle, circle_of
from pycollective.schedule.algorithms.patterns import later
from pycollective.schedule.algorithms.ring_counts import COUNTS
from pycollective.schedule.algorithms.ring_room import ROOM
from pycollective.schedule.handing import Handing, Ranges, ranges_of
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology


def _around(topology: Topology, first: int, hops: int) -> list[Move]:
    """`hops` moves along the ring, from place `first` on."""
    ranks = circle_of(topology).ranks
    n = len(ranks)
    return [
        Move(hop, ranks[(first + hop) % n], ranks[(first + hop + 1) % n]) for hop in range(hops)
    ]


def _reduce_scatter(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, circle_of(topology).place[shard] + 1, topology.ranks - 1)


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, circle_of(topology).place[shard], topology.ranks - 1)


def _all_reduce(topology: Topology, shard: int, root: int) -> list[Move]:
    return _reduce_scatter(topology, shard, root) + later(
        _all_gather(topology, shard, root), topology.ranks - 1
    )


def _arc(circle: Circle, first: int, length: int) -> Ranges:
    """The ranks at so many places, from `first` on."""
    n = len(circle.ranks)
    first %= n
    end = first + length
    if not circle.ascending:
        return ranges_of(circle.ranks[first:end] + circle.ranks[: max(0, end - n)])
    return ((first, end),) if end <= n else ((0, end - n), (first, n))


def _around_of(topology: Topology, first: int, rank: int, reduces: bool) -> list[Handing]:
    """Those of `_around`, all the way but one hop, that touch `rank`."""
    circle = circle_of(topology)
    n = len(circle.ranks)
    place = circle.place[rank]
    hop = (place - first) % n
    found = []
    if hop:
        leaves = _arc(circle, first, hop) if reduces else None
        found.append(Handing(hop - 1, circle.ranks[place - 1], rank, leaves))
    if hop < n - 1:
        leaves = _arc(circle, first, hop + 1) if reduces else None
        found.append(Handing(hop, rank, circle.ranks[(place + 1) % n], leaves))
    return found


def _reduce_scatter_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    return _around_of(topology, circle_of(topology).place[shard] + 1, rank, reduces=True)


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    return _around_of(topology, circle_of(topology).place[shard], rank, reduces=False)


def _all_reduce_of(topology: Topology, shard: int, root: int, rank: int) -> list[Handing]:
    back = _all_gather_of(topology, shard, root, rank)
    there = _reduce_scatter_of(topology, shard, root, rank)
    return there + handing.later(back, topology.ranks - 1)


RING = Algorithm(
    "ring",
    "each shard once around the ranks to be reduced, once more as the result",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
    {
        "all_reduce": _all_reduce_of,
        "reduce_scatter": _reduce_scatter_of,
        "all_gather": _all_gather_of,
    },
    ROOM,
    COUNTS,
)
