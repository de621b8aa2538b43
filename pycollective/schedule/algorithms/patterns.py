"""What several algorithms share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import Ranges, Transfer, ranges_of


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
