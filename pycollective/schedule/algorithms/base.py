"""What an algorithm says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import Transfer

# (topology, shard, root, rank) -> what that rank sends and receives of that shard
Transfers = Callable[[Topology, int, int, int], list[Transfer]]


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A way to carry out collectives.

    Attributes:
        name: as in ``algorithm=``.
        summary: one line.
        cuts: into how many shards it cuts a buffer that it may cut as it likes.
        transfers: by operation, what a rank sends and receives of a shard. It follows from the
            arguments alone, and is found without looking at the other ranks.
    """

    name: str
    summary: str
    cuts: Callable[[Topology], int]
    transfers: Mapping[str, Transfers]


def a_shard_each(topology: Topology) -> int:
    """Cut into one shard a rank."""
    return topology.ranks


def whole(_topology: Topology) -> int:
    """Do not cut: each message carries the whole buffer."""
    return 1
