"""How the messages of a call fit together: found once for a bucket, kept while it is a bucket.

All as arrays, and only of what is not empty: with many hosts most parameters have nothing in most
regions, and what a call costs must not grow with shares times hosts times parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.bucket import Bucket
from pycollective.compression.domain import Domain, Indices, Numbers, Sparse
from pycollective.compression.placing import Places, regions_on, turn_of

T = TypeVar("T")


def ranges(firsts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of several ranges, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(firsts - (ends - counts), counts)


class Layout:
    """Domains that have each element of some parts of the parameters once between them.

    Their segments by item and start, one after another, are a space of its own: its places ascend
    with those of each parameter.

    Args:
        domains: them.
        items: of the call.

    Attributes:
        edges: of each item, where it begins in that space; one more, where all ends.
    """

    def __init__(self, domains: Sequence[Domain], items: int) -> None:
        self.domains = list(domains)
        numbers = np.concatenate([each.items for each in self.domains])
        starts = np.concatenate([each.starts for each in self.domains])
        sizes = np.concatenate([each.stops - each.starts for each in self.domains])
        self._bounds = np.cumsum([0, *(each.items.size for each in self.domains)])
        self._order = np.lexsort((starts, numbers))
        tiles = np.cumsum(sizes[self._order])
        self._tiles = np.concatenate([[0], tiles])
        begins = np.empty_like(starts)
        begins[self._order] = self._tiles[:-1]
        offsets = np.concatenate([each.offsets[:-1] for each in self.domains])
        self._shifts = begins - offsets
        firsts = np.searchsorted(numbers[self._order], np.arange(items + 1))
        self.edges: Numbers = self._tiles[firsts]

    def longest(self, dtype: np.dtype[Any]) -> int:
        """Bytes that a message about a domain has at most."""
        return max(domain.longest(dtype) for domain in self.domains)

    def merge(
        self, parts: Sequence[Sparse], absent: Sequence[NDArray[np.bool_]]
    ) -> tuple[Numbers, NDArray[Any]]:
        """What is in all domains, by this space's places.

        Args:
            parts: of each domain.
            absent: of each domain, the items of which nothing is taken.
        """
        counts, firsts, at = [], [], 0
        for domain, part, without in zip(self.domains, parts, absent, strict=True):
            edges = np.searchsorted(part.places, domain.offsets)
            counts.append(np.where(without[domain.items], 0, np.diff(edges)))
            firsts.append(edges[:-1] + at)
            at += part.places.size
        count = np.concatenate(counts)[self._order]
        index = ranges(np.concatenate(firsts)[self._order], count)
        places = np.concatenate([each.places for each in parts])[index]
        values = np.concatenate([each.values for each in parts])[index]
        return places + np.repeat(self._shifts[self._order], count), values

    def split(self, places: Numbers, values: NDArray[Any]) -> list[Sparse]:
        """The inverse: what is in each domain."""
        edges = np.searchsorted(places, self._tiles)
        firsts, counts = np.empty_like(self._order), np.empty_like(self._order)
        firsts[self._order], counts[self._order] = edges[:-1], np.diff(edges)
        index = ranges(firsts, counts)
        inside = (places[index] - np.repeat(self._shifts, counts)).astype(np.uint32)
        sent = values[index]
        ends = np.concatenate([[0], np.cumsum(counts)])[self._bounds]
        return [
            Sparse(inside[first:last], sent[first:last])
            for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]

    def by_item(self, places: Numbers) -> list[tuple[int, int, Indices, slice]]:
        """Of each item that is here: its elements, its places from its start, which those are."""
        there = np.searchsorted(places, self.edges)
        inside = (places - np.repeat(self.edges[:-1], np.diff(there))).astype(np.uint32)
        counts, bounds = np.diff(self.edges).tolist(), there.tolist()
        return [
            (n, count, inside[bounds[n] : bounds[n + 1]], slice(bounds[n], bounds[n + 1]))
            for n, count in enumerate(counts)
            if count
        ]


class Plan:
    """Of one bucket: what its messages are about.

    Args:
        bucket: it; nothing of its gradients is kept.
        places: the hosts.
        chunk: elements that are never parted.

    Attributes:
        items: parameters of the call.
    """

    def __init__(self, bucket: Bucket, places: Places, chunk: int) -> None:
        self._places, self._chunk = places, chunk
        self.items = len(bucket.items)
        self._dense = [item.dense for item in bucket.items]
        self._owners = [item.owner for item in bucket.items]
        self._turns = np.array([turn_of(item.name) // places.shares for item in bucket.items])
        self._shares = np.array(bucket.shares, np.int64).reshape(-1, places.shares, 2)

    def regions(self, share: int, host: int) -> tuple[Numbers, Numbers]:
        """Of each item, where the region of a share that a host owns starts and stops."""
        starts, stops = self._shares[:, share, 0], self._shares[:, share, 1]
        lower, upper = regions_on(host, starts, stops, self._turns, self._chunk, self._places.hosts)
        for number, owner in enumerate(self._owners):
            if owner is not None:
                whole = owner == (share, host)
                lower[number], upper[number] = starts[number], (stops if whole else starts)[number]
        return lower, upper

    def _whole(self, share: int) -> Domain:
        return Domain.of(self._shares[:, share, 0], self._shares[:, share, 1], self._dense)

    def _regions(self, share: int) -> list[Domain]:
        hosts = range(self._places.hosts)
        return [Domain.of(*self.regions(share, host), self._dense) for host in hosts]

    @cached_property
    def shares(self) -> Layout:
        """A domain for each share."""
        shares = range(self._places.shares)
        return Layout([self._whole(share) for share in shares], self.items)

    @cached_property
    def all_regions(self) -> Layout:
        """A domain for each share and host, in that order."""
        shares = range(self._places.shares)
        every = [domain for share in shares for domain in self._regions(share)]
        return Layout(every, self.items)

    @cached_property
    def own_share(self) -> Layout:
        """A domain: this rank's share."""
        assert self._places.share is not None
        return Layout([self._whole(self._places.share)], self.items)

    @cached_property
    def own_regions(self) -> Layout:
        """A domain for each host: its region of this rank's share."""
        assert self._places.share is not None
        return Layout(self._regions(self._places.share), self.items)

    @cached_property
    def starts(self) -> list[int]:
        """Of each item, where this rank's share starts."""
        assert self._places.share is not None
        return [int(each) for each in self._shares[:, self._places.share, 0]]


class Plans(Generic[T]):
    """A plan for each bucket.

    A parameter is in one, or in one compressed and in one dense, at the start: DDP rebuilds its
    buckets, and the old go.
    """

    def __init__(self, make: Callable[[Bucket], T]) -> None:
        self._make = make
        self._plans: dict[Any, T] = {}
        self._bucket_of: dict[tuple[str, bool], Any] = {}

    def of(self, bucket: Bucket) -> T:
        """Of this bucket."""
        plan = self._plans.get(bucket.key)
        if plan is None:
            for item in bucket.items:
                self._plans.pop(self._bucket_of.get((item.name, item.dense)), None)
                self._bucket_of[item.name, item.dense] = bucket.key
            plan = self._plans[bucket.key] = self._make(bucket)
        return plan

    def __len__(self) -> int:
        return len(self._plans)
