"""Transfers: what an algorithm is written in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
