"""The gradients of a call, and the header of its messages (docs/wire.md).

A header has 24 bytes, little-endian: a digest of what ranks must agree on (8), the loss scale (4),
flags (4), the number of parameters (4), zero (4). A bit a parameter follows, padded to bytes: 1
where the sender's part of its gradient is all zero.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Floats, Item
from pycollective.compression.groups import Bytes, Groups
from pycollective.compression.partition import Partition, Range, Shards
from pycollective.errors import CollectiveMismatch

_T = TypeVar("_T")
_FIELDS = struct.Struct("<QfIII")
NOT_FINITE = 1


def header_bytes(items: int) -> int:
    """How long the header of a message about so many parameters is."""
    return _FIELDS.size + -(-items // 8)


@dataclass(frozen=True)
class Header:
    """The beginning of every message.

    Attributes:
        digest: of what ranks must agree on.
        scale: the loss scale.
        finite: whether all that the sender has seen was finite.
        all_zero: for each parameter, whether the sender's part of the gradient is all zero.
    """

    digest: int
    scale: float
    finite: bool
    all_zero: NDArray[np.bool_]

    def write(self, row: Bytes) -> None:
        """Put it at a message's start."""
        flags = 0 if self.finite else NOT_FINITE
        fields = _FIELDS.pack(self.digest, self.scale, flags, self.all_zero.size, 0)
        row[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
        row[_FIELDS.size : header_bytes(self.all_zero.size)] = np.packbits(
            self.all_zero, bitorder="little"
        )

    @staticmethod
    def all_zero_of(row: Bytes) -> NDArray[np.bool_]:
        """Which gradients are zero, of a message that `read` has accepted."""
        count = _FIELDS.unpack_from(row.data)[3]
        bits = row[_FIELDS.size : header_bytes(count)]
        return np.unpackbits(bits, count=count, bitorder="little").astype(bool)

    @classmethod
    def read(cls, row: Bytes, mine: Header, sender: int) -> Header:
        """The header of a message from rank `sender`.

        Raises:
            CollectiveMismatch: it is about other parameters, or compressed in another way.
        """
        items = mine.all_zero.size
        if row.size >= header_bytes(items):
            digest, scale, flags, count, _ = _FIELDS.unpack_from(row.data)
            if (digest, count) == (mine.digest, items) and scale == mine.scale:
                return cls(digest, scale, not flags & NOT_FINITE, cls.all_zero_of(row))
            if (digest, count) == (mine.digest, items):
                raise CollectiveMismatch(
                    f"compressed exchange: rank {sender} has the loss scale {scale:g}, this rank "
                    f"{mine.scale:g}"
                )
        raise CollectiveMismatch(
            f"compressed exchange: rank {sender} sends other parameters, or compresses them in "
            "another way; all ranks must make the same calls in the same order"
        )


def read_headers(rows: Sequence[Bytes], mine: Header, senders: Sequence[int]) -> list[Header]:
    """The headers of the messages of ranks `senders`."""
    return [Header.read(row, mine, rank) for row, rank in zip(rows, senders, strict=True)]


def digest_of(told: Any) -> int:
    """64 bits of whatever JSON can say."""
    text = json.dumps(told)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Agreement:
    """What all messages of a call say, so that ranks that differ find out.

    Attributes:
        digest: of the parameters and of how they are compressed.
        scale: the loss scale.
    """

    digest: int
    scale: float

    def header(self, finite: bool, all_zero: Sequence[bool]) -> Header:
        """The header of a message of this call."""
        return Header(self.digest, self.scale, finite, np.array(all_zero, np.bool_))


# Bytes of the message. Calls of other kinds begin with messages of other lengths, by which ranks
# find out: `pycollective.agree` with 9, `exchange_lengths` with a multiple of 8.
CALL_BYTES = header_bytes(0) + 2


def check_same_call(groups: Groups, agreement: Agreement, in_all: bool) -> None:
    """Compare what a dense call is about, whose messages do not say it; collective.

    Args:
        groups: of this rank.
        agreement: what the call is about.
        in_all: whether calls begin in the group of all ranks, as those of hooks that only average
            do, and not as `Groups.gather` says; the same on all ranks.

    Raises:
        CollectiveMismatch: another rank's call is about something else.
    """
    mine = agreement.header(True, [])
    row = np.zeros(CALL_BYTES, np.uint8)
    mine.write(row)
    whole = [(range(groups.all.size), groups.all.all_gather(row))] if in_all else groups.gather(row)
    for senders, rows in whole:
        if (rows != row).any():  # who differs, and in what
            read_headers(list(rows), mine, senders)


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    Attributes:
        finite: whether every gradient was finite on every rank (of a reduce-scatter: as far as this
            rank saw); None where a device knows, and the host does not yet.
        sent: bytes that this rank handed over for other hosts; None for a dense call, whose bytes
            are the backend's affair.
    """

    finite: bool | None
    sent: int | None


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

    def host_sums(self, groups: Groups, agreement: Agreement) -> list[Any]:
        """This rank's local shard of each gradient, summed over the ranks of its host.

        Where it is alone on its host, views of the gradients as they are; otherwise fp32. Without a
        local shard, nothing. Each rank sends fp32 to each, and of its own shard only.
        """
        hosts, local = groups.hosts, groups.local
        if local.size == 1:
            return [
                item.flat.part(*ranges[0])
                for item, ranges in zip(self.items, self.local_shards, strict=True)
            ]
        widths = [
            sum(ranges[shard][1] - ranges[shard][0] for ranges in self.local_shards)
            for shard in range(hosts.shards)
        ]
        header = agreement.header(True, [False] * len(self.items))
        first = -(-header_bytes(len(self.items)) // 4)  # in fp32 numbers
        rows = np.zeros((local.size, first + max(widths)), np.float32)
        for row in rows:
            header.write(row.view(np.uint8))
        for shard in range(hosts.shards):
            for item, (start, stop), row in self.along(shard, rows[shard, first:]):
                if row.size:
                    item.flat.widen(start, stop, row)
        came = local.all_to_all(rows.view(np.uint8))
        read_headers(list(came), header, hosts.local)
        if hosts.shard is None:
            return []
        total = np.empty(widths[hosts.shard], np.float32)
        leaves = came.view(np.float32)[:, first : first + total.size]
        _core.reduce_into([np.ascontiguousarray(row) for row in leaves], "sum", total)
        return [row for _, _, row in self.along(hosts.shard, total)]

    def along(self, shard: int, row: Any) -> list[tuple[Item, Range, Any]]:
        """Where the items of a local shard lie in a row, one after another."""
        found = []
        at = 0
        for item, ranges in zip(self.items, self.local_shards, strict=True):
            start, stop = ranges[shard]
            found.append((item, (start, stop), row[at : at + stop - start]))
            at += stop - start
        return found

    def in_fp32(self, number: int, shard: int, part: Any, start: int, stop: int) -> Floats:
        """Elements `start` to `stop` of an item whose local shard is `part` (of `host_sums`)."""
        values: Floats = np.empty(stop - start, np.float32)
        if isinstance(part, np.ndarray):
            first = self.local_shards[number][shard][0]
            values[:] = part[start - first : stop - first]
        else:
            self.items[number].flat.widen(start, stop, values)
        return values

    def is_zero(self, parts: Sequence[Any]) -> list[bool]:
        """Whether each of `parts`, this rank's local shard of the items, is all zero."""
        return [not (part[:64].any() or part.any()) for part in parts]

    def fill_nan(self) -> None:
        """Make every output NaN."""
        for item in self.items:
            item.flat.fill(float("nan"))


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


def floats(row: Bytes, at: int, count: int) -> Floats:
    """A copy of fp32 numbers that lie in a message at any place."""
    return row[at : at + 4 * count].copy().view(np.float32)
