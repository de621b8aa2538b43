"""A message of top-k: which elements it is about, and how they lie in it (docs/wire.md).

The segments of a domain, one a parameter, lie one after another in one space of places, so that one
stream of ascending places serves them all. A message: header; the small parameters' elements, fp32;
how many places (4 bytes), how long their stream is (4 bytes), the stream, the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.groups import Bytes
from pycollective.compression.messages import Header, header_bytes
from pycollective.errors import CollectiveMismatch, ConfigurationError

Indices = NDArray[np.uint32]

# How values are held in NumPy: the bits of a bfloat16 as an int16, which the kernels take for one.
VALUES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Chosen:
    """Some elements of one parameter.

    Attributes:
        places: ascending, from whatever start the holder means.
        values: theirs.
    """

    places: Indices
    values: NDArray[Any]

    def between(self, start: int, stop: int) -> Chosen:
        """Those at places `start` to `stop`."""
        first, last = np.searchsorted(self.places, np.array([start, stop], np.uint32))
        return Chosen(self.places[first:last], self.values[first:last])

    def widened(self) -> Floats:
        """The values in fp32."""
        if self.values.dtype == np.int16:
            return (self.values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


@dataclass(frozen=True)
class Domain:
    """Which elements a message is about.

    Attributes:
        segments: (item, start, stop, dense), elements of the parameter.
        offsets: where each segment begins in the space of places; dense ones take none of it.
        size: of that space.
    """

    segments: tuple[tuple[int, int, int, bool], ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int, int, bool]]) -> Domain:
        """Of its segments."""
        offsets = []
        size = 0
        for _, start, stop, dense in segments:
            offsets.append(size)
            size += 0 if dense else stop - start
        return cls(tuple(segments), tuple(offsets), size)

    @property
    def dense(self) -> list[tuple[int, int, int]]:
        """The segments that go as they are, without empty ones."""
        return [
            (n, start, stop) for n, start, stop, dense in self.segments if dense and stop > start
        ]

    @property
    def dense_at(self) -> int:
        """Where their elements begin in a message, bytes."""
        return header_bytes(len(self.segments))

    @property
    def dense_count(self) -> int:
        """How many elements they have."""
        return sum(stop - start for _, start, stop in self.dense)

    def write(
        self,
        header: Header,
        dense: Floats,
        chosen: Mapping[int, Chosen],
        starts: Mapping[int, int],
    ) -> Bytes:
        """A message.

        Args:
            header: its header.
            dense: the small parameters' elements.
            chosen: by item; only what lies in the domain is sent.
            starts: of each item, the parameter's element that its places are counted from.
        """
        places, values = [np.empty(0, np.uint32)], []
        for (number, start, stop, dense_item), offset in zip(
            self.segments, self.offsets, strict=True
        ):
            if dense_item or number not in chosen:
                continue
            first = start - starts[number]
            mine = chosen[number].between(first, first + stop - start)
            places.append((mine.places - np.uint32(first)) + np.uint32(offset))
            values.append(mine.values)
        every = np.concatenate(places)
        stream = np.empty(_core.pack_indices_bound(every.size, self.size), np.uint8)
        stream = stream[: _core.pack_indices(every, self.size, stream)]
        head = np.zeros(self.dense_at, np.uint8)
        header.write(head)
        lengths = np.array([every.size, stream.size], np.uint32).view(np.uint8)
        raw = [np.ascontiguousarray(each).view(np.uint8) for each in values]
        return np.concatenate([head, dense.view(np.uint8), lengths, stream, *raw])

    def read(self, row: Bytes, dtype: np.dtype[Any]) -> dict[int, Chosen]:
        """What a message holds: by item, places from the segment's start.

        Raises:
            CollectiveMismatch: it holds no such thing.
        """
        at = self.dense_at + 4 * self.dense_count
        if row.size >= at + 8:
            count, length = (int(each) for each in row[at : at + 8].copy().view(np.uint32))
            at += 8
            if row.size == at + length + count * dtype.itemsize and count <= self.size:
                every = np.empty(count, np.uint32)
                try:
                    _core.unpack_indices(row[at : at + length], self.size, every)
                except ConfigurationError as error:
                    raise CollectiveMismatch(f"compressed all_reduce: {error}") from error
                values = row[at + length :].copy().view(dtype)
                return self._by_item(every, values)
        raise CollectiveMismatch("compressed all_reduce: a message of a wrong length")

    def _by_item(self, every: Indices, values: NDArray[Any]) -> dict[int, Chosen]:
        found = {}
        for (number, start, stop, dense), offset in zip(self.segments, self.offsets, strict=True):
            if not dense:
                first, last = np.searchsorted(
                    every, np.array([offset, offset + stop - start], np.uint32)
                )
                found[number] = Chosen(every[first:last] - np.uint32(offset), values[first:last])
        return found

    def sum_of(self, number: int, read: Sequence[Mapping[int, Chosen]]) -> tuple[Indices, Floats]:
        """The sum of an item's elements over several messages: places from the segment's start."""
        every = [each[number] for each in read]
        room = sum(each.places.size for each in every)
        places, sums = np.empty(room, np.uint32), np.empty(room, np.float32)
        found = _core.sparse_sum(
            [each.places for each in every], [each.values for each in every], places, sums
        )
        return places[:found], sums[:found]
