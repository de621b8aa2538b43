"""Quantized codecs (1-bit, 8-bit): two phases, each with its error feedback.

- A parameter's *local shard* is the part of its host's sum that one rank of the host exchanges.
- Each local shard is cut into *host shards*, one for each host.
- The *owner* of a host shard is the rank of its host that has this local shard; it averages there.

1. A rank quantizes its local shard of the host's sum, with its send residual, and sends each host
   shard to its owner: all-to-all.
2. The owner adds the hosts' up in the contract's order, divides by the number of ranks, quantizes
   the mean, with its owner residual, and sends that to all: all-gather.

With H hosts a rank sends and receives 2 (H - 1) / H times the payload of its local shard: less than
twice, however many hosts there are. It makes two collectives between hosts, and two more within a
host of several ranks. Small parameters go along uncompressed, in fp32.
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

    def make(self, groups: Groups, partition: Partition) -> Quantized:
        """The codec."""
        return Quantized(groups, partition, self.codec)


class Segment(NamedTuple):
    """A host shard of a parameter, and its bytes in a message.

    Attributes:
        item: the index of the parameter in the call.
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
        message_bytes: how long each of these messages is.
        hosts: the host that owns each segment; ascending.
        items, starts, stops, ats, sizes: see `Segment`.
    """

    message_bytes: int
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


class ParameterSpans(NamedTuple):
    """Where one parameter's segments lie in some messages, from its first element on.

    Shards are cut at chunks, so their payloads one after another are the parameter's own.

    Attributes:
        item_index: of the parameter in the call.
        bounds: where each segment's payload begins and ends in the bytes of all those messages.
        segments: of each its first element, the end of its elements, and its message's index.
    """

    item_index: int
    bounds: list[tuple[int, int]]
    segments: list[tuple[int, int, int]]


class Layout:
    """Where everything lies in a bucket's messages.

    Attributes:
        shards: the segments of each local shard.
        longest_bytes: how long the longest message is.
    """

    def __init__(self, bucket: Bucket, codec: str, chunk: int) -> None:
        shards = bucket.shards
        hosts = shards.hosts
        self._hosts, self._shard = hosts.count, hosts.shard
        header = header_bytes(len(shards))

        def segments_of(shard: int) -> Segments:
            found = []
            message_bytes = header
            for host in range(hosts.count):
                starts, stops = shards.host(shard, host)
                items = np.flatnonzero(stops > starts)
                counts = (stops - starts)[items]
                bytes_of = {n: _core.quantized_bytes(codec, chunk, n) for n in set(counts.tolist())}
                packed = np.array([bytes_of[count] for count in counts.tolist()], np.int64)
                sizes = np.where(shards.uncompressed[items], 4 * counts, packed)
                ends = header + np.cumsum(sizes)
                message_bytes = max(message_bytes, int(ends[-1]) if ends.size else 0)
                owner = np.full(items.size, host)
                found.append((owner, items, starts[items], stops[items], ends - sizes, sizes))
            return Segments(
                message_bytes, *(np.concatenate(each) for each in zip(*found, strict=True))
            )

        self.shards = [segments_of(shard) for shard in range(hosts.shards)]
        self.longest_bytes = max(each.message_bytes for each in self.shards)

    @property
    def own(self) -> Segments:
        """The segments of this rank's local shard."""
        assert self._shard is not None
        return self.shards[self._shard]

    @cached_property
    def sent(self) -> list[ParameterSpans]:
        """By parameter, in this rank's messages to the owners, one for each host."""
        return _by_parameter([self.own], [np.arange(self._hosts) * self.own.message_bytes])

    @cached_property
    def results(self) -> list[ParameterSpans]:
        """By parameter, in the owners' messages: of each local shard a row, which is padded."""
        row, hosts = self._hosts * self.longest_bytes, np.arange(self._hosts)
        starts = [shard * row + hosts * of.message_bytes for shard, of in enumerate(self.shards)]
        return _by_parameter(self.shards, starts)


