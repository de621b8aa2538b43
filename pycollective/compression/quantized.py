"""1-bit and 8-bit: two phases, each with its error feedback.

Of its share of a host's sum a rank compresses, for each host, the region that the host owns (worker
residual), and sends it there: all-to-all. The owner adds the hosts' up in the contract's order,
divides by the number of ranks, compresses the mean (server residual) and sends that to all:
all-gather. So a rank sends and receives 2 (H - 1) / H times the payload of its share, whatever the
number of hosts H; two collectives between hosts, and on a host of several ranks two more within it.
Small parameters ride along in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import Agreement, Bucket, Cuts, Outcome, floats, read_headers
from pycollective.compression.groups import Bytes, Ends
from pycollective.compression.messages import header_bytes
from pycollective.compression.residuals import Residuals


@dataclass(frozen=True)
class Cell:
    """One parameter's region in a message.

    Attributes:
        item: its number among the call's.
        start, stop: the region, elements of the parameter.
        at: its place in the message, bytes.
        size: bytes.
    """

    item: int
    start: int
    stop: int
    at: int
    size: int


@dataclass(frozen=True)
class Rows:
    """The messages about one share: what there is for each host, and how long all are."""

    cells: list[list[Cell]]
    stride: int


class QuantizedExchange:
    """Averages gradients, quantized between hosts.

    Args:
        ends: the groups of this rank.
        codec: "one_bit" or "int8".
        chunk: elements of a scale.
    """

    def __init__(self, ends: Ends, codec: str, chunk: int) -> None:
        self._ends = ends
        self._cuts = Cuts(chunk, ends.places)
        self._codec = codec
        self.chunk = chunk
        self.worker, self.server = Residuals(), Residuals()
        self._rows: dict[tuple[Any, ...], list[Rows]] = {}

    def __call__(self, items: list[Item], agreement: Agreement) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        rows = self._plan(bucket)
        own = bucket.host_sums(ends, agreement)
        results = np.zeros(places.hosts * max(each.stride for each in rows), np.uint8)
        sent = 0
        if ends.across is not None:
            assert places.share is not None
            mine = rows[places.share]
            means = self._exchange(bucket, mine, own, agreement)
            results[: means.size] = means.reshape(-1)
            sent = 2 * (places.hosts - 1) * mine.stride
        finite = self._spread(bucket, rows, ends.local.all_gather(results), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def _plan(self, bucket: Bucket) -> list[Rows]:
        """The messages of each share."""
        if bucket.key not in self._rows:
            self._rows[bucket.key] = [
                self._lay_out(bucket, s) for s in range(self._ends.places.shares)
            ]
        return self._rows[bucket.key]

    def _lay_out(self, bucket: Bucket, share: int) -> Rows:
        places = self._ends.places
        ends_at = [header_bytes(len(bucket.items))] * places.hosts
        cells: list[list[Cell]] = [[] for _ in range(places.hosts)]
        for number, item in enumerate(bucket.items):
            for host, (start, stop) in enumerate(bucket.regions(number, share)):
                size = self._bytes(stop - start, item.dense)
                if size:
                    cells[host].append(Cell(number, start, stop, ends_at[host], size))
                    ends_at[host] += size
        return Rows(cells, max(ends_at))

    def _bytes(self, count: int, dense: bool) -> int:
        return 4 * count if dense else _core.quantized_bytes(self._codec, self.chunk, count)

    def scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        """Phase one alone: `out` gets the average of what this rank owns.

        Whether all were finite is this rank's view; the ranks must agree on it.
        """
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        rows = self._plan(bucket)
        own = bucket.host_sums(ends, agreement)
        assert places.share is not None
        mine = rows[places.share]
        came, finite, absent = self._reduce(bucket, mine, own, agreement)
        for cell in mine.cells[places.host]:
            if absent[cell.item]:
                out.fill(0.0)
            elif bucket.items[cell.item].dense:
                out.put(cell.start, self._dense_mean(cell, came))
            else:
                part = out.part(cell.start, cell.stop)
                _core.dequantize(self._codec, self.chunk, came, cell.at, part, places.ranks)
        return Outcome(finite and out.is_finite(), (places.hosts - 1) * mine.stride)

    def _exchange(self, bucket: Bucket, rows: Rows, own: list[Any], agreement: Agreement) -> Bytes:
        """Both phases: the messages with the means of this share's regions, one a host."""
        across = self._ends.across
        assert across is not None
        came, finite, absent = self._reduce(bucket, rows, own, agreement)
        message, means_finite = self._average(bucket, rows, came, absent)
        agreement.header(finite and means_finite, list(absent)).write(message)
        return across.all_gather(message)

    def _reduce(
        self, bucket: Bucket, rows: Rows, own: list[Any], agreement: Agreement
    ) -> tuple[Bytes, bool, NDArray[np.bool_]]:
        """Phase one: what came from each host, whether all was finite, what is zero everywhere."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        senders = places.across(places.share)
        # What is all zero on every rank may be a parameter that none used: DDP then ignores what
        # comes back, so its residual stays where it is.
        zero = bucket.is_zero(own)
        messages, finite = self._compress(bucket, rows, own)
        header = agreement.header(finite, zero)
        for message in messages:
            header.write(message)
        came = across.all_to_all(messages)
        headers = read_headers(list(came), header, senders)
        absent = np.logical_and.reduce([each.absent for each in headers])
        for number in np.flatnonzero(absent):
            self.worker.keep(bucket.items[number].name)
        return came, all(each.finite for each in headers), absent

    def _compress(self, bucket: Bucket, rows: Rows, own: list[Any]) -> tuple[Bytes, bool]:
        """Phase one: this rank's share for each host, and whether it is finite."""
        share = self._ends.places.share
        assert share is not None
        messages = np.zeros((len(rows.cells), rows.stride), np.uint8)
        finite = True
        for cells, message in zip(rows.cells, messages, strict=True):
            for cell in cells:
                item, (first, last) = bucket.items[cell.item], bucket.shares[cell.item][share]
                x = own[cell.item][cell.start - first : cell.stop - first]
                payload = message[cell.at : cell.at + cell.size]
                if item.dense:
                    values = bucket.in_fp32(cell.item, share, own[cell.item], cell.start, cell.stop)
                    payload[:] = values.view(np.uint8)
                    continue
                held, left = self.worker.of(item.name, last - first)
                region = slice(cell.start - first, cell.stop - first)
                finite &= _core.quantize(
                    self._codec,
                    self.chunk,
                    x,
                    None if held is None else held[region],
                    left[region],
                    payload,
                )
        return messages, finite

    def _average(self, bucket: Bucket, rows: Rows, came: Bytes, absent: Any) -> tuple[Bytes, bool]:
        """Phase two: the means of the regions that this rank owns, and whether they are finite."""
        places = self._ends.places
        message = np.zeros(rows.stride, np.uint8)
        finite = True
        for cell in rows.cells[places.host]:
            if absent[cell.item]:
                continue
            item = bucket.items[cell.item]
            payload = message[cell.at : cell.at + cell.size]
            if item.dense:
                mean = self._dense_mean(cell, came)
                finite &= bool(np.isfinite(mean).all())
                payload[:] = mean.view(np.uint8)
                continue
            mean = np.empty(cell.stop - cell.start, np.float32)
            _core.dequantize(self._codec, self.chunk, came, cell.at, mean, places.ranks)
            held, left = self.server.of(item.name, mean.size)
            finite &= _core.quantize(self._codec, self.chunk, mean, held, left, payload)
        return message, finite

    def _dense_mean(self, cell: Cell, came: Bytes) -> Floats:
        """The average of a small parameter's region over all ranks."""
        mean: Floats = np.empty(cell.stop - cell.start, np.float32)
        _core.reduce_into([floats(row, cell.at, mean.size) for row in came], "sum", mean)
        mean /= np.float32(self._ends.places.ranks)
        return mean

    def _spread(
        self, bucket: Bucket, rows: list[Rows], results: Bytes, agreement: Agreement
    ) -> bool:
        """Write all shares' means to the gradients, if all are finite."""
        places = self._ends.places
        mine = agreement.header(True, [False] * len(bucket.items))
        finite = True
        decoded = []
        for share, of in enumerate(rows):
            messages = results[share][: places.hosts * of.stride].reshape(places.hosts, of.stride)
            headers = read_headers(list(messages), mine, places.across(share))
            finite &= all(each.finite for each in headers)
            decoded.append((of, messages, headers))
        if not finite:
            return False
        for of, messages, headers in decoded:
            for host, header in enumerate(headers):
                for cell in of.cells[host]:
                    flat = bucket.items[cell.item].flat
                    if header.absent[cell.item]:
                        flat.put(cell.start, np.zeros(cell.stop - cell.start, np.float32))
                    elif bucket.items[cell.item].dense:
                        values = floats(messages[host], cell.at, cell.stop - cell.start)
                        flat.put(cell.start, values)
                    else:
                        row = messages[host : host + 1]
                        out = flat.part(cell.start, cell.stop)
                        _core.dequantize(self._codec, self.chunk, row, cell.at, out, 1)
        return True
