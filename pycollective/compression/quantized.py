"""Quantized codecs (1-bit, 8-bit): two phases, each with its error feedback.

A rank quantizes its local shard of the host's sum (worker residual) and sends each host shard to
its owner: all-to-all. The owner adds the hosts' up in the contract's order, divides by the number
of ranks, quantizes the mean (server residual) and sends that to all: all-gather. So a rank sends
and receives 2 (H - 1) / H times the payload of its local shard, whatever the number of hosts H, in
two collectives between hosts, and in two more within a host of several ranks. Small parameters go
along in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import (
    Agreement,
    Bucket,
    ByBucket,
    Outcome,
    floats,
    header_bytes,
    read_headers,
)
from pycollective.compression.groups import Bytes, Groups
from pycollective.compression.partition import Numbers, Partition, check_chunk
from pycollective.compression.residuals import Residuals


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of a quantized codec.

    Attributes:
        codec: of `_core.quantize_codecs()`.
        chunk: elements to a scale.
    """

    codec: str
    chunk: int

    def checked(self) -> dict[str, Any]:
        """By name; see `Options`."""
        check_chunk(self.chunk)
        return {"chunk": self.chunk}

    def make(self, groups: Groups, partition: Partition, sizes: Sequence[int]) -> Quantized:
        """The codec."""
        return Quantized(groups, partition, self.codec)


class Segment(NamedTuple):
    """A host shard of a parameter, and its bytes in a message.

    Attributes:
        item: which of the call's parameters.
        start, stop: its elements.
        at, size: its bytes.
    """

    item: int
    start: int
    stop: int
    at: int
    size: int


@dataclass(frozen=True)
class Segments:
    """The segments of all messages about a local shard, as arrays; none is empty.

    Attributes:
        stride: how long all these messages are.
        hosts: who owns each; ascending.
        items, starts, stops, ats, sizes: see `Segment`.
    """

    stride: int
    hosts: Numbers
    items: Numbers
    starts: Numbers
    stops: Numbers
    ats: Numbers
    sizes: Numbers

    def on(self, host: int) -> Iterator[Segment]:
        """The segments that a host owns."""
        first, last = np.searchsorted(self.hosts, [host, host + 1])
        columns = self.items, self.starts, self.stops, self.ats, self.sizes
        rows = zip(*(each[first:last].tolist() for each in columns), strict=True)
        return (Segment(*row) for row in rows)


class Parameter(NamedTuple):
    """The segments of one parameter, from its first element on, in bytes of some messages.

    Shards are cut at chunks, so their payloads one after another are the parameter's own.

    Attributes:
        item: which of the call's parameters.
        bounds: where each segment's payload begins and ends in those bytes.
        segments: start, stop, and the number of its message.
    """

    item: int
    bounds: list[tuple[int, int]]
    segments: list[tuple[int, int, int]]


class Layout:
    """Where everything lies in a bucket's messages.

    Attributes:
        shards: the segments of each local shard.
        stride: how long the longest message is.
    """

    def __init__(self, bucket: Bucket, codec: str, chunk: int) -> None:
        shards = bucket.shards
        hosts = shards.hosts
        self._hosts, self._shard = hosts.count, hosts.shard
        header = header_bytes(len(shards))

        def segments_of(shard: int) -> Segments:
            found = []
            stride = header
            for host in range(hosts.count):
                starts, stops = shards.host(shard, host)
                items = np.flatnonzero(stops > starts)
                counts = (stops - starts)[items]
                of = {n: _core.quantized_bytes(codec, chunk, n) for n in set(counts.tolist())}
                packed = np.array([of[count] for count in counts.tolist()], np.int64)
                sizes = np.where(shards.dense[items], 4 * counts, packed)
                ends = header + np.cumsum(sizes)
                stride = max(stride, int(ends[-1]) if ends.size else 0)
                owner = np.full(items.size, host)
                found.append((owner, items, starts[items], stops[items], ends - sizes, sizes))
            return Segments(stride, *(np.concatenate(each) for each in zip(*found, strict=True)))

        self.shards = [segments_of(shard) for shard in range(hosts.shards)]
        self.stride = max(each.stride for each in self.shards)

    @property
    def own(self) -> Segments:
        """The segments of this rank's local shard."""
        assert self._shard is not None
        return self.shards[self._shard]

    @cached_property
    def sent(self) -> list[Parameter]:
        """By parameter, in this rank's messages, one for each host."""
        return _by_parameter([self.own], [np.arange(self._hosts) * self.own.stride])

    @cached_property
    def results(self) -> list[Parameter]:
        """By parameter, in all local shards' messages, each shard's in a row for the longest."""
        row, hosts = self._hosts * self.stride, np.arange(self._hosts)
        firsts = [shard * row + hosts * of.stride for shard, of in enumerate(self.shards)]
        return _by_parameter(self.shards, firsts)


