"""What an algorithm has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .counts import Formula
from .lower import Move
from .topology import Topology

# (topology, shard, root) -> the moves of that shard
Moves = Callable[[Topology, int, int], list[Move]]


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A way to carry out collectives.

    Attributes:
        name: as in ``algorithm=``.
        summary: one line.
        cuts: into how many shards it cuts a buffer that it may cut as it likes.
        moves: for each operation that it can do, the moves of a shard, at steps from 0. They are
            the same on every rank, and follow from the arguments alone.
        counts: for each of these operations, what the busiest rank and host do in each phase, by
            formula (`counts.py`).
    """

    name: str
    summary: str
    cuts: Callable[[Topology], int]
    moves: Mapping[str, Moves]
    counts: Mapping[str, Formula]


def a_shard_each(topology: Topology) -> int:
    """Cut into one shard a rank."""
    return topology.ranks


def whole(_topology: Topology) -> int:
    """Do not cut: each message carries all there is."""
    return 1
