"""A message of top-k: which elements it is about, and how they lie in it (docs/wire.md).

The segments of a domain, one a parameter, lie one after another in one space of places, so that one
stream of ascending places serves them all. A message: header; the small parameters' elements, fp32;
how many places (4 bytes), how long their stream is (4 bytes), the stream, the values.
"""

from __future__ import annotations

from collections.abc import Sequence
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
Numbers = NDArray[np.int64]

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
class Domain:
    """Which elements a message is about; none of its segments is empty.

    Attributes:
        count: parameters of the call.
        items: of each segment of the compressed ones, which of them it is; ascending.
        starts, stops: its elements.
        offsets: where each begins in the space of places; one more, where the last ends.
        dense: the segments that go as they are: (item, start, stop).
        dense_count: how many elements these have.
    """

    count: int
    items: Numbers
    starts: Numbers
    stops: Numbers
    offsets: Numbers
    dense: tuple[tuple[int, int, int], ...]
    dense_count: int

    @classmethod
    def of(cls, starts: Numbers, stops: Numbers, dense: Sequence[bool]) -> Domain:
        """Of its segments, one a parameter, of which some may be empty."""
        there, whole = stops > starts, np.array(dense, np.bool_)
        items = np.flatnonzero(there & ~whole)
        offsets = np.concatenate([[0], np.cumsum((stops - starts)[items])])
        as_they_are = tuple(
            (int(n), int(starts[n]), int(stops[n])) for n in np.flatnonzero(there & whole)
        )
        elements = sum(stop - start for _, start, stop in as_they_are)
        return cls(len(dense), items, starts[items], stops[items], offsets, as_they_are, elements)

    @property
    def size(self) -> int:
        """Of the space of places."""
        return int(self.offsets[-1])

    @property
    def dense_at(self) -> int:
        """Where their elements begin in a message, bytes."""
        return header_bytes(self.count)

    def longest(self, dtype: np.dtype[Any]) -> int:
        """Bytes of a message that holds every element."""
        stream = _core.pack_indices_bound(self.size, self.size)
        return self.dense_at + 4 * self.dense_count + 8 + stream + self.size * dtype.itemsize

    def write(self, header: Header, dense: Floats, chosen: Sparse) -> Bytes:
        """A message.

        Args:
            header: its header.
            dense: the small parameters' elements.
            chosen: in the domain's own space.
        """
        places = chosen.places
        stream = np.empty(_core.pack_indices_bound(places.size, self.size), np.uint8)
        stream = stream[: _core.pack_indices(places, self.size, stream)]
        head = np.zeros(self.dense_at, np.uint8)
        header.write(head)
        lengths = np.array([places.size, stream.size], np.uint32).view(np.uint8)
        values = np.ascontiguousarray(chosen.values).view(np.uint8)
        return np.concatenate([head, dense.view(np.uint8), lengths, stream, values])

    def read(self, row: Bytes, dtype: np.dtype[Any]) -> Sparse:
        """What a message holds, in the domain's own space.

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
                    raise CollectiveMismatch(f"compressed exchange: {error}") from error
                return Sparse(every, row[at + length :].copy().view(dtype))
        raise CollectiveMismatch("compressed exchange: a message of a wrong length")


def sum_of(parts: Sequence[Sparse]) -> Sparse:
    """The sum over ranks of what they have of one domain, in fp32, in the contract's order."""
    room = sum(each.places.size for each in parts)
    places, sums = np.empty(room, np.uint32), np.empty(room, np.float32)
    found = _core.sparse_sum(
        [each.places for each in parts], [each.values for each in parts], places, sums
    )
    return Sparse(places[:found], sums[:found])
