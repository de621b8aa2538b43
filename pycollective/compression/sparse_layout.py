"""Where everything lies in the messages of top-k (docs/wire.md), found once for a bucket.

The segments of a message, one a parameter, lie one after another in one space of places, so that
one stream of ascending places serves them all. A message: header; the small parameters' elements,
fp32; how many places (4 bytes), how long their stream is (4 bytes), the stream, the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.bucket import Bucket, Header, header_bytes
from pycollective.compression.groups import Bytes
from pycollective.compression.partition import Numbers
from pycollective.errors import CollectiveMismatch, ConfigurationError

Indices = NDArray[np.uint32]

# How values are held in NumPy: the bits of a bfloat16 as an int16, which the kernels take for one.
VALUES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Sparse:
    """Some elements.

    Attributes:
        places: ascending, in whatever space the holder means.
        values: theirs.
    """

    places: Indices
    values: NDArray[Any]


def widened(values: NDArray[Any]) -> Floats:
    """Values that travelled, in fp32."""
    if values.dtype == np.int16:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Message:
    """What a message of top-k is about: a segment of each parameter, of which none is empty.

    Attributes:
        count: parameters of the call.
        items: of each segment of the compressed ones, which of them it is; ascending.
        starts, stops: its elements.
        offsets: where each begins in the space of places; one more, where the last ends.
        uncompressed: the segments that go as they are: (item, start, stop).
        uncompressed_count: how many elements these have.
    """

    count: int
    items: Numbers
    starts: Numbers
    stops: Numbers
    offsets: Numbers
    uncompressed: tuple[tuple[int, int, int], ...]
    uncompressed_count: int

    @classmethod
    def of(cls, starts: Numbers, stops: Numbers, uncompressed: NDArray[np.bool_]) -> Message:
        """The message about these segments, one a parameter, of which some may be empty."""
        there, whole = stops > starts, uncompressed
        items = np.flatnonzero(there & ~whole)
        offsets = np.concatenate([[0], np.cumsum((stops - starts)[items])])
        as_they_are = tuple(
            (int(n), int(starts[n]), int(stops[n])) for n in np.flatnonzero(there & whole)
        )
        elements = sum(stop - start for _, start, stop in as_they_are)
        return cls(
            len(uncompressed), items, starts[items], stops[items], offsets, as_they_are, elements
        )

    @property
    def size(self) -> int:
        """How many places there are."""
        return int(self.offsets[-1])

    @property
    def uncompressed_at(self) -> int:
        """Where their elements begin in a message, bytes."""
        return header_bytes(self.count)

    def longest(self, dtype: np.dtype[Any]) -> int:
        """Bytes of a message that holds every element."""
        stream = _core.pack_indices_bound(self.size, self.size)
        return (
            self.uncompressed_at
            + 4 * self.uncompressed_count
            + 8
            + stream
            + self.size * dtype.itemsize
        )

    def write(self, header: Header, uncompressed: Floats, chosen: Sparse) -> Bytes:
        """A message.

        Args:
            header: its header.
            uncompressed: the small parameters' elements.
            chosen: in the message's own space.
        """
        places = chosen.places
        stream = np.empty(_core.pack_indices_bound(places.size, self.size), np.uint8)
        stream = stream[: _core.pack_indices(places, self.size, stream)]
        head = np.zeros(self.uncompressed_at, np.uint8)
        header.write(head)
        lengths = np.array([places.size, stream.size], np.uint32).view(np.uint8)
        values = np.ascontiguousarray(chosen.values).view(np.uint8)
        return np.concatenate([head, uncompressed.view(np.uint8), lengths, stream, values])

    def read(self, row: Bytes, dtype: np.dtype[Any]) -> Sparse:
        """The elements in a message, in its own space.

        Raises:
            CollectiveMismatch: it holds no such thing.
        """
        at = self.uncompressed_at + 4 * self.uncompressed_count
        if row.size >= at + 8:
            count, length = (int(each) for each in row[at : at + 8].copy().view(np.uint32))
            at += 8
            if row.size == at + length + count * dtype.itemsize and count <= self.size:
                every = np.empty(count, np.uint32)
                try:
                    _core.unpack_indices(row[at : at + length], self.size, every)
                except ConfigurationError as error:
                    raise CollectiveMismatch(f"compressed exchange: {error}") from error
                return Sparse(every, row[at + length :].copy().view(dtype))
        raise CollectiveMismatch("compressed exchange: a message of a wrong length")


def sum_of(parts: Sequence[Sparse]) -> Sparse:
    """The sum of what ranks have of the same segments, in fp32, in the contract's order."""
    room = sum(each.places.size for each in parts)
    places, sums = np.empty(room, np.uint32), np.empty(room, np.float32)
    found = _core.sparse_sum(
        [each.places for each in parts], [each.values for each in parts], places, sums
    )
    return Sparse(places[:found], sums[:found])


