"""Transfers, what an algorithm is made of, and what several algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pycollective.schedule.topology import Topology

Ranges = tuple[tuple[int, int], ...]  # half-open, ascending, no two that touch


class Transfer(NamedTuple):
    """In a step one rank sends all that it has of a shard to another.

    Attributes:
        step: its number, from 0.
        source: the rank that sends.
        target: the rank that receives.
        leaves: the ranks whose inputs the message carries, as ranges; None for the result.
    """

    step: int
    source: int
    target: int
    leaves: Ranges | None = None


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges that do not overlap, joined where they touch."""
    found: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if found and found[-1][1] == lo:
            lo = found.pop()[0]
        found.append((lo, hi))
    return tuple(found)


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Ranks as ranges."""
    return merged([(rank, rank + 1) for rank in ranks])


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


def leaf(rank: int) -> Ranges:
    """The input of one rank."""
    return ((rank, rank + 1),)


def later(transfers: Iterable[Transfer], steps: int) -> list[Transfer]:
    """The same transfers, `steps` steps later."""
    return [Transfer(step + steps, a, b, leaves) for step, a, b, leaves in transfers]


def backwards(transfers: Iterable[Transfer], steps: int, after: int = 0) -> list[Transfer]:
    """The way back of transfers that take `steps` steps: last first, each with the result.

    Args:
        transfers: they collect a shard; the way back spreads it.
        steps: the steps that they take.
        after: the step at which the way back begins.
    """
    last = after + steps - 1
    return [Transfer(last - step, b, a) for step, a, b, _ in transfers]


def not_to(holder: int, transfers: Iterable[Transfer]) -> list[Transfer]:
    """Without those to `holder`, which has the shard already."""
    return [each for each in transfers if each.target != holder]


def log2_ceiling(n: int) -> int:
    """The least k with 2**k >= n."""
    return (n - 1).bit_length()


def largest_block(ranks: int) -> int:
    """The largest power of two up to `ranks`."""
    return 1 << (ranks.bit_length() - 1)


@lru_cache(maxsize=1 << 13)
def leaves_of_hosts(topology: Topology, first: int, end: int) -> Ranges:
    """The inputs of all ranks of hosts `first` to ``end - 1``."""
    return ranges_of(rank for host in topology.hosts[first:end] for rank in host)
