"""Quantized codecs (1-bit, 8-bit): two phases, each with its error feedback.

Of its share of a host's sum a rank compresses, for each host, the region that the host owns (worker
residual), and sends it there: all-to-all. The owner adds the hosts' up in the contract's order,
divides by the number of ranks, compresses the mean (server residual) and sends that to all:
all-gather. So a rank sends and receives 2 (H - 1) / H times the payload of its share, whatever the
number of hosts H; two collectives between hosts, and on a host of several ranks two more within it.
Small parameters ride along in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import Agreement, Bucket, Cuts, Outcome, floats, read_headers
from pycollective.compression.cells import Cell, Cells, Messages
from pycollective.compression.groups import Bytes, Ends
from pycollective.compression.layout import Plans
from pycollective.compression.residuals import Residuals


class QuantizedExchange:
    """Averages gradients, quantized between hosts.

    Args:
        ends: the groups of this rank.
        codec: of `_core.quantize_codecs()`.
        chunk: elements of a scale.
    """

    def __init__(self, ends: Ends, codec: str, chunk: int) -> None:
        self._ends = ends
        self._cuts = Cuts(chunk, ends.places)
        self._codec = codec
        self.chunk = chunk
        self.worker, self.server = Residuals(), Residuals()
        size_of = partial(_core.quantized_bytes, codec, chunk)
        self._plans = Plans(partial(Messages, places=ends.places, chunk=chunk, size_of=size_of))

    def __call__(self, items: list[Item], agreement: Agreement) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        plan = self._plans.of(bucket)
        own = bucket.host_sums(ends, agreement)
        results = np.zeros(places.hosts * plan.stride, np.uint8)
        sent = 0
        if ends.across is not None:
            means = self._exchange(bucket, plan, own, agreement)
            results[: means.size] = means.reshape(-1)
            sent = 2 * (places.hosts - 1) * plan.mine.stride
        finite = self._spread(bucket, plan, ends.local.all_gather(results), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        """Phase one alone: `out` gets the average of what this rank owns.

        Whether all were finite is this rank's view; the ranks must agree on it.
        """
        ends, places = self._ends, self._ends.places
        bucket = Bucket(items, self._cuts)
        plan = self._plans.of(bucket)
        own = bucket.host_sums(ends, agreement)
        came, finite, absent = self._reduce(bucket, plan, own, agreement)
        for cell in plan.mine.on(places.host):
            if absent[cell.item]:
                out.fill(0.0)
            elif bucket.items[cell.item].dense:
                out.put(cell.start, self._dense_mean(cell, came))
            else:
                part = out.part(cell.start, cell.stop)
                _core.dequantize(self._codec, self.chunk, came, cell.at, part, places.ranks)
        return Outcome(finite and out.is_finite(), (places.hosts - 1) * plan.mine.stride)

    def _exchange(
        self, bucket: Bucket, plan: Messages, own: list[Any], agreement: Agreement
    ) -> Bytes:
        """Both phases: the messages with the means of this share's regions, one a host."""
        across = self._ends.across
        assert across is not None
        came, finite, absent = self._reduce(bucket, plan, own, agreement)
        message, means_finite = self._average(bucket, plan.mine, came, absent)
        agreement.header(finite and means_finite, list(absent)).write(message)
        return across.all_gather(message)

    def _reduce(
        self, bucket: Bucket, plan: Messages, own: list[Any], agreement: Agreement
    ) -> tuple[Bytes, bool, NDArray[np.bool_]]:
        """Phase one: what came from each host, whether all was finite, what is zero everywhere."""
        across, places = self._ends.across, self._ends.places
        assert across is not None
        assert places.share is not None
        senders = places.across(places.share)
        # What is all zero on every rank may be a parameter that none used: DDP then ignores what
        # comes back, so its residual stays where it is.
        zero = bucket.is_zero(own)
        messages, finite = self._compress(bucket, plan, own)
        header = agreement.header(finite, zero)
        for message in messages:
            header.write(message)
        came = across.all_to_all(messages)
        headers = read_headers(list(came), header, senders)
        absent = np.logical_and.reduce([each.absent for each in headers])
        for number in np.flatnonzero(absent):
            self.worker.keep(bucket.items[number].name)
        return came, all(each.finite for each in headers), absent

    def _compress(self, bucket: Bucket, plan: Messages, own: list[Any]) -> tuple[Bytes, bool]:
        """Phase one: this rank's share for each host, and whether it is finite."""
        share = self._ends.places.share
        assert share is not None
        messages = np.zeros((self._ends.places.hosts, plan.mine.stride), np.uint8)
        memory = messages.reshape(-1).data
        finite = True
        for number, bounds, cells in plan.sent:
            item, (first, last) = bucket.items[number], bucket.shares[number][share]
            if item.dense:
                for (begin, end), (start, stop, _) in zip(bounds, cells, strict=True):
                    values = bucket.in_fp32(number, share, own[number], start, stop)
                    memory[begin:end] = values.view(np.uint8).data
                continue
            held, left = self.worker.of(item.name, last - first)
            payload = np.empty(sum(end - begin for begin, end in bounds), np.uint8)
            finite &= _core.quantize(self._codec, self.chunk, own[number], held, left, payload)
            packed = payload.data
            at = 0
            for begin, end in bounds:
                memory[begin:end] = packed[at : at + end - begin]
                at += end - begin
        return messages, finite

    def _average(self, bucket: Bucket, mine: Cells, came: Bytes, absent: Any) -> tuple[Bytes, bool]:
        """Phase two: the means of the regions that this rank owns, and whether they are finite."""
        places = self._ends.places
        message = np.zeros(mine.stride, np.uint8)
        finite = True
        for cell in mine.on(places.host):
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

    def _spread(self, bucket: Bucket, plan: Messages, results: Bytes, agreement: Agreement) -> bool:
        """Write all shares' means to the gradients, if all are finite."""
        places = self._ends.places
        mine = agreement.header(True, [False] * len(bucket.items))
        headers = []
        for share, of in enumerate(plan.shares):
            messages = results[share][: places.hosts * of.stride].reshape(places.hosts, of.stride)
            headers += read_headers(list(messages), mine, places.across(share))
        if not all(each.finite for each in headers):
            return False
        absent = np.array([each.absent for each in headers])
        somewhere = np.logical_or.reduce(absent).tolist()
        flat_results = results.reshape(-1)
        memory = flat_results.data
        for number, bounds, cells in plan.results:
            flat = bucket.items[number].flat
            if bucket.items[number].dense:
                for (begin, _), (start, stop, _) in zip(bounds, cells, strict=True):
                    flat.put(start, floats(flat_results, begin, stop - start))
            else:
                payload = np.frombuffer(b"".join([memory[a:b] for a, b in bounds]), np.uint8)
                out = flat.part(cells[0][0], cells[-1][1])
                _core.dequantize(self._codec, self.chunk, payload[None], 0, out, 1)
            for start, stop, message in cells if somewhere[number] else ():
                if absent[message, number]:
                    flat.put(start, np.zeros(stop - start, np.float32))
        return True
