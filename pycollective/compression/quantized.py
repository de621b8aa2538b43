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

from pycollective import _core
from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Agreement, Bucket, Outcome, floats, read_headers
from pycollective.compression.groups import Bytes, Ends
from pycollective.compression.messages import Header, header_bytes
from pycollective.compression.placing import regions_of
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
        self._codec = codec
        self.chunk = chunk
        self.worker, self.server = Residuals(), Residuals()
        self._rows: dict[tuple[tuple[str, int, bool], ...], list[Rows]] = {}

    def __call__(self, items: list[Item], agreement: Agreement) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self.chunk, places)
        rows = self._plan(bucket)
        own = bucket.host_sums(ends)
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
        key = tuple((item.name, item.flat.count, item.dense) for item in bucket.items)
        if key not in self._rows:
            self._rows[key] = [self._lay_out(bucket, s) for s in range(self._ends.places.shares)]
        return self._rows[key]

    def _lay_out(self, bucket: Bucket, share: int) -> Rows:
        places = self._ends.places
        ends_at = [header_bytes(len(bucket.items))] * places.hosts
        cells: list[list[Cell]] = [[] for _ in range(places.hosts)]
        for number, (item, ranges) in enumerate(zip(bucket.items, bucket.shares, strict=True)):
            regions = regions_of(item.name, ranges[share], self.chunk, places)
            for host, (start, stop) in enumerate(regions):
                size = self._bytes(stop - start, item.dense)
                if size:
                    cells[host].append(Cell(number, start, stop, ends_at[host], size))
                    ends_at[host] += size
        return Rows(cells, max(ends_at))

    def _bytes(self, count: int, dense: bool) -> int:
        return 4 * count if dense else _core.quantized_bytes(self._codec, self.chunk, count)

    def _exchange(self, bucket: Bucket, rows: Rows, own: list[Any], agreement: Agreement) -> Bytes:
        """Both phases: the messages with the means of this share's regions, one a host."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        senders = places.across(places.share)
        # What is all zero on every rank may be a parameter that none used: DDP then ignores what
        # comes back, so its residual stays where it is.
        header = agreement.header(True, bucket.is_zero(own))
        messages, finite = self._compress(bucket, rows, own, header)
        header = agreement.header(finite, list(header.absent))
        for message in messages:
            header.write(message)
        came = across.all_to_all(messages)
        headers = read_headers(list(came), header, senders)
        absent = np.logical_and.reduce([each.absent for each in headers])
        finite = all(each.finite for each in headers)
        message, means_finite = self._average(bucket, rows, came, absent)
        agreement.header(finite and means_finite, list(absent)).write(message)
        means = across.all_gather(message)
        for number in np.flatnonzero(absent):
            self.worker.keep(bucket.items[number].name)
        return means

    def _compress(
        self, bucket: Bucket, rows: Rows, own: list[Any], header: Header
    ) -> tuple[Bytes, bool]:
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
            mean = np.empty(cell.stop - cell.start, np.float32)
            if item.dense:
                _core.reduce_into([floats(row, cell.at, mean.size) for row in came], "sum", mean)
                mean /= np.float32(places.ranks)
                finite &= bool(np.isfinite(mean).all())
                payload[:] = mean.view(np.uint8)
                continue
            _core.dequantize(self._codec, self.chunk, came, cell.at, mean, places.ranks)
            held, left = self.server.of(item.name, mean.size)
            finite &= _core.quantize(self._codec, self.chunk, mean, held, left, payload)
        return message, finite

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
