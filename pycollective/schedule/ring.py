"""Ring: each shard travels once around the ranks to be reduced, and once more as the result.

Each rank talks to two neighbours only, and neighbours share a host where they can. A partial grows
to at most ``2 (log2 n - 1)`` nodes on its way: the price of the order (docs/algorithms.md).

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import eq
from typing import NamedTuple

from pycollective.order import parent

from . import handing
from .algorithm import Algorithm, Room, a_shard_each
from .blocks import largest_block
from .counts import NOTHING, Load, Phase, Phases
from .handing import Handing, Ranges, ranges_of
from .lower import Move
from .moves import later
from .ring_room import to_reduce
from .topology import Topology


class _Circle(NamedTuple):
    """The ranks in the order of the ring, host by host, and each rank's place in it."""

    ranks: tuple[int, ...]
    place: dict[int, int]
    ascending: bool  # hosts hold blocks of ranks


@lru_cache(maxsize=8)
def _circle(topology: Topology) -> _Circle:
    ranks = tuple(rank for host in topology.hosts for rank in host)
    place = {rank: place for place, rank in enumerate(ranks)}
    return _Circle(ranks, place, ranks == tuple(range(len(ranks))))


def _around(topology: Topology, first: int, hops: int) -> list[Move]:
    """`hops` moves along the ring, from place `first` on."""
    ranks = _circle(topology).ranks
    n = len(ranks)
    return [
        Move(hop, ranks[(first + hop) % n], ranks[(first + hop + 1) % n]) for hop in range(hops)
    ]


def _reduce_scatter(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, _circle(topology).place[shard] + 1, topology.ranks - 1)


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _around(topology, _circle(topology).place[shard], topology.ranks - 1)


def _all_reduce(topology: Topology, shard: int, root: int) -> list[Move]:
    return _reduce_scatter(topology, shard, root) + later(
        _all_gather(topology, shard, root), topology.ranks - 1
    )


def _arc(circle: _Circle, first: int, length: int) -> Ranges:
    """The ranks at so many places, from `first` on."""
    n = len(circle.ranks)
    first %= n
    end = first + length
    if not circle.ascending:
        return ranges_of(circle.ranks[first:end] + circle.ranks[: max(0, end - n)])
    return ((first, end),) if end <= n else ((0, end - n), (first, n))


def _around_of(topology: Topology, first: int, rank: int, reduces: bool) -> list[Handing]:
    """Those of `_around`, all the way but one hop, that touch `rank`."""
    circle = _circle(topology)
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
    return _around_of(topology, _circle(topology).place[shard] + 1, rank, reduces=True)


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    return _around_of(topology, _circle(topology).place[shard], rank, reduces=False)


def _all_reduce_of(topology: Topology, shard: int, root: int, rank: int) -> list[Handing]:
    back = _all_gather_of(topology, shard, root, rank)
    there = _reduce_scatter_of(topology, shard, root, rank)
    return there + handing.later(back, topology.ranks - 1)


def _near(topology: Topology) -> list[bool]:
    """Of each place, whether the next one is on the same host."""
    ranks = _circle(topology).ranks
    hosts = [topology.host_of[rank] for rank in ranks]
    return list(map(eq, hosts, hosts[1:] + hosts[:1]))


def _reduce_scatter_room(topology: Topology, _root: int) -> Room:
    place_of = _circle(topology).place
    n = topology.ranks
    needed = to_reduce([place_of[rank] for rank in range(n)], _near(topology))
    return Room(max(nodes for nodes, _ in needed), max(leaves for _, leaves in needed), n - 1)


def _all_gather_room(topology: Topology, _root: int) -> Room:
    """Every shard but one goes to the next, whose own it is; where that is on the same host."""
    n = topology.ranks
    return Room(0, n - 1 if topology.widest > 1 else 0, n - 1)


def _all_reduce_room(topology: Topology, root: int) -> Room:
    place_of = _circle(topology).place
    n, near = topology.ranks, _near(topology)
    needed = to_reduce([place_of[rank] for rank in range(n)], near)
    items = max(leaves + (n - 1) * near[place] for place, (_, leaves) in enumerate(needed))
    return Room(max(nodes for nodes, _ in needed), items, 2 * (n - 1))


