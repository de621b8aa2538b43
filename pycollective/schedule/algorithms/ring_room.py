"""Places that the ring needs, by formula.

A rank hands on n - 1 partials, of the arcs of 1 to n - 1 places that end with its own. Such an arc
holds a node of the order if it begins no later than the first of the node's leaves behind the rank:
when that one lies ``k + 1`` places on, this is so for k arcs. A partial's nodes are those whose
parent is not in it; so what is handed on are sums and differences of k. From one place to the next
a node's k is one less, but where a leaf of the node is passed, and then it is more by the gap to
the node's next leaf. Each leaf lies under log2(n) nodes or so: n log2(n) gaps tell all places'
sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import eq

from pycollective.order import sibling, split
from pycollective.schedule.algorithms.base import Room
from pycollective.schedule.algorithms.circle import circle_of
from pycollective.schedule.topology import Topology


class _Sum:
    """A sum of multiples of nodes' k, at each place."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.at_first = 0
        self.falls = 0  # from each place to the next
        self.steps = [0] * ranks  # what is added on the way to each place

    def add(self, times: int, places: list[int]) -> None:
        """`times` the k of the node whose leaves are at `places`, ascending."""
        if not times:
            return
        n, steps = self.ranks, self.steps
        behind = bisect_right(places, 0)
        ahead = places[behind] if behind < len(places) else places[0] + n
        self.at_first += times * (ahead - 1)
        before = places[-1] - n
        for place in places:
            steps[before] += times * (place - before)
            before = place
        self.falls += times

    def everywhere(self) -> list[int]:
        """By place."""
        steps = [step - self.falls for step in self.steps[1:]]
        return list(accumulate(steps, initial=self.at_first))


def handed_on(places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Leaves and nodes that the rank at each place hands on to be reduced, of all shards.

    Args:
        places: of each rank on the ring.
    """
    n = len(places)
    leaves, buffers = _Sum(n), _Sum(n)

    def visit(lo: int, hi: int) -> list[int]:
        """The places of a node's leaves, ascending."""
        if hi - lo == 1:
            below = [places[lo]]
            leaves.add(1, below)
            buffers.add(1, below)
            return below
        middle = split(lo, hi)
        below = sorted(visit(lo, middle) + visit(middle, hi))  # two runs: no more than a merge
        leaves.add(-((middle - lo == 1) + (hi - middle == 1)), below)
        buffers.add(-1, below)
        return below

    visit(0, n)
    alone = leaves.everywhere()
    return alone, [both - one for both, one in zip(buffers.everywhere(), alone, strict=True)]


def made(places: Sequence[int]) -> list[int]:
    """Nodes that the rank at each place makes, of all shards but its own.

    Its own leaf is all that it adds. That makes a node if the leaf's sibling has come: in arcs that
    begin no later than the farthest of the sibling's leaves.
    """
    n = len(places)
    found = [0] * n
    for rank, place in enumerate(places):
        first, end = sibling((rank, rank + 1), n)
        found[place] = n - 1 - max((place - other) % n for other in places[first:end])
    return found


def to_reduce(places: Sequence[int], near: Sequence[bool]) -> list[tuple[int, int]]:
    """Places for nodes, and for leaves, that the rank at each place of the ring needs.

    What comes from another host lies in the rank's own slot; so does what it makes, and all that it
    hands to a rank of its host.

    Args:
        places: of each rank on the ring.
        near: of each place, whether the next one is on the same host.
    """
    n = len(places)
    leaves, nodes = handed_on(places)
    found = []
    for place, new in enumerate(made(places)):
        if near[place - 1]:
            found.append((nodes[place], leaves[place]) if near[place] else (new, 0))
        else:
            alone = n - 1 - new if near[place] else 0  # its own leaf, beside what has come
            found.append((nodes[place - 1] + new, leaves[place - 1] + alone))
    return found


def next_is_near(topology: Topology) -> list[bool]:
    """Of each place, whether the next one is on the same host."""
    ranks = circle_of(topology).ranks
    hosts = [topology.host_of[rank] for rank in ranks]
    return list(map(eq, hosts, hosts[1:] + hosts[:1]))


def _reduce_scatter_room(topology: Topology, _root: int) -> Room:
    place_of = circle_of(topology).place
    n = topology.ranks
    needed = to_reduce([place_of[rank] for rank in range(n)], next_is_near(topology))
    return Room(max(nodes for nodes, _ in needed), max(leaves for _, leaves in needed), n - 1)


def _all_gather_room(topology: Topology, _root: int) -> Room:
    """Every shard but one goes to the next, whose own it is; where that is on the same host."""
    n = topology.ranks
    return Room(0, n - 1 if topology.widest > 1 else 0, n - 1)


def _all_reduce_room(topology: Topology, root: int) -> Room:
    place_of = circle_of(topology).place
    n, near = topology.ranks, next_is_near(topology)
    needed = to_reduce([place_of[rank] for rank in range(n)], near)
    items = max(leaves + (n - 1) * near[place] for place, (_, leaves) in enumerate(needed))
    return Room(max(nodes for nodes, _ in needed), items, 2 * (n - 1))


ROOM = {
    "all_reduce": _all_reduce_room,
    "reduce_scatter": _reduce_scatter_room,
    "all_gather": _all_gather_room,
}
