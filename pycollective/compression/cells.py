"""What lies where in the messages of 1-bit and 8-bit: found once for a bucket, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pycollective.compression.bucket import Bucket
from pycollective.compression.domain import Numbers
from pycollective.compression.layout import Plan
from pycollective.compression.messages import header_bytes
from pycollective.compression.placing import Places

SizeOf = Callable[[int], int]
Sizes = Callable[[Numbers, Numbers], Numbers]


@dataclass(frozen=True)
class Cells:
    """Regions of parameters in messages, one an element of each array; none is empty.

    Attributes:
        stride: how long all messages about the share are.
        hosts: who owns each.
        items: which of the call's parameters it is of.
        starts, stops: its elements of the parameter.
        ats: its place in the host's message, bytes.
        sizes: bytes.
    """

    stride: int
    hosts: Numbers
    items: Numbers
    starts: Numbers
    stops: Numbers
    ats: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, plan: Plan, share: int, hosts: int, size_of: Sizes) -> Cells:
        """Those of a share."""
        found = []
        stride = header = header_bytes(plan.items)
        for host in range(hosts):
            starts, stops = plan.regions(share, host)
            items = np.flatnonzero(stops > starts)
            sizes = size_of(items, (stops - starts)[items])
            ends = header + np.cumsum(sizes)
            stride = max(stride, int(ends[-1]) if ends.size else 0)
            host_of = np.full(items.size, host)
            found.append((host_of, items, starts[items], stops[items], ends - sizes, sizes))
        columns = [np.concatenate(each) for each in zip(*found, strict=True)]
        return cls(stride, *columns)

    def on(self, host: int) -> Iterator[Cell]:
        """Those that a host owns."""
        first, last = np.searchsorted(self.hosts, [host, host + 1])
        of = (each[first:last].tolist() for each in self._columns)
        return (Cell(*each) for each in zip(*of, strict=True))

    @property
    def _columns(self) -> tuple[Numbers, ...]:
        return self.items, self.starts, self.stops, self.ats, self.sizes


class Cell(NamedTuple):
    """One of `Cells`."""

    item: int
    start: int
    stop: int
    at: int
    size: int


class Tiles(NamedTuple):
    """The cells of one parameter, from its first element on, in bytes that hold some messages.

    All cuts are at chunks, so their payloads one after another are the parameter's own.

    Attributes:
        item: the parameter.
        bounds: where each cell's payload begins and ends in those bytes.
        cells: start, stop, and the number of its message.
    """

    item: int
    bounds: list[tuple[int, int]]
    cells: list[tuple[int, int, int]]


def tiles_of(shares: Sequence[Cells], messages: Sequence[Numbers]) -> list[Tiles]:
    """The cells of some shares by parameter and start; `messages`: where each of a share begins."""
    items, starts, stops, firsts, sizes = (
        np.concatenate(each)
        for each in zip(
            *(
                (c.items, c.starts, c.stops, begins[c.hosts] + c.ats, c.sizes)
                for c, begins in zip(shares, messages, strict=True)
            ),
            strict=True,
        )
    )
    before = np.cumsum([0, *(begins.size for begins in messages)])[:-1]
    message = np.concatenate([c.hosts + at for c, at in zip(shares, before, strict=True)])
    order = np.lexsort((starts, items))
    bounds = list(zip(firsts[order].tolist(), (firsts + sizes)[order].tolist(), strict=True))
    cells = [each[order].tolist() for each in (starts, stops, message)]
    every = list(zip(*cells, strict=True))
    numbers, at = np.unique(items[order], return_index=True)
    ends = [*at.tolist(), len(bounds)][1:]
    return [
        Tiles(number, bounds[a:b], every[a:b])
        for number, a, b in zip(numbers.tolist(), at.tolist(), ends, strict=True)
    ]


class Messages:
    """What a bucket's messages hold.

    Attributes:
        shares: of each share.
    """

    def __init__(self, bucket: Bucket, places: Places, chunk: int, size_of: SizeOf) -> None:
        plan = Plan(bucket, places, chunk)
        dense = np.array([item.dense for item in bucket.items], np.bool_)

        def sizes(items: Numbers, counts: Numbers) -> Numbers:
            of = {count: size_of(count) for count in set(counts.tolist())}
            packed = np.array([of[count] for count in counts.tolist()], np.int64)
            return np.where(dense[items], 4 * counts, packed)

        self._hosts = places.hosts
        every = range(places.shares)
        self.shares = [Cells.of(plan, share, places.hosts, sizes) for share in every]
        self.stride = max(each.stride for each in self.shares)
        self._share = places.share

    @property
    def mine(self) -> Cells:
        """Of this rank's share."""
        assert self._share is not None
        return self.shares[self._share]

    @cached_property
    def sent(self) -> list[Tiles]:
        """In this rank's messages, one for each host."""
        return tiles_of([self.mine], [np.arange(self._hosts) * self.mine.stride])

    @cached_property
    def results(self) -> list[Tiles]:
        """In all shares' messages, each share's in a row as long as the longest."""
        row = self._hosts * self.stride
        hosts = np.arange(self._hosts)
        return tiles_of(
            self.shares, [s * row + hosts * each.stride for s, each in enumerate(self.shares)]
        )
