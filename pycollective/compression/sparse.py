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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import Agreement, Bucket, Cuts, Outcome, floats, read_headers
from pycollective.compression.domain import VALUES, Chosen, Domain
from pycollective.compression.groups import Bytes, Ends, exchange_lengths, gather_lengths
from pycollective.compression.messages import Header
from pycollective.compression.residuals import Residuals
from pycollective.compression.selection import (
    Indices,
    Piece,
    by_chunk,
    by_tensor,
    count_of,
    over_shares,
)

# Up to here a rank may receive by gather; beyond, more than two hosts go by region.
GATHERED = 256 << 10


@dataclass(frozen=True)
class _Came:
    """What came into a region, and what this rank sent into each.

    Attributes:
        rows: of each host, its message about this one's region.
        taken: what this rank sent, by item.
        starts: of each item, where its places are counted from.
        domains: of each host, what its messages are about.
        finite: whether all gradients were.
        absent: for each item, whether it is zero everywhere.
        sent: bytes.
    """

    rows: list[Bytes]
    taken: dict[int, Chosen]
    starts: dict[int, int]
    domains: list[Domain]
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
        self._domains: dict[Any, Domain] = {}
        self.worker = Residuals()

    def __call__(self, items: list[Item], agreement: Agreement, density: float) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        own = bucket.host_sums(ends, agreement)
        chosen = self._choose(bucket, own, density)
        rows: list[Bytes] = []
        sent = 0
        gathers = self._gathers(density)
        if ends.across is not None:
            assert places.share is not None
            header = agreement.header(chosen is not None, bucket.is_zero(own))
            exchange = self._gather if gathers else self._by_region
            rows, sent = exchange(bucket, own, chosen, header)
        finite = self._spread(bucket, gathers, self._to_host(rows), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def _gathers(self, density: float) -> bool:
        """Which way all go: by all parameters, so that no bucket decides."""
        if self._way != "auto":
            return self._way == "gather"
        hosts = self._ends.places.hosts
        entries = sum(count_of(density, size) for size in self._sizes)
        # A place takes about two bytes.
        received = (hosts - 1) * entries * (2 + self._values.itemsize) // self._ends.places.shares
        return hosts <= 2 or received <= GATHERED

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

    def _take(self, bucket: Bucket, chosen: dict[int, Indices]) -> dict[int, Chosen]:
        """Take what was chosen off the residuals."""
        taken = {}
        for number, indices in chosen.items():
            values = np.empty(indices.size, self._values)
            _, left = self.worker.of(bucket.items[number].name, 0)
            _core.sparse_take(left, indices, values)
            taken[number] = Chosen(indices, values)
        return taken

    def _domain(self, bucket: Bucket, share: int, host: int | None) -> Domain:
        """What messages are about: a share, or the region of it that `host` owns."""
        key = bucket.key, share, host
        if key not in self._domains:
            self._domains[key] = self._new_domain(bucket, share, host)
        return self._domains[key]

    def _new_domain(self, bucket: Bucket, share: int, host: int | None) -> Domain:
        segments = []
        for number, item in enumerate(bucket.items):
            whole = bucket.shares[number][share]
            start, stop = whole if host is None else bucket.regions(number, share)[host]
            segments.append((number, start, stop, item.dense))
        return Domain.of(segments)

    def _dense(self, bucket: Bucket, domain: Domain, own: list[Any], share: int) -> Floats:
        parts = [
            bucket.in_fp32(number, share, own[number], start, stop)
            for number, start, stop in domain.dense
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _gather(
        self, bucket: Bucket, own: list[Any], chosen: dict[int, Indices] | None, header: Header
    ) -> tuple[list[Bytes], int]:
        """Every host's message about this share, and how many bytes this rank sent."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        domain = self._domain(bucket, places.share, None)
        taken = self._take(bucket, chosen or {})
        starts = {number: start for number, start, _, _ in domain.segments}
        dense = self._dense(bucket, domain, own, places.share)
        message = domain.write(header, dense, taken, starts)
        rows = gather_lengths(across, message)
        headers = read_headers(rows, header, places.across(places.share))
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
        own = bucket.host_sums(ends, agreement)
        chosen = self._choose(bucket, own, density)
        header = agreement.header(chosen is not None, bucket.is_zero(own))
        came = self._to_regions(bucket, own, chosen, header)
        if came.finite:
            self._write(came.domains[places.host], came.rows, lambda _: out)
        return Outcome(came.finite and out.is_finite(), came.sent)

    def _write(self, domain: Domain, rows: Sequence[Bytes], target: Callable[[int], Flat]) -> bool:
        """The average of a domain, from some ranks' messages about it; `target`: of each item.

        Returns:
            Whether it is finite: small parameters are as they came, and sums may overflow.
        """
        ranks, finite = self._ends.places.ranks, True
        if domain.dense_count:
            dense = np.empty(domain.dense_count, np.float32)
            leaves = [floats(row, domain.dense_at, dense.size) for row in rows]
            _core.reduce_into(leaves, "sum", dense)
            dense /= np.float32(ranks)
            finite &= bool(np.isfinite(dense).all())
            at = 0
            for number, start, stop in domain.dense:
                target(number).put(start, dense[at : at + stop - start])
                at += stop - start
        read = [domain.read(row, self._values) for row in rows]
        absent = np.logical_and.reduce([Header.absent_of(row) for row in rows])
        for number, start, stop, is_dense in domain.segments:
            if is_dense or start == stop:
                continue
            indices, sums = domain.sum_of(number, read)
            if absent[number]:
                indices, sums = indices[:0], sums[:0]
            finite &= bool(np.isfinite(sums).all())
            _core.sparse_scatter(indices, sums, target(number).part(start, stop), ranks)
        return finite

    def _to_regions(
        self, bucket: Bucket, own: list[Any], chosen: dict[int, Indices] | None, header: Header
    ) -> _Came:
        """Send what was chosen to the hosts whose regions it lies in."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        share = places.share
        taken = self._take(bucket, chosen or {})
        starts = {n: bucket.shares[n][share][0] for n in range(len(bucket.items))}
        domains = [self._domain(bucket, share, host) for host in range(places.hosts)]
        rows = [
            domain.write(header, self._dense(bucket, domain, own, share), taken, starts)
            for domain in domains
        ]
        came, longest = exchange_lengths(across, rows)
        headers = read_headers(came, header, places.across(share))
        self._keep(bucket, headers)
        return _Came(
            came,
            taken,
            starts,
            domains,
            all(each.finite for each in headers),
            np.logical_and.reduce([each.absent for each in headers]),
            (places.hosts - 1) * (8 * places.hosts + longest),
        )

    def _by_region(
        self, bucket: Bucket, own: list[Any], chosen: dict[int, Indices] | None, header: Header
    ) -> tuple[list[Bytes], int]:
        """The owners' messages about this share's regions, and how many bytes this rank sent."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        came = self._to_regions(bucket, own, chosen, header)
        message = self._merge(bucket, came, header)
        results = gather_lengths(across, message)
        if came.finite:
            for domain, row in zip(came.domains, results, strict=True):
                self._return_dropped(bucket, domain, came, row)
        return results, came.sent + (places.hosts - 1) * (8 + max(row.size for row in results))

    def _merge(self, bucket: Bucket, came: _Came, header: Header) -> Bytes:
        """The message about the region that this rank owns: sums, of which the largest stay."""
        domain, finite = came.domains[self._ends.places.host], came.finite
        dense = np.zeros(domain.dense_count, np.float32)
        final: dict[int, Chosen] = {}
        if finite:
            if dense.size:
                leaves = [floats(row, domain.dense_at, dense.size) for row in came.rows]
                _core.reduce_into(leaves, "sum", dense)
            read = [domain.read(row, self._values) for row in came.rows]
            for number, start, _stop, _ in domain.segments:
                if bucket.items[number].dense or came.absent[number]:
                    continue
                places, sums = domain.sum_of(number, read)
                if not places.size:
                    continue
                budget = max(each[number].places.size for each in read if number in each)
                scratch = np.empty_like(sums)
                best = np.empty(min(budget, sums.size), np.uint32)
                kept = _core.top_k(sums, None, scratch, best.size, best)
                finite &= kept >= 0
                if kept < 0:
                    break
                values = np.empty(best.size, self._values)
                _core.sparse_take(scratch, best, values)
                places = places[best] + np.uint32(start - came.starts[number])
                _, left = self.worker.of(bucket.items[number].name, 0)
                left[places] += scratch[best]  # what rounding dropped
                final[number] = Chosen(places, values)
        said = Header(header.digest, header.scale, finite, came.absent)
        return domain.write(said, dense, final, came.starts)

    def _return_dropped(self, bucket: Bucket, domain: Domain, came: _Came, row: Bytes) -> None:
        """Give back to the residuals what this rank sent into a region and nobody got."""
        final = domain.read(row, self._values)
        for number, start, stop, dense in domain.segments:
            if dense or came.absent[number] or number not in came.taken:
                continue
            first = came.starts[number]
            sent = came.taken[number].between(start - first, stop - first)
            got = final[number].places + np.uint32(start - first)
            dropped = ~np.isin(sent.places, got, assume_unique=True)
            _, left = self.worker.of(bucket.items[number].name, 0)
            left[sent.places[dropped]] += sent.widened()[dropped]

    def _to_host(self, rows: Sequence[Bytes]) -> list[list[Bytes]]:
        """Of each share its messages, on every rank of this host."""
        local = self._ends.local
        if local.size == 1:
            return [list(rows)]
        lengths = np.array([len(rows), *(row.size for row in rows)], np.int64).view(np.uint8)
        mine = np.concatenate([lengths, *rows]) if rows else np.empty(0, np.uint8)
        found = []
        for whole in gather_lengths(local, mine)[: self._ends.places.shares]:
            count = int(whole[:8].copy().view(np.int64)[0])
            sizes = whole[8 : 8 * (1 + count)].copy().view(np.int64)
            bounds = 8 * (1 + count) + np.concatenate([[0], np.cumsum(sizes)])
            found.append([whole[bounds[i] : bounds[i + 1]] for i in range(count)])
        return found

    def _spread(
        self, bucket: Bucket, gathers: bool, rows: list[list[Bytes]], agreement: Agreement
    ) -> bool:
        """Write all shares' means to the gradients, if all are finite."""
        places = self._ends.places
        mine = agreement.header(True, [False] * len(bucket.items))
        for share, messages in enumerate(rows):
            headers = read_headers(messages, mine, places.across(share))
            if not all(each.finite for each in headers):
                return False

        def target(number: int) -> Flat:
            return bucket.items[number].flat

        finite = True
        for share, messages in enumerate(rows):
            if gathers:
                finite &= self._write(self._domain(bucket, share, None), messages, target)
                continue
            for host, message in enumerate(messages):
                finite &= self._write(self._domain(bucket, share, host), [message], target)
        return finite
