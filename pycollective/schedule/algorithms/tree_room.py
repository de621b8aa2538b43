"""Places that the tree needs where it carries many shards, by formula.

On the way up a rank has one node at a time, and makes a larger one of it and of what each child
hands it. On the way down, and where data is only moved, it holds what is for the ranks below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycollective.schedule.algorithms.base import Room
from pycollective.schedule.algorithms.patterns import log2_ceiling
from pycollective.schedule.topology import Topology


class _Place(NamedTuple):
    """A rank's place in the tree.

    Attributes:
        below: ranks below it, itself included.
        near: whether its parent is on its host; so of rank 0.
        children: of each, the ranks below it, and whether it is on the same host.
    """

    below: int
    near: bool
    children: list[tuple[int, bool]]


def _places(topology: Topology, root: int = 0) -> Iterator[_Place]:
    """Of each rank, from the one at the top, which is `root`, on."""
    n = topology.ranks
    host_of = [topology.host_of[(rank + root) % n] for rank in range(n)]
    for rank, host in enumerate(host_of):
        low = rank & -rank or n
        children = []
        bit = 1
        while bit < low and rank + bit < n:
            children.append((min(bit, n - rank - bit), host_of[rank + bit] == host))
            bit *= 2
        near = host_of[rank - low] == host if rank else True
        yield _Place(min(low, n - rank), near, children)


def _up(place: _Place, top: bool) -> tuple[int, int]:
    """Places for nodes and leaves that a shard needs on its way up; its result not included."""
    if not place.children:
        return 0, int(place.near)
    far = [below for below, near in place.children if not near]
    made = len(place.children) - top
    return made + sum(below > 1 for below in far), sum(below == 1 for below in far)


def _passed_on(place: _Place) -> int:
    """Shards for the ranks below that come from above, and lie here on their way."""
    return sum(below for below, near in place.children if near or not place.near)


def _reduce_scatter(topology: Topology, _root: int) -> Room:
    n = topology.ranks
    nodes = items = 0
    for rank, place in enumerate(_places(topology)):
        up = _up(place, top=rank == 0)
        results = _passed_on(place) if rank else n - 1  # all of them are made by the top
        nodes, items = max(nodes, n * up[0]), max(items, n * up[1] + results)
    return Room(nodes, items, 2 * log2_ceiling(n))


def _all_gather(topology: Topology, _root: int) -> Room:
    """What arrives is in the output; of what goes on to ranks of the same host there is a copy."""
    n = topology.ranks
    items = 0
    for rank, place in enumerate(_places(topology)):
        near = [below for below, near in place.children if near]
        lacking = n if len(near) > 1 else n - sum(near) if near else 0
        if rank and place.near:
            lacking = n if near else place.below
        items = max(items, lacking)
    return Room(0, items, 2 * log2_ceiling(n))


def _gather(topology: Topology, root: int) -> Room:
    items = 0
    for rank, place in enumerate(_places(topology, root)):
        if rank:  # the top has all in its output
            passed = sum(below for below, near in place.children if place.near or not near)
            items = max(items, place.near + passed)
    return Room(0, items, log2_ceiling(topology.ranks))


def _scatter(topology: Topology, root: int) -> Room:
    """The top sends to other hosts from its input, as if it had its shards from the same host."""
    items = max(map(_passed_on, _places(topology, root)))
    return Room(0, items, log2_ceiling(topology.ranks))


ROOM = {
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
}
