"""What the exchanges share: the gradients of a call, cut by share, added up within a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Floats, Item
from pycollective.compression.groups import Bytes, Ends
from pycollective.compression.messages import Header, header_bytes
from pycollective.compression.placing import Places, Range, shares_of


@dataclass(frozen=True)
class Outcome:
    """What a call came to.

    Attributes:
        finite: whether every gradient was, on every rank. (Of a scatter: as far as this one saw.)
        sent: bytes that this rank handed over for other hosts; None for a dense call, whose bytes
            are the backend's affair.
    """

    finite: bool
    sent: int | None


@dataclass(frozen=True)
class Agreement:
    """What every message of a call carries.

    Attributes:
        digest: of the parameters and of how they are compressed.
        scale: the loss scale.
    """

    digest: int
    scale: float

    def header(self, finite: bool, absent: Sequence[bool]) -> Header:
        """Of a message of this call."""
        return Header(self.digest, self.scale, finite, np.array(absent, np.bool_))


class Cuts:
    """How parameters are cut for shares; found once for each."""

    def __init__(self, chunk: int, places: Places) -> None:
        self._chunk, self._places = chunk, places
        self._shares: dict[Any, list[Range]] = {}

    def shares(self, item: Item) -> list[Range]:
        """The elements of each share."""
        key = item.name, item.flat.count, item.owner
        if key not in self._shares:
            self._shares[key] = self._cut(item)
        return self._shares[key]

    def _cut(self, item: Item) -> list[Range]:
        if item.owner is None:
            return shares_of(item.name, item.flat.count, self._chunk, self._places)
        return [
            (0, item.flat.count if share == item.owner[0] else 0)
            for share in range(self._places.shares)
        ]


class Bucket:
    """The gradients of one call.

    Attributes:
        items: them.
        shares: of each, the elements of each share.
        key: what the layout of its messages follows from.
    """

    def __init__(self, items: Sequence[Item], cuts: Cuts) -> None:
        self.items = list(items)
        self.shares: list[list[Range]] = [cuts.shares(item) for item in items]
        self.key = tuple((item.name, item.flat.count, item.dense, item.owner) for item in items)

    def host_sums(self, ends: Ends, agreement: Agreement) -> list[Any]:
        """This rank's share of each gradient, summed over the ranks of its host.

        Where it is alone on its host, views of the gradients as they are; otherwise fp32. Without a
        share, nothing. fp32 crosses the host's memory: a share to each rank, no more than that.
        """
        share = ends.places.share
        if ends.local.size == 1:
            return [
                item.flat.part(*ranges[0])
                for item, ranges in zip(self.items, self.shares, strict=True)
            ]
        widths = [
            sum(ranges[s][1] - ranges[s][0] for ranges in self.shares)
            for s in range(ends.places.shares)
        ]
        header = agreement.header(True, [False] * len(self.items))
        first = -(-header_bytes(len(self.items)) // 4)  # in fp32 numbers
        rows = np.zeros((ends.local.size, first + max(widths)), np.float32)
        for row in rows:
            header.write(row.view(np.uint8))
        for s in range(ends.places.shares):
            for item, (start, stop), row in self._along(s, rows[s, first:]):
                if row.size:
                    item.flat.widen(start, stop, row)
        came = ends.local.all_to_all(rows.view(np.uint8))
        read_headers(list(came), header, ends.places.local)
        if share is None:
            return []
        total = np.empty(widths[share], np.float32)
        leaves = came.view(np.float32)[:, first : first + total.size]
        _core.reduce_into([np.ascontiguousarray(row) for row in leaves], "sum", total)
        return [row for _, _, row in self._along(share, total)]

    def _along(self, share: int, row: Floats) -> list[tuple[Item, Range, Floats]]:
        """Where the items of a share lie in a row, one after another."""
        found = []
        at = 0
        for item, ranges in zip(self.items, self.shares, strict=True):
            start, stop = ranges[share]
            found.append((item, (start, stop), row[at : at + stop - start]))
            at += stop - start
        return found

    def in_fp32(self, number: int, share: int, part: Any, start: int, stop: int) -> Floats:
        """Elements `start` to `stop` of an item whose share is `part` (of `host_sums`), in fp32."""
        values: Floats = np.empty(stop - start, np.float32)
        if isinstance(part, np.ndarray):
            first = self.shares[number][share][0]
            values[:] = part[start - first : stop - first]
        else:
            self.items[number].flat.widen(start, stop, values)
        return values

    def is_zero(self, parts: Sequence[Any]) -> list[bool]:
        """Whether each of `parts`, this rank's share of the items, is all zero."""
        return [not (part[:64].any() or part.any()) for part in parts]

    def fill_nan(self) -> None:
        """Make every output NaN."""
        for item in self.items:
            item.flat.fill(float("nan"))


def floats(row: Bytes, at: int, count: int) -> Floats:
    """A copy of fp32 numbers that lie in a message at any place."""
    return row[at : at + 4 * count].copy().view(np.float32)


def read_headers(rows: Sequence[Bytes], mine: Header, senders: Sequence[int]) -> list[Header]:
    """The headers of the messages of ranks `senders`."""
    return [Header.read(row, mine, rank) for row, rank in zip(rows, senders, strict=True)]
