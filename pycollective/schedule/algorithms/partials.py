"""What a rank, or a host, has of a shard on the way: nodes of the order, counted not added."""

from __future__ import annotations

from collections.abc import Iterable

from pycollective.order import Node, sibling
from pycollective.schedule.counts import Load

Partial = set[Node]


def add_to(partial: Partial, nodes: Iterable[Node], leaves: int) -> int:
    """Put nodes into a partial, in the order over so many leaves; how many additions this takes."""
    adds = 0
    for node in nodes:
        while node != (0, leaves) and (other := sibling(node, leaves)) in partial:
            partial.remove(other)
            node = min(node[0], other[0]), max(node[1], other[1])
            adds += 1
        partial.add(node)
    return adds


def message_of(partial: Partial) -> Load:
    """A message of a partial of the whole buffer."""
    leaves = sum(hi - lo == 1 for lo, hi in partial)
    return Load(1, leaves, len(partial) - leaves)