def _by_parameter(
    shards: Sequence[Segments], message_starts: Sequence[Numbers]
) -> list[ParameterSpans]:
    """The segments of some local shards, sorted by parameter and first element.

    Args:
        shards: the segments of each local shard, one message a host.
        message_starts: of each local shard the first byte of each host's message, in the bytes of
            all messages one after another.
    """
    # Join the local shards' columns; a segment's first byte is now one in all messages.
    items, starts, stops, first_byte, sizes = (
        np.concatenate(each)
        for each in zip(
            *(
                (s.items, s.starts, s.stops, begins[s.hosts] + s.ats, s.sizes)
                for s, begins in zip(shards, message_starts, strict=True)
            ),
            strict=True,
        )
    )
    # Number the messages of all local shards, a local shard's by host.
    messages_before = np.cumsum([0, *(begins.size for begins in message_starts)])[:-1]
    message_index = np.concatenate(
        [s.hosts + before for s, before in zip(shards, messages_before, strict=True)]
    )
    # Sort by parameter, and each parameter's segments by their first element.
    order = np.lexsort((starts, items))
    bounds = list(
        zip(first_byte[order].tolist(), (first_byte + sizes)[order].tolist(), strict=True)
    )
    columns = [each[order].tolist() for each in (starts, stops, message_index)]
    segments = list(zip(*columns, strict=True))
    # Cut where the next parameter begins.
    item_indices, first = np.unique(items[order], return_index=True)
    ends = [*first.tolist(), len(bounds)][1:]
    return [
        ParameterSpans(item_index, bounds[a:b], segments[a:b])
        for item_index, a, b in zip(item_indices.tolist(), first.tolist(), ends, strict=True)
    ]


