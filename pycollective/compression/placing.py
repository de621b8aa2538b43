"""Which elements of a parameter each rank answers for: by its name, its size and the hosts alone.

Within a host the ranks first add up their gradients; then each holds one *share* of the host's sum,
and exchanges it with the ranks that hold the same share on the other hosts. Of a share every host
owns one *region*: there the hosts' contributions meet. So an element has one rank a host that holds
what error feedback keeps of it, and one rank in all that adds it up.

Shares and regions are cut between chunks, and turned by the parameter's name, so that what small
parameters leave over does not always fall to the same ranks. Nothing depends on the bucket that a
gradient comes in: DDP rebuilds its buckets, and an element whose owner changed would be parted from
its residual.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pycollective.errors import ConfigurationError
from pycollective.placement import number_hosts

Range = tuple[int, int]


def check_between(between: str) -> None:
    """Refuse what `Places.of` does not know."""
    if between not in ("hosts", "ranks"):
        raise ConfigurationError(f"between={between!r} is neither 'hosts' nor 'ranks'")


@dataclass(frozen=True)
class Places:
    """The hosts of a group's ranks, seen from one of them.

    Attributes:
        rank: this rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
    """

    rank: int
    host_of: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_of: Sequence[int], between: str) -> Places:
        """`between`: "hosts", or "ranks", which takes every rank for a host of its own."""
        check_between(between)
        if between == "ranks":
            return cls(rank, tuple(range(len(host_of))))
        return cls(rank, number_hosts(host_of))

    @property
    def ranks(self) -> int:
        """Of the group."""
        return len(self.host_of)

    @cached_property
    def _members(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(max(self.host_of) + 1)]
        for rank, host in enumerate(self.host_of):
            found[host].append(rank)
        return found

    @property
    def hosts(self) -> int:
        """How many there are."""
        return len(self._members)

    @property
    def host(self) -> int:
        """This rank's."""
        return self.host_of[self.rank]

    def on(self, host: int) -> list[int]:
        """The ranks of a host, ascending."""
        return self._members[host]

    @property
    def local(self) -> list[int]:
        """The ranks of this host."""
        return self.on(self.host)

    @cached_property
    def shares(self) -> int:
        """How many ranks of each host hold one: as many as the smallest host has."""
        return min(len(members) for members in self._members)

    @cached_property
    def share(self) -> int | None:
        """This rank's; None where its host has ranks to spare."""
        place = self.local.index(self.rank)
        return place if place < self.shares else None

    def share_of(self, rank: int) -> int:
        """The share that a rank holds, of one that does."""
        return self.on(self.host_of[rank]).index(rank)

    def across(self, share: int) -> list[int]:
        """The ranks that hold a share, one of each host."""
        return [self.on(host)[share] for host in range(self.hosts)]


def turn_of(name: str) -> int:
    """How far the shares and regions of a parameter are turned."""
    return zlib.crc32(name.encode())


def cut(count: int, chunk: int, owners: int, turn: int) -> list[Range]:
    """Elements 0 to `count` for each of `owners`, evenly by whole chunks, turned by `turn`."""
    chunks = -(-count // chunk)
    found: list[Range] = [(0, 0)] * owners
    for part in range(owners):
        start, stop = part * chunks // owners, (part + 1) * chunks // owners
        found[(part + turn) % owners] = (min(start * chunk, count), min(stop * chunk, count))
    return found


def shares_of(name: str, count: int, chunk: int, places: Places) -> list[Range]:
    """The elements of a flat parameter that each share has."""
    return cut(count, chunk, places.shares, turn_of(name))


def regions_of(name: str, share: Range, chunk: int, places: Places) -> list[Range]:
    """The elements of a share that each host owns, counted from the parameter's start."""
    start, stop = share
    turn = turn_of(name) // places.shares
    return [
        (start + lower, start + upper)
        for lower, upper in cut(stop - start, chunk, places.hosts, turn)
    ]


def regions_on(
    host: int,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    turns: NDArray[np.int64],
    chunk: int,
    hosts: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`regions_of` for one host and many parameters at once: where they start and stop.

    Args:
        host: whose they are.
        starts, stops: of each parameter, the elements of the share.
        turns: of each ``turn_of(name) // shares``.
        chunk: elements that are never parted.
        hosts: how many there are.
    """
    sizes = stops - starts
    chunks = -(-sizes // chunk)
    part = (host - turns) % hosts
    lower = np.minimum(part * chunks // hosts * chunk, sizes)
    upper = np.minimum((part + 1) * chunks // hosts * chunk, sizes)
    return starts + lower, starts + upper