def _sent(places: Sequence[int], place: int) -> tuple[int, int]:
    """Leaves and nodes, each of one shard, that the rank at `place` sends to be reduced.

    It sends n - 1 partials, of the arcs of 1 to n - 1 places that end with its own. Such an arc
    holds a node of the order if it begins no later than the first of the node's leaves behind
    `place`: when that one lies ``k + 1`` places on, this is so for k arcs. The nodes of a partial
    are those whose parent is not in it, and each parent has two children; so the sum of k over all
    leaves less the sum over all inner nodes is what is sent.

    Args:
        places: of each rank on the ring.
        place: of the rank that sends.
    """
    n = len(places)
    arcs = [(at - place - 1) % n for at in places]
    leaves = buffers = n * (n - 1) // 2
    leaves -= 2 * sum(map(min, arcs[::2], arcs[1::2]))
    if n % 2 and n > 1:
        leaves -= min(arcs[parent((n - 1, n), n)[0] :])
    while len(arcs) > 1:  # a level of the order after another, from the leaves up
        above = list(map(min, arcs[::2], arcs[1::2]))
        buffers -= sum(above)
        arcs = above + arcs[2 * len(above) :]
    return leaves, buffers - leaves


# Up to so many ranks, each is looked at for who sends most.
_FEW = 64


def _busiest(sent: Mapping[int, tuple[int, int]], ranks: int) -> Load:
    """The load of the place that sends most."""
    loads = (Load(ranks - 1, leaves / ranks, nodes / ranks) for leaves, nodes in sent.values())
    return max(loads, key=lambda load: load.buffers, default=NOTHING)


def _both_ways(load: Load) -> Load:
    """Of a host, which receives as many messages as it sends."""
    return load.times(1, messages=2)


def _reduce_scatter_count(topology: Topology) -> Phases:
    """Exact for few ranks; for many, who sends and who adds most is looked for where it should be.

    Partials are largest before the middle of the largest aligned block of ranks, and before its
    end, and the next rank completes most nodes.
    """
    n = topology.ranks
    if n == 1:
        return ()
    order, place_of, _ = _circle(topology)
    places = [place_of[rank] for rank in range(n)]
    host = [topology.host_of[rank] for rank in order]
    ends = [place for place in range(n) if host[place] != host[(place + 1) % n]]
    looked_at = set(range(n))
    if n > _FEW:
        looked_at = set()
        for middle in (largest_block(n) // 2 - 1, largest_block(n) - 1):
            before = max((end for end in ends if end < middle), default=n - 1)
            looked_at |= {middle - 1, middle, before}
        # One of each kind, where there is one.
        looked_at.update(ends[:1], sorted(set(range(n)).difference(ends))[:1])
    sent = {place: _sent(places, place) for place in looked_at}
    adds = max(
        sum(sent[before]) - sum(sent[place]) + n - 1
        for place in looked_at
        if (before := (place - 1) % n) in looked_at
    )
    across = {place: sent[place] for place in looked_at.intersection(ends)}
    local = {place: sent[place] for place in looked_at.difference(ends)}
    return (Phase(_busiest(local, n), _both_ways(_busiest(across, n)), adds / n, n - 1),)


def _all_gather_count(topology: Topology) -> Phases:
    n, hosts = topology.ranks, len(topology.hosts)
    if n == 1:
        return ()
    load = Load(n - 1, results=(n - 1) / n)
    across = _both_ways(load) if hosts > 1 else NOTHING
    return (Phase(load if hosts < n else NOTHING, across, 0, n - 1),)


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
    {
        "all_reduce": _all_reduce_room,
        "reduce_scatter": _reduce_scatter_room,
        "all_gather": _all_gather_room,
    },
    {
        "all_reduce": lambda topology: (
            _reduce_scatter_count(topology) + _all_gather_count(topology)
        ),
        "reduce_scatter": _reduce_scatter_count,
        "all_gather": _all_gather_count,
    },
)
