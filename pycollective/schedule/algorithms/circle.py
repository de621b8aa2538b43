"""The ranks in the order of a ring: host by host, so that neighbours share one where they can."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pycollective.schedule.topology import Topology


class Circle(NamedTuple):
    """The ranks in that order, and each rank's place in it."""

    ranks: tuple[int, ...]
    place: dict[int, int]
    ascending: bool  # hosts hold blocks of ranks


@lru_cache(maxsize=8)
def circle_of(topology: Topology) -> Circle:
    """That of a topology; kept, since every shard asks for it."""
    ranks = tuple(rank for host in topology.hosts for rank in host)
    place = {rank: place for place, rank in enumerate(ranks)}
    return Circle(ranks, place, ranks == tuple(range(len(ranks))))
