"""Top-k: the largest elements of each gradient, as places and values.

Every rank picks from its share of the host's sum, plus what it holds. Two ways to exchange:

- *gather*: every host's selection to all, lengths first; each rank adds them up in the contract's
  order. A rank receives (H - 1) payloads, in two collectives between hosts.
- *region*: to each host what lies in its region, lengths first; the owner adds up, picks again as
  many as one host had sent, and sends those to all, lengths first. A rank receives about two
  payloads, whatever H, in four collectives. What the second selection drops goes back to the
  residuals of those who sent it, what rounding its values drops to the owner's.

Small parameters ride along in fp32, in the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import Agreement, Bucket, Cuts, Outcome, floats, read_headers
from pycollective.compression.domain import (
    VALUES,
    Domain,
    Indices,
    Numbers,
    Sparse,
    sum_of,
    widened,
)
from pycollective.compression.ends import Ends
from pycollective.compression.groups import Bytes, exchange_lengths, gather_lengths
from pycollective.compression.layout import Layout, Plan, Plans
from pycollective.compression.messages import Header
from pycollective.compression.residuals import Residuals
from pycollective.compression.routing import gathers
from pycollective.compression.selection import Piece, by_chunk, by_tensor, count_of, over_shares


@dataclass(frozen=True)
class _Came:
    """What came into a region, and what this rank sent into all.

    Attributes:
        rows: of each host, its message about this one's region.
        places, values: what this rank sent, by the places of its share.
        layout: of the share's regions.
        starts: of each item, where the share starts.
        finite: whether all gradients were.
        absent: for each item, whether it is zero everywhere.
        sent: bytes.
    """

    rows: list[Bytes]
    places: Numbers
    values: NDArray[Any]
    layout: Layout
    starts: list[int]
    finite: bool
    absent: NDArray[np.bool_]
    sent: int


class SparseExchange:
    """Averages gradients, of which the largest elements go between hosts.

    Args:
        ends: the groups of this rank.
        by: "tensor" or "chunk".
        chunk: elements of a chunk.
        values: "float32", "bfloat16" or "float16".
        way: "gather", "region" or "auto".
        sizes: elements of each parameter that is compressed.
    """

    def __init__(
        self, ends: Ends, by: str, chunk: int, values: str, way: str, sizes: Sequence[int]
    ) -> None:
        self._sizes = list(sizes)
        self._ends = ends
        self._cuts = Cuts(chunk, ends.places)
        self._by, self.chunk, self._values, self._way = by, chunk, VALUES[values], way
        self._plans = Plans(partial(Plan, places=ends.places, chunk=chunk))
        self.worker = Residuals()

    def __call__(self, items: list[Item], agreement: Agreement, density: float) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        plan = self._plans.of(bucket)
        own = bucket.host_sums(ends, agreement)
        chosen = self._choose(bucket, own, density)
        rows: list[Bytes] = []
        sent = 0
        gathers = self._gathers(density)
        if ends.across is not None:
            assert places.share is not None
            header = agreement.header(chosen is not None, bucket.is_zero(own))
            exchange = self._gather if gathers else self._by_region
            rows, sent = exchange(bucket, plan, own, chosen, header)
        layout = plan.shares if gathers else plan.all_regions
        finite = self._spread(bucket, layout, self._to_host(rows, layout), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def _gathers(self, density: float) -> bool:
        """Which way all go: by all parameters, so that no bucket decides."""
        if self._way != "auto":
            return self._way == "gather"
        entries = sum(count_of(density, size) for size in self._sizes)
        return gathers(entries, self._values.itemsize, self._ends.places)

    def _choose(self, bucket: Bucket, own: list[Any], density: float) -> dict[int, Indices] | None:
        """Of each parameter what this rank sends: places in its piece; None if not all finite.

        The pieces' residuals then hold the gradient and what was held, nothing taken off.
        """
        numbers = [n for n, item in enumerate(bucket.items) if not item.dense]
        pieces = [self._piece(bucket, own, n, density) for n in numbers]
        if pieces and self._by == "tensor" and self._ends.places.shares > 1:
            found = over_shares(pieces, self._ends.local)
            return None if found is None else dict(zip(numbers, found, strict=True))
        chosen = {}
        for number, piece in zip(numbers, pieces, strict=True):
            if not piece.left.size:
                continue
            if self._by == "tensor":
                indices = by_tensor(piece)
            else:
                indices = by_chunk(piece, density, self.chunk)
            if indices is None:
                return None
            chosen[number] = indices
        return chosen

    def _piece(self, bucket: Bucket, own: list[Any], number: int, density: float) -> Piece:
        item = bucket.items[number]
        k = count_of(density, item.flat.count)
        share = self._ends.places.share
        if share is None:
            return Piece((0, 0), None, None, np.empty(0, np.float32), k)
        start, stop = bucket.shares[number][share]
        held, left = self.worker.of(item.name, stop - start)
        return Piece((start, stop), own[number], held, left, k)

    def _take(
        self, bucket: Bucket, layout: Layout, chosen: Mapping[int, Indices]
    ) -> tuple[Numbers, NDArray[Any]]:
        """Take what was chosen off the residuals: its places in the share, and values."""
        counts = [indices.size for indices in chosen.values()]
        begins = np.array([layout.edges[number] for number in chosen], np.int64)
        values = np.empty(sum(counts), self._values)
        at = 0
        for number, indices in chosen.items():
            left = self.worker.left(bucket.items[number].name)
            _core.sparse_take(left, indices, values[at : at + indices.size])
            at += indices.size
        every = np.concatenate([np.empty(0, np.uint32), *chosen.values()])
        return every + np.repeat(begins, counts), values

    def _dense(self, bucket: Bucket, domain: Domain, own: list[Any]) -> Floats:
        share = self._ends.places.share
        assert share is not None
        parts = [
            bucket.in_fp32(number, share, own[number], start, stop)
            for number, start, stop in domain.dense
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _gather(
        self,
        bucket: Bucket,
        plan: Plan,
        own: list[Any],
        chosen: dict[int, Indices] | None,
        header: Header,
    ) -> tuple[list[Bytes], int]:
        """Every host's message about this share, and how many bytes this rank sent."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        layout = plan.own_share
        (taken,) = layout.split(*self._take(bucket, layout, chosen or {}))
        (domain,) = layout.domains
        message = domain.write(header, self._dense(bucket, domain, own), taken)
        senders = places.across(places.share)
        rows = gather_lengths(across, message, senders, domain.longest(self._values))
        headers = read_headers(rows, header, senders)
        self._keep(bucket, headers)
        return rows, (places.hosts - 1) * (8 + max(row.size for row in rows))

    def _keep(self, bucket: Bucket, headers: Sequence[Header]) -> None:
        """Leave the residuals of what is all zero everywhere where they are.

        It may be a parameter that no rank used: DDP then ignores what comes back.
        """
        absent = np.logical_and.reduce([each.absent for each in headers])
        for number in np.flatnonzero(absent):
            self.worker.keep(bucket.items[number].name)

    def scatter(
        self, items: list[Item], agreement: Agreement, density: float, out: Flat
    ) -> Outcome:
        """The first half of *region*: `out` gets the average of what this rank owns.

        Whether all were finite is this rank's view; the ranks must agree on it.
        """
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        plan = self._plans.of(bucket)
        own = bucket.host_sums(ends, agreement)
        chosen = self._choose(bucket, own, density)
        header = agreement.header(chosen is not None, bucket.is_zero(own))
        came = self._to_regions(bucket, plan, own, chosen, header)
        if came.finite:
            layout = Layout([came.layout.domains[places.host]], len(items))
            self._write(layout, [came.rows], lambda _: out)
        return Outcome(came.finite and out.is_finite(), came.sent)

    def _write(
        self, layout: Layout, rows: Sequence[Sequence[Bytes]], target: Callable[[int], Flat]
    ) -> bool:
        """The averages of all domains, of each from some ranks' messages about it.

        Args:
            layout: of the domains; what it has of an item is written from the item's start on.
            rows: of each domain.
            target: of each item.

        Returns:
            Whether they are finite: small parameters are as they came, and sums may overflow.
        """
        ranks = self._ends.places.ranks
        dense = np.empty(sum(domain.dense_count for domain in layout.domains), np.float32)
        at = 0
        for domain, messages in zip(layout.domains, rows, strict=True):
            if domain.dense_count:
                part = dense[at : at + domain.dense_count]
                leaves = [floats(row, domain.dense_at, part.size) for row in messages]
                _core.reduce_into(leaves, "sum", part)
                at += part.size
        dense /= np.float32(ranks)
        at = 0
        for domain in layout.domains:
            for number, start, stop in domain.dense:
                target(number).put(start, dense[at : at + stop - start])
                at += stop - start
        parts, absent = [], []
        for domain, messages in zip(layout.domains, rows, strict=True):
            read = [domain.read(row, self._values) for row in messages]
            parts.append(read[0] if len(read) == 1 else sum_of(read))
            flags = [Header.absent_of(row) for row in messages]
            absent.append(flags[0] if len(flags) == 1 else np.logical_and.reduce(flags))
        places, values = layout.merge(parts, absent)
        values = widened(values)
        for number, count, indices, there in layout.by_item(places):
            _core.sparse_scatter(indices, values[there], target(number).part(0, count), ranks)
        return bool(np.isfinite(dense).all() and np.isfinite(values).all())

    def _to_regions(
        self,
        bucket: Bucket,
        plan: Plan,
        own: list[Any],
        chosen: dict[int, Indices] | None,
        header: Header,
    ) -> _Came:
        """Send what was chosen to the hosts whose regions it lies in."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        layout = plan.own_regions
        taken, values = self._take(bucket, layout, chosen or {})
        rows = [
            domain.write(header, self._dense(bucket, domain, own), part)
            for domain, part in zip(layout.domains, layout.split(taken, values), strict=True)
        ]
        senders = places.across(places.share)
        came, longest = exchange_lengths(across, rows, senders, layout.longest(self._values))
        headers = read_headers(came, header, senders)
        self._keep(bucket, headers)
        return _Came(
            came,
            taken,
            values,
            layout,
            plan.starts,
            all(each.finite for each in headers),
            np.logical_and.reduce([each.absent for each in headers]),
            (places.hosts - 1) * (8 * places.hosts + longest),
        )

    def _by_region(
        self,
        bucket: Bucket,
        plan: Plan,
        own: list[Any],
        chosen: dict[int, Indices] | None,
        header: Header,
    ) -> tuple[list[Bytes], int]:
        """The owners' messages about this share's regions, and how many bytes this rank sent."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        came = self._to_regions(bucket, plan, own, chosen, header)
        message = self._merge(bucket, came, header)
        senders, most = places.across(places.share), came.layout.longest(self._values)
        results = gather_lengths(across, message, senders, most)
        if came.finite:
            self._return_dropped(bucket, came, results)
        return results, came.sent + (places.hosts - 1) * (8 + max(row.size for row in results))

    def _merge(self, bucket: Bucket, came: _Came, header: Header) -> Bytes:
        """The message about the region that this rank owns: sums, of which the largest stay."""
        domain, finite = came.layout.domains[self._ends.places.host], came.finite
        dense = np.zeros(domain.dense_count, np.float32)
        kept = [np.empty(0, np.uint32)]
        values = [np.empty(0, self._values)]
        if finite:
            if dense.size:
                leaves = [floats(row, domain.dense_at, dense.size) for row in came.rows]
                _core.reduce_into(leaves, "sum", dense)
            read = [domain.read(row, self._values) for row in came.rows]
            total = sum_of(read)
            edges = np.searchsorted(total.places, domain.offsets).tolist()
            # Of each item as many stay as the host that sent the most of it had.
            each_sent = [np.diff(np.searchsorted(each.places, domain.offsets)) for each in read]
            budgets = np.maximum.reduce(each_sent).tolist()
            for at, number in enumerate(domain.items.tolist()):
                places = total.places[edges[at] : edges[at + 1]]
                if not places.size or came.absent[number]:
                    continue
                sums = total.values[edges[at] : edges[at + 1]]
                scratch = np.empty_like(sums)
                best = np.empty(min(budgets[at], sums.size), np.uint32)
                if _core.top_k(sums, None, scratch, best.size, best) < 0:
                    finite = False
                    break
                values.append(np.empty(best.size, self._values))
                _core.sparse_take(scratch, best, values[-1])
                kept.append(places[best])
                first = int(domain.starts[at] - domain.offsets[at]) - came.starts[number]
                left = self.worker.left(bucket.items[number].name)
                left[kept[-1].astype(np.int64) + first] += scratch[best]  # what rounding dropped
        said = Header(header.digest, header.scale, finite, came.absent)
        return domain.write(said, dense, Sparse(np.concatenate(kept), np.concatenate(values)))

    def _return_dropped(self, bucket: Bucket, came: _Came, results: Sequence[Bytes]) -> None:
        """Give back to the residuals what this rank sent and nobody got."""
        layout = came.layout
        final = [
            domain.read(row, self._values)
            for domain, row in zip(layout.domains, results, strict=True)
        ]
        got, _ = layout.merge(final, [came.absent] * len(final))
        dropped = np.ones(came.places.size, np.bool_)
        if got.size:
            nearest = np.minimum(np.searchsorted(got, came.places), got.size - 1)
            dropped = got[nearest] != came.places
        places, values = came.places[dropped], widened(came.values[dropped])
        for number, _, indices, there in layout.by_item(places):
            if indices.size and not came.absent[number]:
                self.worker.left(bucket.items[number].name)[indices] += values[there]

    def _to_host(self, rows: Sequence[Bytes], layout: Layout) -> list[list[Bytes]]:
        """Of each share its messages, on every rank of this host."""
        local, places = self._ends.local, self._ends.places
        if local.size == 1:
            return [list(rows)]
        most = 8 + places.hosts * (8 + layout.longest(self._values))
        lengths = np.array([len(rows), *(row.size for row in rows)], np.int64).view(np.uint8)
        mine = np.concatenate([lengths, *rows]) if rows else np.empty(0, np.uint8)
        found = []
        for whole in gather_lengths(local, mine, places.local, most)[: places.shares]:
            count = int(whole[:8].copy().view(np.int64)[0])
            sizes = whole[8 : 8 * (1 + count)].copy().view(np.int64)
            bounds = 8 * (1 + count) + np.concatenate([[0], np.cumsum(sizes)])
            found.append([whole[bounds[i] : bounds[i + 1]] for i in range(count)])
        return found

    def _spread(
        self, bucket: Bucket, layout: Layout, rows: list[list[Bytes]], agreement: Agreement
    ) -> bool:
        """Write all shares' means to the gradients, if all are finite."""
        places = self._ends.places
        mine = agreement.header(True, [False] * len(bucket.items))
        for share, messages in enumerate(rows):
            headers = read_headers(messages, mine, places.across(share))
            if not all(each.finite for each in headers):
                return False
        if len(layout.domains) != len(rows):  # a domain has one message, its owner's
            rows = [[message] for messages in rows for message in messages]
        return self._write(layout, rows, lambda number: bucket.items[number].flat)
