"""Which rank owns which elements of a parameter: by its name, its size and the hosts alone.

The ranks of a host first add up their gradients. Each of them then has one *local shard* of the
host's sum, and exchanges it with the ranks that have the same local shard on the other hosts. Every
host owns one *host shard* of each local shard: there the hosts' contributions are added up, by the
host's rank that has this local shard, the *owner*. So of each element one rank a host keeps a send
residual, and one rank in all an owner residual.

Shards are cut between chunks. They are rotated by the parameter's name, so that what small
parameters leave over does not always fall to the same ranks. Nothing depends on the bucket that a
gradient comes in: DDP rebuilds its buckets, and an element whose owner changed would lose its
residual.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pycollective.compression.arrays import Flat, Item, Numbers, Window
from pycollective.errors import ConfigurationError
from pycollective.placement import number_hosts

Range = tuple[int, int]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group's ranks, seen from one of them.

    Attributes:
        rank: this rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
    """

    rank: int
    host_of: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_of: Sequence[int], between: str) -> Hosts:
        """`between`: "hosts", or "ranks", which takes every rank for a host of its own."""
        if between == "ranks":
            return cls(rank, tuple(range(len(host_of))))
        return cls(rank, number_hosts(host_of))

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return len(self.host_of)

    @cached_property
    def _members(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(max(self.host_of) + 1)]
        for rank, host in enumerate(self.host_of):
            found[host].append(rank)
        return found

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self._members)

    @property
    def own(self) -> int:
        """This rank's host."""
        return self.host_of[self.rank]

    def on(self, host: int) -> list[int]:
        """The ranks of a host, ascending."""
        return self._members[host]

    @property
    def local(self) -> list[int]:
        """The ranks of this host."""
        return self.on(self.own)

    @cached_property
    def shards(self) -> int:
        """How many local shards a parameter has: as many as the smallest host has ranks."""
        return min(len(members) for members in self._members)

    @cached_property
    def shard(self) -> int | None:
        """This rank's local shard; None where its host has ranks to spare."""
        place = self.local.index(self.rank)
        return place if place < self.shards else None

    def shard_of(self, rank: int) -> int:
        """The local shard of a rank that has one."""
        return self.on(self.host_of[rank]).index(rank)

    def across(self, shard: int) -> list[int]:
        """The ranks that have this local shard, one of each host."""
        return [self.on(host)[shard] for host in range(self.count)]


class Partition:
    """How parameters are cut into local shards, and these into host shards.

    Args:
        hosts: of the ranks.
        chunk: elements that are never parted.
    """

    def __init__(self, hosts: Hosts, chunk: int) -> None:
        self.hosts, self.chunk = hosts, chunk
        self._found: dict[Any, list[Range]] = {}

    def local_shards(self, name: str, count: int) -> list[Range]:
        """The elements of each local shard of a flat parameter."""
        return _cut(count, self.chunk, self.hosts.shards, _rotation(name))

    def host_shards(self, name: str, local: Range) -> list[Range]:
        """The elements of a local shard that each host owns, counted from the parameter's start."""
        start, stop = local
        rotation = _rotation(name) // self.hosts.shards
        cuts = _cut(stop - start, self.chunk, self.hosts.count, rotation)
        return [(start + lower, start + upper) for lower, upper in cuts]

    def local_shards_of(self, item: Item) -> list[Range]:
        """The local shards of an item, cached; an item with an owner is all in one."""
        key = item.name, item.flat.count, item.owner
        if key not in self._found:
            if item.owner is None:
                self._found[key] = self.local_shards(item.name, item.flat.count)
            else:
                whole, none, owner = (0, item.flat.count), (0, 0), item.owner[0]
                every = range(self.hosts.shards)
                self._found[key] = [whole if shard == owner else none for shard in every]
        return self._found[key]

    def check_scatter(self, name: str, count: int) -> None:
        """Refuse to scatter a parameter of `count` elements among the ranks.

        Raises:
            ConfigurationError: it cannot be shared out evenly, or hosts differ in numbers of ranks.
        """
        hosts = self.hosts
        if count % hosts.ranks:
            raise ConfigurationError(
                f"reduce_scatter: the {count} elements of {name!r} cannot be shared out evenly "
                f"among {hosts.ranks} ranks"
            )
        if any(len(hosts.on(host)) != hosts.shards for host in range(hosts.count)):
            raise ConfigurationError(
                "reduce_scatter wants as many ranks on every host; between='ranks' takes every "
                "rank for a host"
            )

    def scatter(self, name: str, x: Flat, uncompressed: bool) -> list[Item]:
        """A parameter's items in reduce_scatter, one for each rank that gets the average of it."""
        count = x.count // self.hosts.ranks
        return [
            Item(
                scattered_name(name, rank),
                Window(x, rank * count, (rank + 1) * count),
                uncompressed,
                (self.hosts.shard_of(rank), self.hosts.host_of[rank]),
            )
            for rank in range(self.hosts.ranks)
        ]


class Shards:
    """The shards of a call's items, as arrays: of each item where a shard starts and stops.

    With many hosts most items have nothing in most host shards, and what a call costs must not grow
    with shards times hosts times parameters.
    """

    def __init__(self, partition: Partition, items: Sequence[Item]) -> None:
        self.hosts, self._chunk = partition.hosts, partition.chunk
        self.uncompressed = np.array([item.uncompressed for item in items], np.bool_)
        self._owners = [item.owner for item in items]
        rotations = [_rotation(item.name) // self.hosts.shards for item in items]
        self._rotations = np.array(rotations, np.int64)
        cuts = [partition.local_shards_of(item) for item in items]
        self._local = np.array(cuts, np.int64).reshape(-1, self.hosts.shards, 2)

    def __len__(self) -> int:
        return len(self._owners)

    def local(self, shard: int) -> tuple[Numbers, Numbers]:
        """Where a local shard of each item starts and stops."""
        return self._local[:, shard, 0], self._local[:, shard, 1]

    def host(self, shard: int, host: int) -> tuple[Numbers, Numbers]:
        """Where the part of a local shard that a host owns starts and stops, of each item."""
        starts, stops = self.local(shard)
        sizes = stops - starts
        chunks = -(-sizes // self._chunk)
        hosts = self.hosts.count
        part = (host - self._rotations) % hosts
        lower = starts + np.minimum(part * chunks // hosts * self._chunk, sizes)
        upper = starts + np.minimum((part + 1) * chunks // hosts * self._chunk, sizes)
        for item_index, owner in enumerate(self._owners):
            if owner is not None:
                whole = owner == (shard, host)
                lower[item_index] = starts[item_index]
                upper[item_index] = (stops if whole else starts)[item_index]
        return lower, upper


def scattered_name(name: str, rank: int) -> str:
    """The name by which error feedback keeps the part of a parameter that goes to a rank."""
    return f"{name}\0{rank}"  # as no parameter is called


def _rotation(name: str) -> int:
    """How far the shards of a parameter are rotated."""
    return zlib.crc32(name.encode())


def _cut(count: int, chunk: int, owners: int, rotation: int) -> list[Range]:
    """Elements 0 to `count` for each of `owners`, evenly by whole chunks, rotated."""
    chunks = -(-count // chunk)
    found: list[Range] = [(0, 0)] * owners
    for part in range(owners):
        start, stop = part * chunks // owners, (part + 1) * chunks // owners
        found[(part + rotation) % owners] = (min(start * chunk, count), min(stop * chunk, count))
    return found
