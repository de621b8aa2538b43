"""The quantized codecs (1-bit, 8-bit) on devices: the messages of the CPU's, byte for byte.

The phases are those of `pycollective.compression.quantized`. Here no result comes to the host
before the step has ended, so nothing is left out that only the data could say. What is not to be
seen is made zero or NaN on the device, and residuals that are not to move on are told apart when
the host learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Bucket, ByBucket
from pycollective.compression.groups import Groups
from pycollective.compression.partition import Partition
from pycollective.compression.quantized import (
    Layout,
    ParameterSpans,
    QuantizedOptions,
    Segments,
)
from pycollective.compression.residuals import Residuals
from pycollective.torch.compression.devices.exchanges import exchange, gather
from pycollective.torch.compression.devices.headers import Headers
from pycollective.torch.compression.devices.kernels import load
from pycollective.torch.compression.devices.outcome import DeviceOutcome
from pycollective.torch.compression.devices.residuals import DeviceResiduals, skip_updates
from pycollective.torch.compression.devices.sums import (
    are_zero,
    copy_all,
    host_sums,
    put,
    uncompressed_mean,
)


@dataclass(frozen=True)
class DeviceQuantizedOptions(QuantizedOptions):
    """The options of a quantized codec on a device."""

    device: torch.device

    def checked(self) -> dict[str, Any]:
        kernels()
        return super().checked()

    def make(self, groups: Groups, partition: Partition) -> Any:
        return DeviceQuantized(groups, partition, self.codec, self.device)


def kernels() -> Any:
    """The module of the kernels; see `load`."""
    return load("quantize")


class DeviceQuantized:
    """Averages gradients on a device, quantized between hosts; see `Quantized`."""

    def __init__(
        self, groups: Groups, partition: Partition, name: str, device: torch.device
    ) -> None:
        self._groups, self._partition, self._device = groups, partition, device
        self._name, self._chunk = name, partition.chunk
        self._send_residual, self._owner_residual = (DeviceResiduals(device) for _ in range(2))
        self.residuals: Mapping[str, Residuals] = {
            "worker": self._send_residual,
            "server": self._owner_residual,
        }
        self._layouts = ByBucket(lambda bucket: Layout(bucket, name, partition.chunk))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> DeviceOutcome:
        """Average the gradients over all ranks, in place; they hold anything where `bad`."""
        groups, hosts = self._groups, self._groups.hosts
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        headers = Headers(agreement, len(items), self._device)
        own = host_sums(bucket, self._groups, headers)
        results = self._zeros(hosts.count * layout.longest_bytes)
        sent = 0
        if groups.across is not None:
            came, all_zero = self._send_to_owners(bucket, layout, own, headers)
            message = self._average(bucket, layout.own, came, all_zero, headers)
            means = gather(groups.across, message)
            results[: means.numel()] = means.view(-1)
            sent = 2 * (hosts.count - 1) * layout.own.message_bytes
        self._write(bucket, layout, gather(groups.local, results), headers)
        return DeviceOutcome(None, sent, headers.bad, headers.differs, headers.findings)

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> DeviceOutcome:
        """Phase one alone: `out` gets the average of what this rank owns."""
        hosts = self._groups.hosts
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        headers = Headers(agreement, len(items), self._device)
        own = host_sums(bucket, self._groups, headers)
        came, all_zero = self._send_to_owners(bucket, layout, own, headers)
        for segment in layout.own.on(hosts.own):
            part = out.part(segment.start, segment.stop)
            if bucket.items[segment.item].uncompressed:
                rows = came[:, segment.at : segment.at + segment.size]
                put(part, uncompressed_mean([rows], hosts.ranks))
            else:
                self._decode(came, segment.at, part, hosts.ranks)
            part.masked_fill_(all_zero[segment.item], 0)
        bad = headers.bad | ~torch.isfinite(out.part(0, out.count)).all()
        sent = (hosts.count - 1) * layout.own.message_bytes
        return DeviceOutcome(None, sent, bad, headers.differs, headers.findings)

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        for each in self.residuals.values():
            each.commit()

    def _send_to_owners(
        self, bucket: Bucket, layout: Layout, own: Sequence[torch.Tensor], headers: Headers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase one: quantize this rank's local shard, and send each host shard to its owner.

        Returns:
            What came from each host of the host shard that this rank owns; and for each parameter
            whether it is all zero on every host.
        """
        across, hosts = self._groups.across, self._groups.hosts
        assert across is not None
        assert hosts.shard is not None
        messages, not_finite = self._quantize(bucket, layout, own)
        messages[:, : headers.bytes] = headers.row(not_finite, are_zero(own))
        came = exchange(across, messages)
        headers.compare(came, hosts.across(hosts.shard))
        all_zero = headers.all_zero(came)
        skip_updates(self.residuals.values(), bucket, all_zero, headers.findings)
        return came, all_zero

    def _quantize(
        self, bucket: Bucket, layout: Layout, own: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's messages, one to each host's owner, and whether its local shard is not
        finite."""
        hosts = self._groups.hosts
        messages = self._zeros(hosts.count * layout.own.message_bytes).view(hosts.count, -1)
        flags = torch.zeros(1, dtype=torch.int32, device=self._device)
        pieces = []
        for spans in layout.sent:
            part = own[spans.item_index]
            if bucket.items[spans.item_index].uncompressed:
                payload = part.to(torch.float32).view(torch.uint8)
            else:
                name = bucket.items[spans.item_index].name
                payload = self._empty(_size(spans))
                self._encode(self._send_residual, name, part, payload, flags)
            pieces.append(payload)
        copy_all(_cut(messages.view(-1), layout.sent), _parts(pieces, layout.sent))
        return messages, (flags & 1).bool()

    def _average(
        self,
        bucket: Bucket,
        own: Segments,
        came: torch.Tensor,
        all_zero: torch.Tensor,
        headers: Headers,
    ) -> torch.Tensor:
        """Phase two: a message of the means that this rank owns."""
        hosts = self._groups.hosts
        message = self._zeros(own.message_bytes)
        flags = torch.zeros(len(bucket.items), dtype=torch.int32, device=self._device)
        segments = list(own.on(hosts.own))
        as_they_are = [each for each in segments if bucket.items[each.item].uncompressed]
        not_finite = headers.bad
        if as_they_are:
            mean = uncompressed_mean(
                [came[:, each.at : each.at + each.size] for each in as_they_are], hosts.ranks
            )
            not_finite = not_finite | ~torch.isfinite(mean).all()
            payloads = [message[each.at : each.at + each.size] for each in as_they_are]
            means = mean.view(torch.uint8).split([each.size for each in as_they_are])
            copy_all(payloads, list(means))
        for segment in segments:
            item = bucket.items[segment.item]
            payload = message[segment.at : segment.at + segment.size]
            if not item.uncompressed:
                mean = torch.empty(
                    segment.stop - segment.start, dtype=torch.float32, device=self._device
                )
                self._decode(came, segment.at, mean, hosts.ranks)
                flag = flags[segment.item : segment.item + 1]
                self._encode(self._owner_residual, item.name, mean, payload, flag)
            payload.masked_fill_(all_zero[segment.item], 0)
        not_finite = not_finite | ((flags & 1).bool() & ~all_zero).any()
        message[: headers.bytes] = headers.row(not_finite, all_zero)
        return message

    def _write(
        self, bucket: Bucket, layout: Layout, results: torch.Tensor, headers: Headers
    ) -> None:
        """Write all local shards' means to the gradients. What is all zero decodes to zeros."""
        hosts = self._groups.hosts
        for shard, of in enumerate(layout.shards):
            messages = results[shard][: hosts.count * of.message_bytes]
            headers.compare(messages.view(hosts.count, -1), hosts.across(shard))
        pieces = [self._empty(_size(spans)) for spans in layout.results]
        copy_all(_parts(pieces, layout.results), _cut(results.view(-1), layout.results))
        for spans, piece in zip(layout.results, pieces, strict=True):
            item = bucket.items[spans.item_index]
            part = item.flat.part(spans.segments[0][0], spans.segments[-1][1])
            if item.uncompressed:
                put(part, piece.view(torch.float32))
            else:
                self._decode(piece.view(1, -1), 0, part, 1)

    # Their parts.

    def _encode(
        self,
        residuals: DeviceResiduals,
        name: str,
        x: torch.Tensor,
        payload: torch.Tensor,
        flags: torch.Tensor,
    ) -> None:
        held: Any
        left: Any
        held, left = residuals.of(name, x.numel())
        kernels().quantize(self._name, self._chunk, x, held, left, payload, flags)

    def _decode(self, messages: torch.Tensor, at: int, out: torch.Tensor, divisor: int) -> None:
        kernels().dequantize(self._name, self._chunk, messages, at, out, float(divisor))

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)


def _size(spans: ParameterSpans) -> int:
    return sum(end - begin for begin, end in spans.bounds)


def _cut(memory: torch.Tensor, spans: Sequence[ParameterSpans]) -> list[torch.Tensor]:
    """The segments' payloads where they lie in messages, by parameter."""
    return [memory[begin:end] for each in spans for begin, end in each.bounds]


def _parts(payloads: Sequence[torch.Tensor], spans: Sequence[ParameterSpans]) -> list[torch.Tensor]:
    """The same of each parameter's whole payload."""
    return [
        part
        for payload, each in zip(payloads, spans, strict=True)
        for part in payload.split([end - begin for begin, end in each.bounds])
    ]