def _by_parameter(shards: Sequence[Segments], messages: Sequence[Numbers]) -> list[Parameter]:
    """Segments by parameter and start; `messages`: where each message of a local shard begins."""
    items, starts, stops, firsts, sizes = (
        np.concatenate(each)
        for each in zip(
            *(
                (s.items, s.starts, s.stops, begins[s.hosts] + s.ats, s.sizes)
                for s, begins in zip(shards, messages, strict=True)
            ),
            strict=True,
        )
    )
    before = np.cumsum([0, *(begins.size for begins in messages)])[:-1]
    message = np.concatenate([s.hosts + at for s, at in zip(shards, before, strict=True)])
    order = np.lexsort((starts, items))
    bounds = list(zip(firsts[order].tolist(), (firsts + sizes)[order].tolist(), strict=True))
    columns = [each[order].tolist() for each in (starts, stops, message)]
    segments = list(zip(*columns, strict=True))
    numbers, at = np.unique(items[order], return_index=True)
    ends = [*at.tolist(), len(bounds)][1:]
    return [
        Parameter(number, bounds[a:b], segments[a:b])
        for number, a, b in zip(numbers.tolist(), at.tolist(), ends, strict=True)
    ]


class Quantized:
    """Averages gradients, quantized between hosts.

    Args:
        groups: of this rank.
        partition: of the parameters.
        name: of `_core.quantize_codecs()`.

    Attributes:
        residuals: the worker's and the server's.
    """

    def __init__(self, groups: Groups, partition: Partition, name: str) -> None:
        self._groups, self._partition = groups, partition
        self._name, self._chunk = name, partition.chunk
        self._worker, self._server = Residuals(), Residuals()
        self.residuals: Mapping[str, Residuals] = {
            "worker": self._worker,
            "server": self._server,
        }
        self._layouts = ByBucket(lambda bucket: Layout(bucket, name, partition.chunk))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        groups, hosts = self._groups, self._groups.hosts
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        own = bucket.host_sums(groups, agreement)
        results = np.zeros(hosts.count * layout.stride, np.uint8)
        sent = 0
        if groups.across is not None:
            means = self._exchange(bucket, layout, own, agreement)
            results[: means.size] = means.reshape(-1)
            sent = 2 * (hosts.count - 1) * layout.own.stride
        finite = self._write(bucket, layout, groups.local.all_gather(results), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Outcome:
        """Phase one alone: `out` gets the average of what this rank owns.

        Whether all were finite is this rank's view; the ranks must agree on it.
        """
        hosts = self._groups.hosts
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        own = bucket.host_sums(self._groups, agreement)
        came, finite, absent = self._reduce(bucket, layout, own, agreement)
        for segment in layout.own.on(hosts.own):
            if absent[segment.item]:
                out.fill(0.0)
            elif bucket.items[segment.item].dense:
                out.put(segment.start, self._dense_mean(segment, came))
            else:
                part = out.part(segment.start, segment.stop)
                _core.dequantize(self._name, self._chunk, came, segment.at, part, hosts.ranks)
        return Outcome(finite and out.is_finite(), (hosts.count - 1) * layout.own.stride)

    def commit(self) -> None:
        """Make what the step left what is held."""
        for each in self.residuals.values():
            each.commit()

    def _exchange(
        self, bucket: Bucket, layout: Layout, own: list[Any], agreement: Agreement
    ) -> Bytes:
        """Both phases: the messages with the means of this local shard, one from each host."""
        across = self._groups.across
        assert across is not None
        came, finite, absent = self._reduce(bucket, layout, own, agreement)
        message, means_finite = self._average(bucket, layout.own, came, absent)
        agreement.header(finite and means_finite, list(absent)).write(message)
        return across.all_gather(message)

    def _reduce(
        self, bucket: Bucket, layout: Layout, own: list[Any], agreement: Agreement
    ) -> tuple[Bytes, bool, NDArray[np.bool_]]:
        """Phase one: what came from each host, whether all was finite, what is zero everywhere."""
        across, hosts = self._groups.across, self._groups.hosts
        assert across is not None
        assert hosts.shard is not None
        # What is all zero on every rank may be a parameter that none used: DDP then ignores what
        # comes back, so its residual stays where it is.
        zero = bucket.is_zero(own)
        messages, finite = self._compress(bucket, layout, own)
        header = agreement.header(finite, zero)
        for message in messages:
            header.write(message)
        came = across.all_to_all(messages)
        headers = read_headers(list(came), header, hosts.across(hosts.shard))
        absent = np.logical_and.reduce([each.absent for each in headers])
        for number in np.flatnonzero(absent):
            self._worker.keep(bucket.items[number].name)
        return came, all(each.finite for each in headers), absent

    def _compress(self, bucket: Bucket, layout: Layout, own: list[Any]) -> tuple[Bytes, bool]:
        """Phase one: this rank's local shard for each host, and whether it is finite."""
        shard = self._groups.hosts.shard
        assert shard is not None
        messages = np.zeros((self._groups.hosts.count, layout.own.stride), np.uint8)
        memory = messages.reshape(-1).data
        finite = True
        for number, bounds, segments in layout.sent:
            item, (first, last) = bucket.items[number], bucket.local_shards[number][shard]
            if item.dense:
                for (begin, end), (start, stop, _) in zip(bounds, segments, strict=True):
                    values = bucket.in_fp32(number, shard, own[number], start, stop)
                    memory[begin:end] = values.view(np.uint8).data
                continue
            held, left = self._worker.of(item.name, last - first)
            payload = np.empty(sum(end - begin for begin, end in bounds), np.uint8)
            finite &= _core.quantize(self._name, self._chunk, own[number], held, left, payload)
            packed = payload.data
            at = 0
            for begin, end in bounds:
                memory[begin:end] = packed[at : at + end - begin]
                at += end - begin
        return messages, finite

    def _average(
        self, bucket: Bucket, own: Segments, came: Bytes, absent: Any
    ) -> tuple[Bytes, bool]:
        """Phase two: the means of what this rank owns, and whether they are finite."""
        hosts = self._groups.hosts
        message = np.zeros(own.stride, np.uint8)
        finite = True
        for segment in own.on(hosts.own):
            if absent[segment.item]:
                continue
            item = bucket.items[segment.item]
            payload = message[segment.at : segment.at + segment.size]
            if item.dense:
                mean = self._dense_mean(segment, came)
                finite &= bool(np.isfinite(mean).all())
                payload[:] = mean.view(np.uint8)
                continue
            mean = np.empty(segment.stop - segment.start, np.float32)
            _core.dequantize(self._name, self._chunk, came, segment.at, mean, hosts.ranks)
            held, left = self._server.of(item.name, mean.size)
            finite &= _core.quantize(self._name, self._chunk, mean, held, left, payload)
        return message, finite

    def _dense_mean(self, segment: Segment, came: Bytes) -> Floats:
        """The average of a small parameter's segment over all ranks."""
        mean: Floats = np.empty(segment.stop - segment.start, np.float32)
        _core.reduce_into([floats(row, segment.at, mean.size) for row in came], "sum", mean)
        mean /= np.float32(self._groups.hosts.ranks)
        return mean

    def _write(self, bucket: Bucket, layout: Layout, results: Bytes, agreement: Agreement) -> bool:
        """Write all local shards' means to the gradients, if all are finite."""
        hosts = self._groups.hosts
        mine = agreement.header(True, [False] * len(bucket.items))
        headers = []
        for shard, of in enumerate(layout.shards):
            messages = results[shard][: hosts.count * of.stride].reshape(hosts.count, of.stride)
            headers += read_headers(list(messages), mine, hosts.across(shard))
        if not all(each.finite for each in headers):
            return False
        absent = np.array([each.absent for each in headers])
        somewhere = np.logical_or.reduce(absent).tolist()
        flat_results = results.reshape(-1)
        memory = flat_results.data
        for number, bounds, segments in layout.results:
            flat = bucket.items[number].flat
            if bucket.items[number].dense:
                for (begin, _), (start, stop, _) in zip(bounds, segments, strict=True):
                    flat.put(start, floats(flat_results, begin, stop - start))
            else:
                payload = np.frombuffer(b"".join([memory[a:b] for a, b in bounds]), np.uint8)
                out = flat.part(segments[0][0], segments[-1][1])
                _core.dequantize(self._name, self._chunk, payload[None], 0, out, 1)
            for start, stop, message in segments if somewhere[number] else ():
                if absent[message, number]:
                    flat.put(start, np.zeros(stop - start, np.float32))
        return True
