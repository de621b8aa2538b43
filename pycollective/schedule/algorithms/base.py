"""What an algorithm has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pycollective.schedule.counts import Formula
from pycollective.schedule.handing import Handing
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology

# (topology, shard, root) -> the moves of that shard
Moves = Callable[[Topology, int, int], list[Move]]
# (topology, shard, root, rank) -> those that touch the rank, with what they carry
Handings = Callable[[Topology, int, int, int], list[Handing]]
# (topology of two ranks or more, root) -> the most that any rank needs
RoomFormula = Callable[[Topology, int], "Room"]


class Room(NamedTuple):
    """What all ranks set aside, so that each knows where the others' places are.

    Attributes:
        nodes, items: places in a slot, for nodes and for what is in the stored type: the most that
            any rank needs.
        steps: step numbers, from 0 to that of the last move.
    """

    nodes: int
    items: int
    steps: int


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A way to carry out collectives.

    Attributes:
        name: as in ``algorithm=``.
        summary: one line.
        cuts: into how many shards it cuts a buffer that it may cut as it likes.
        moves: for each operation that it can do, the moves of a shard, at steps from 0. They are
            the same on every rank, and follow from the arguments alone.
        handings: the same moves as one rank sees them, with the leaves that each carries: found
            without looking at those that do not touch the rank (`handing.py`).
        room: the places and steps of all ranks, by formula: without looking at each rank's shards.
            Not for operations of a single shard, which are counted (`layout.py`).
        counts: for each of these operations, what the busiest rank and host do in each phase, by
            formula (`counts.py`).
    """

    name: str
    summary: str
    cuts: Callable[[Topology], int]
    moves: Mapping[str, Moves]
    handings: Mapping[str, Handings]
    room: Mapping[str, RoomFormula]
    counts: Mapping[str, Formula]


def a_shard_each(topology: Topology) -> int:
    """Cut into one shard a rank."""
    return topology.ranks


def whole(_topology: Topology) -> int:
    """Do not cut: each message carries all there is."""
    return 1