class Quantized:
    """Averages gradients, quantized between hosts.

    Args:
        groups: of this rank.
        partition: of the parameters.
        name: of `_core.quantize_codecs()`.

    Attributes:
        residuals: this rank's for what it sends, and for what it owns (the worker and server errors
            of 1-bit Adam).
    """

    def __init__(self, groups: Groups, partition: Partition, name: str) -> None:
        self._groups, self._partition = groups, partition
        self._name, self._chunk = name, partition.chunk
        self._send_residual, self._owner_residual = Residuals(), Residuals()
        self.residuals: Mapping[str, Residuals] = {
            "worker": self._send_residual,
            "server": self._owner_residual,
        }
        self._layouts = ByBucket(lambda bucket: Layout(bucket, name, partition.chunk))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Outcome:
        """Average the gradients over all ranks, in place; `commit` makes new residuals count."""
        groups, hosts = self._groups, self._groups.hosts
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        own = bucket.host_sums(groups, agreement)
        results = np.zeros(hosts.count * layout.longest_bytes, np.uint8)
        sent = 0
        if groups.across is not None:
            means = self._exchange(bucket, layout, own, agreement)
            results[: means.size] = means.reshape(-1)
            sent = 2 * (hosts.count - 1) * layout.own.message_bytes
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
        came, finite, all_zero = self._send_to_owners(bucket, layout, own, agreement)
        for segment in layout.own.on(hosts.own):
            if all_zero[segment.item]:
                out.fill(0.0)
            elif bucket.items[segment.item].uncompressed:
                out.put(segment.start, self._uncompressed_mean(segment, came))
            else:
                part = out.part(segment.start, segment.stop)
                _core.dequantize(self._name, self._chunk, came, segment.at, part, hosts.ranks)
        return Outcome(finite and out.is_finite(), (hosts.count - 1) * layout.own.message_bytes)

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        for each in self.residuals.values():
            each.commit()

    def _exchange(
        self, bucket: Bucket, layout: Layout, own: list[Any], agreement: Agreement
    ) -> Bytes:
        """Both phases: the messages with the means of this local shard, one from each host."""
        across = self._groups.across
        assert across is not None
        came, finite, all_zero = self._send_to_owners(bucket, layout, own, agreement)
        message, means_finite = self._average(bucket, layout.own, came, all_zero)
        agreement.header(finite and means_finite, list(all_zero)).write(message)
        return across.all_gather(message)

    def _send_to_owners(
        self, bucket: Bucket, layout: Layout, own: list[Any], agreement: Agreement
    ) -> tuple[Bytes, bool, NDArray[np.bool_]]:
        """Phase one: quantize this rank's local shard, and send each host shard to its owner.

        Returns:
            What came from each host of the host shard that this rank owns; whether all of it was
            finite; and for each parameter whether it is all zero on every host.
        """
        across, hosts = self._groups.across, self._groups.hosts
        assert across is not None
        assert hosts.shard is not None
        # What is all zero on every rank may be a parameter that none used: DDP then ignores what
        # comes back, so its residual stays where it is.
        zero = bucket.is_zero(own)
        messages, finite = self._quantize(bucket, layout, own)
        header = agreement.header(finite, zero)
        for message in messages:
            header.write(message)
        came = across.all_to_all(messages)
        headers = read_headers(list(came), header, hosts.across(hosts.shard))
        all_zero = np.logical_and.reduce([each.all_zero for each in headers])
        for item_index in np.flatnonzero(all_zero):
            self._send_residual.skip_update(bucket.items[item_index].name)
        return came, all(each.finite for each in headers), all_zero

    def _quantize(self, bucket: Bucket, layout: Layout, own: list[Any]) -> tuple[Bytes, bool]:
        """This rank's messages, one to each host's owner, and whether its local shard is finite."""
        shard = self._groups.hosts.shard
        assert shard is not None
        messages = np.zeros((self._groups.hosts.count, layout.own.message_bytes), np.uint8)
        memory = messages.reshape(-1).data
        finite = True
        for item_index, bounds, segments in layout.sent:
            item = bucket.items[item_index]
            if item.uncompressed:
                for (begin, end), (start, stop, _) in zip(bounds, segments, strict=True):
                    values = bucket.in_fp32(item_index, shard, own[item_index], start, stop)
                    memory[begin:end] = values.view(np.uint8).data
                continue
            first, last = bucket.local_shards[item_index][shard]
            old_residual, new_residual = self._send_residual.of(item.name, last - first)
            payload = np.empty(sum(end - begin for begin, end in bounds), np.uint8)
            finite &= _core.quantize(
                self._name, self._chunk, own[item_index], old_residual, new_residual, payload
            )
            packed = payload.data
            at = 0
            for begin, end in bounds:
                memory[begin:end] = packed[at : at + end - begin]
                at += end - begin
        return messages, finite

    def _average(
        self, bucket: Bucket, own: Segments, came: Bytes, all_zero: Any
    ) -> tuple[Bytes, bool]:
        """Phase two: a message of the means that this rank owns, and whether they are finite."""
        hosts = self._groups.hosts
        message = np.zeros(own.message_bytes, np.uint8)
        finite = True
        for segment in own.on(hosts.own):
            if all_zero[segment.item]:
                continue
            item = bucket.items[segment.item]
            payload = message[segment.at : segment.at + segment.size]
            if item.uncompressed:
                mean = self._uncompressed_mean(segment, came)
                finite &= bool(np.isfinite(mean).all())
                payload[:] = mean.view(np.uint8)
                continue
            mean = np.empty(segment.stop - segment.start, np.float32)
            # Decodes the hosts' payloads, adds them up in the contract's order, from the first
            # host to the last, and divides by the number of ranks.
            _core.dequantize(self._name, self._chunk, came, segment.at, mean, hosts.ranks)
            old_residual, new_residual = self._owner_residual.of(item.name, mean.size)
            finite &= _core.quantize(
                self._name, self._chunk, mean, old_residual, new_residual, payload
            )
        return message, finite

    def _uncompressed_mean(self, segment: Segment, came: Bytes) -> Floats:
        """The average over all ranks of an uncompressed parameter's segment."""
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
            messages = results[shard][: hosts.count * of.message_bytes].reshape(
                hosts.count, of.message_bytes
            )
            headers += read_headers(list(messages), mine, hosts.across(shard))
        if not all(each.finite for each in headers):
            return False
        all_zero = np.array([each.all_zero for each in headers])
        zero_somewhere = np.logical_or.reduce(all_zero).tolist()
        flat_results = results.reshape(-1)
        memory = flat_results.data
        for item_index, bounds, segments in layout.results:
            flat = bucket.items[item_index].flat
            if bucket.items[item_index].uncompressed:
                for (begin, _), (start, stop, _) in zip(bounds, segments, strict=True):
                    flat.put(start, floats(flat_results, begin, stop - start))
            else:
                payload = np.frombuffer(b"".join([memory[a:b] for a, b in bounds]), np.uint8)
                out = flat.part(segments[0][0], segments[-1][1])
                _core.dequantize(self._name, self._chunk, payload[None], 0, out, 1)
            for start, stop, message_index in segments if zero_somewhere[item_index] else ():
                if all_zero[message_index, item_index]:
                    flat.put(start, np.zeros(stop - start, np.float32))
        return True