def ranges(firsts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of several ranges, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(firsts - (ends - counts), counts)


class Space:
    """The segments of several messages, which have each element of some shards once between them.

    By item and start, one after another, they are a space of places of its own, which ascend with
    those of each parameter.

    Args:
        messages: the segments of each.
        items: of the call.

    Attributes:
        order: the messages' segments, by number, in that space's order.
        shifts: of each segment how much larger its places are there than in its message.
        edges: of each item, where it begins in that space; one more, where all ends.
    """

    def __init__(self, messages: Sequence[Message], items: int) -> None:
        self.messages = list(messages)
        numbers = np.concatenate([each.items for each in self.messages])
        starts = np.concatenate([each.starts for each in self.messages])
        sizes = np.concatenate([each.stops - each.starts for each in self.messages])
        self._bounds = np.cumsum([0, *(each.items.size for each in self.messages)])
        self.order = np.lexsort((starts, numbers))
        self._segments = np.concatenate([[0], np.cumsum(sizes[self.order])])
        begins = np.empty_like(starts)
        begins[self.order] = self._segments[:-1]
        offsets = np.concatenate([each.offsets[:-1] for each in self.messages])
        self.shifts = begins - offsets
        firsts = np.searchsorted(numbers[self.order], np.arange(items + 1))
        self.edges: Numbers = self._segments[firsts]

    def longest(self, dtype: np.dtype[Any]) -> int:
        """Bytes that one of the messages has at most."""
        return max(of.longest(dtype) for of in self.messages)

    def merge(
        self, parts: Sequence[Sparse], all_zero: Sequence[NDArray[np.bool_]]
    ) -> tuple[Numbers, NDArray[Any]]:
        """The elements of all messages, in this space.

        Args:
            parts: of each message.
            all_zero: of each message, the items that are; nothing is taken of them.
        """
        counts, firsts, at = [], [], 0
        for of, part, without in zip(self.messages, parts, all_zero, strict=True):
            edges = np.searchsorted(part.places, of.offsets)
            counts.append(np.where(without[of.items], 0, np.diff(edges)))
            firsts.append(edges[:-1] + at)
            at += part.places.size
        count = np.concatenate(counts)[self.order]
        index = ranges(np.concatenate(firsts)[self.order], count)
        places = np.concatenate([each.places for each in parts])[index]
        values = np.concatenate([each.values for each in parts])[index]
        return places + np.repeat(self.shifts[self.order], count), values

    def split(self, places: Numbers, values: NDArray[Any]) -> list[Sparse]:
        """The inverse: the elements of each message, in its own space."""
        edges = np.searchsorted(places, self._segments)
        firsts, counts = np.empty_like(self.order), np.empty_like(self.order)
        firsts[self.order], counts[self.order] = edges[:-1], np.diff(edges)
        index = ranges(firsts, counts)
        inside = (places[index] - np.repeat(self.shifts, counts)).astype(np.uint32)
        sent = values[index]
        ends = np.concatenate([[0], np.cumsum(counts)])[self._bounds]
        return [
            Sparse(inside[first:last], sent[first:last])
            for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]

    def by_item(self, places: Numbers) -> list[tuple[int, int, Indices, slice]]:
        """For each item here: number, size, places counted from its start, and their slice."""
        there = np.searchsorted(places, self.edges)
        inside = (places - np.repeat(self.edges[:-1], np.diff(there))).astype(np.uint32)
        counts, bounds = np.diff(self.edges).tolist(), there.tolist()
        return [
            (n, count, inside[bounds[n] : bounds[n + 1]], slice(bounds[n], bounds[n + 1]))
            for n, count in enumerate(counts)
            if count
        ]


class Layout:
    """The messages of one bucket.

    Attributes:
        items: parameters of the call.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._shards = bucket.shards
        self._hosts = self._shards.hosts
        self.items = len(self._shards)

    @property
    def _shard(self) -> int:
        assert self._hosts.shard is not None
        return self._hosts.shard

    def _local(self, shard: int) -> Message:
        return Message.of(*self._shards.local(shard), self._shards.uncompressed)

    def _of_hosts(self, shard: int) -> list[Message]:
        every = range(self._hosts.count)
        return [
            Message.of(*self._shards.host(shard, host), self._shards.uncompressed) for host in every
        ]

    @cached_property
    def local_shards(self) -> Space:
        """A message for each local shard."""
        return Space([self._local(shard) for shard in range(self._hosts.shards)], self.items)

    @cached_property
    def own_local_shard(self) -> Space:
        """A message: this rank's local shard."""
        return Space([self._local(self._shard)], self.items)

    @cached_property
    def own_host_shards(self) -> Space:
        """A message for each host: what it owns of this rank's local shard."""
        return Space(self._of_hosts(self._shard), self.items)
