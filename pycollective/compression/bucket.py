"""The gradients of one call, and their sum over the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from pycollective.compression.arrays import Elements, Errors, Item, Segments
from pycollective.compression.groups import Groups
from pycollective.compression.header import header_bytes
from pycollective.compression.kernels import Kernels
from pycollective.compression.message import Call
from pycollective.compression.partition import Partition, Range, Shards
from pycollective.compression.residuals import Residuals

_T = TypeVar("_T")


class Bucket:
    """The gradients of one call.

    Attributes:
        items: the gradients.
        local_shards: of each item, the elements of each local shard.
        key: what the layout of its messages depends on.
    """

    def __init__(self, items: Sequence[Item], partition: Partition) -> None:
        self.items = list(items)
        self._partition = partition
        self.local_shards: list[list[Range]] = [partition.local_shards_of(item) for item in items]
        self.key = tuple(
            (item.name, item.flat.count, item.uncompressed, item.owner) for item in items
        )

    @property
    def shards(self) -> Shards:
        """The shards of all items."""
        return Shards(self._partition, self.items)

    def elements(self) -> Elements:
        """Where they lie."""
        return Elements.of([item.flat for item in self.items])

    def errors(self, residuals: Residuals, ranges: Sequence[Range], kernels: Kernels) -> Errors:
        """The residuals of the compressed items, of these elements of each."""
        held = np.zeros(len(self.items), np.int64)
        left = np.zeros(len(self.items), np.int64)
        kept: list[Any] = []
        for number, (item, (start, stop)) in enumerate(zip(self.items, ranges, strict=True)):
            if not item.uncompressed and stop > start:
                old, new = residuals.of(item.name, stop - start)
                left[number] = kernels.address(new) - 4 * start
                if old is not None:
                    held[number] = kernels.address(old) - 4 * start
                kept += (old, new)
        return Errors(held, left, kept)


class ByBucket(Generic[_T]):
    """A cache of what depends on a bucket, such as the layout of its messages.

    A parameter is in one bucket, or in a compressed one and, at the start, an uncompressed one.
    When DDP rebuilds its buckets, the entries of the old ones go.
    """

    def __init__(self, make: Callable[[Bucket], _T]) -> None:
        self._make = make
        self._found: dict[Any, _T] = {}
        self._bucket_of: dict[tuple[str, bool], Any] = {}

    def of(self, bucket: Bucket) -> _T:
        """The entry for this bucket, made if there is none."""
        found = self._found.get(bucket.key)
        if found is None:
            for item in bucket.items:
                self._found.pop(self._bucket_of.get((item.name, item.uncompressed)), None)
                self._bucket_of[item.name, item.uncompressed] = bucket.key
            found = self._found[bucket.key] = self._make(bucket)
        return found

    def __len__(self) -> int:
        return len(self._found)


class HostSums:
    """Sums over the ranks of a host: of each local shard, on the rank that has it.

    Each rank sends to each what it has of that one's local shard, in fp32, and of its own only.

    Attributes:
        size: bytes of this rank's messages; 0 where it is alone on its host.
        heads: how many headers come.
    """

    def __init__(self, bucket: Bucket) -> None:
        hosts = bucket.shards.hosts
        self._local = hosts.local
        self.size = self.heads = 0
        if len(hosts.local) == 1:
            return
        cuts = np.array(bucket.local_shards, np.int64).reshape(-1, hosts.shards, 2)
        starts, stops = cuts[:, :, 0].T, cuts[:, :, 1].T  # of each shard
        sizes = stops - starts
        before = np.cumsum(sizes, axis=1) - sizes
        self._first = -(-header_bytes(len(bucket.items)) // 4) * 4
        self._row = self._first + 4 * int(sizes.sum(axis=1).max())
        self.size, self.heads = self._row * len(hosts.local), len(hosts.local)
        items = np.tile(np.arange(len(bucket.items)), hosts.shards)
        ats = np.arange(hosts.shards)[:, None] * self._row + self._first + 4 * before
        self._sent = Segments(items, *(each.reshape(-1) for each in (starts, stops, ats)))
        self._width, self._places = 0, np.zeros(len(bucket.items), np.int64)
        if hosts.shard is not None:
            self._width = int(sizes[hosts.shard].sum())
            # Of a parameter's element 0, as if it were there.
            self._places = 4 * (before[hosts.shard] - starts[hosts.shard])

    def of(
        self, bucket: Bucket, call: Call, messages: Any, groups: Groups, kernels: Kernels
    ) -> Elements:
        """This rank's local shard of each gradient, summed over the ranks of its host.

        Where it is alone on its host, the gradients as they are; otherwise fp32. Without a local
        shard they are nowhere.
        """
        elements = bucket.elements()
        if not self.size:
            return elements
        rows = messages.reshape(len(self._local), -1)
        kernels.copy(self._sent.table(elements), rows, call.found, call.agreement)
        came = groups.local.all_to_all(rows)
        call.note(came.reshape(-1), np.arange(len(self._local)) * self._row, self._local)
        call.look()  # ranks that differ may go on with other exchanges
        sums = kernels.sum(came, self._first, self._width)
        return Elements.of_sums(sums, kernels.address(sums), self._places)
