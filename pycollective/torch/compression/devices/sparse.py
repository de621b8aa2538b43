"""Top-k on devices: the averages and residuals of the CPU's, bit for bit.

How many elements a message has may depend on the data, which the host does not know within a step.
So messages have a fixed length, with room for as many as there can be, and say how many they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Bucket, ByBucket
from pycollective.compression.groups import Groups
from pycollective.compression.partition import Numbers, Partition
from pycollective.compression.residuals import Residuals
from pycollective.compression.sparse import SparseOptions, count_of
from pycollective.compression.sparse_layout import Layout, Message, ranges
from pycollective.errors import ConfigurationError
from pycollective.torch.compression.devices.exchanges import exchange, gather
from pycollective.torch.compression.devices.headers import Headers, upload
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
from pycollective.torch.compression.devices.thresholds import thresholds

_SPACE = 1 << 32  # places
_MASK = _SPACE - 1
_MOST_HOSTS = 64  # whose entries a kernel adds up


class Kernels(NamedTuple):
    """The modules of the kernels."""

    top_k: Any
    index_packing: Any
    sparse_sums: Any


def kernels() -> Kernels:
    """The modules of the kernels; see `load`."""
    return Kernels(load("top_k"), load("index_packing"), load("sparse_sums"))


@dataclass(frozen=True)
class DeviceSparseOptions(SparseOptions):
    """The options of top-k on a device."""

    device: torch.device

    def checked(self) -> dict[str, Any]:
        kernels()
        return super().checked()

    def make(self, groups: Groups, partition: Partition) -> Any:
        if groups.hosts.count > _MOST_HOSTS:
            groups.close()
            raise ConfigurationError(
                f"top-k takes tensors on devices between up to {_MOST_HOSTS} hosts, not "
                f"{groups.hosts.count}; make the state of CPU tensors"
            )
        return DeviceTopK(groups, partition, self)


class _FixedMessage:
    """Messages about the same segments, all as long as the longest can be.

    Attributes:
        of: the segments.
        counts: how many entries each has at most.
        capacity: how many all of them have.
        tail_at: where their places begin in a message, bytes.
        bytes: how long a message is.
        bounds: where segments lie in it.
    """

    def __init__(
        self, of: Message, counts: Sequence[int], values: torch.dtype, device: torch.device
    ) -> None:
        self.of, self.counts, self.capacity = of, list(counts), sum(counts)
        self.tail_at = of.uncompressed_at + 4 * of.uncompressed_count
        self.bytes = self.tail_at + kernels().index_packing.tail_bound(
            self.capacity, of.size, values
        )
        self.bounds = _Bounds(of.offsets, of.items, device)


class _Bounds:
    """Where segments lie in a message's places, on the device.

    Attributes:
        bounds: int64: where each begins; one more, where the last ends.
        items: int64: of each which parameter of the call it is of.
    """

    def __init__(self, bounds: Numbers, items: Numbers, device: torch.device) -> None:
        self.bounds, self.items = upload(bounds, device), upload(items, device)

    def within(self, places: torch.Tensor) -> torch.Tensor:
        """In which segment places are, or the one before whose end they begin."""
        return torch.bucketize(places, self.bounds[1:-1], right=True)


class _Plan:
    """What does not change from step to step, of one bucket at one density.

    Attributes:
        numbers: of the compressed parameters.
        shards: messages about each local shard.
        wanted: of each compressed parameter how many elements a host sends.
        before: see `thresholds`.
        to_owners: the messages of `reduce_scatter`, once it has been called.
    """

    def __init__(self, codec: DeviceTopK, bucket: Bucket, density: float) -> None:
        local, layout = codec.groups.local, Layout(bucket)
        counts = [item.flat.count for item in bucket.items]
        self.numbers = [n for n, item in enumerate(bucket.items) if not item.uncompressed]
        self.shards = [codec.message(counts, of, density) for of in layout.local_shards.messages]
        wanted = [count_of(density, counts[n]) for n in self.numbers]
        self.wanted = upload(np.array(wanted, np.int64), codec.device)
        each = -(-len(wanted) // local.size)
        begins = np.full((local.size, local.size * each), -1)
        for at, number in enumerate(self.numbers):
            for place, (start, stop) in enumerate(bucket.local_shards[number]):
                begins[place, at] = start if stop > start else -1
        mine = begins[:, local.rank * each :][:, :each]
        before = (mine[:, None] >= 0) & (mine[:, None] < mine[None])
        self.before = upload(before, codec.device)
        self.bytes = max(message.bytes for message in self.shards)
        self.to_owners: _ToOwners | None = None


class _ToOwners:
    """The same of messages to owners, in which segments have as many entries as they can have.

    Attributes:
        messages: what each host gets.
        bytes: how long each of these messages is.
        index: of their entries, one message after another, which of the local shard's each is.
        shifts: how much larger its place is there.
        counts: how many each message has, int64.
    """

    def __init__(self, codec: DeviceTopK, bucket: Bucket, density: float) -> None:
        sizes = [item.flat.count for item in bucket.items]
        space, device = Layout(bucket).own_host_shards, codec.device
        self.messages = [codec.message(sizes, of, density) for of in space.messages]
        self.bytes = max(message.bytes for message in self.messages)
        counts = np.array([n for message in self.messages for n in message.counts], np.int64)
        firsts = np.empty_like(counts)
        firsts[space.order] = np.cumsum(counts[space.order]) - counts[space.order]
        self.index = upload(ranges(firsts, counts), device)
        self.shifts = upload(np.repeat(space.shifts, counts), device)
        self.counts = upload(np.array([message.capacity for message in self.messages]), device)

    def split(self, entries: Any) -> list[Any]:
        """The entries of each message, in its own places; none where there are not all.

        So it is where something is not finite, or ranks differ.
        """
        places = (entries.places[self.index] - self.shifts).to(torch.int32)
        values = entries.values[self.index]
        counts = self.counts * (entries.count == len(self.index))
        sizes = [message.capacity for message in self.messages]
        return [
            entries._replace(places=inside, values=sent, count=count)
            for inside, sent, count in zip(
                places.split(sizes), values.split(sizes), counts.split(1), strict=True
            )
        ]


class DeviceTopK:
    """Averages gradients on a device, of which the largest elements go between hosts; see `TopK`.

    Attributes:
        groups, device: of this rank.
        by_chunk: how elements are picked.
    """

    def __init__(
        self,
        groups: Groups,
        partition: Partition,
        options: DeviceSparseOptions,
    ) -> None:
        self.groups, self.device = groups, options.device
        self.by_chunk = options.by == "chunk"
        self._partition, self._options = partition, options
        self._values = getattr(torch, options.values)
        self._send_residual = DeviceResiduals(options.device)
        self.residuals: Mapping[str, Residuals] = {"worker": self._send_residual}
        self._plans: ByBucket[dict[float, _Plan]] = ByBucket(lambda _: {})

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        self._send_residual.commit(float(self._options.decay))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> DeviceOutcome:
        """Average the gradients over all ranks, in place; they hold anything where `bad`."""
        groups, hosts = self.groups, self.groups.hosts
        density = self._options.density_after(steps)
        bucket = Bucket(items, self._partition)
        plan = self._plan(bucket, density)
        headers = Headers(agreement, len(items), self.device)
        own = host_sums(bucket, groups, headers)
        chosen, bad = self._choose(bucket, own, density)
        found, sent = self._zeros(hosts.count * plan.bytes), 0
        if groups.across is not None:
            came, sent = self._gather(bucket, plan, own, chosen, bad, headers)
            found[: came.numel()] = came.view(-1)
        every = gather(groups.local, found)
        finite = []
        for shard, message in enumerate(plan.shards):
            came = every[shard, : hosts.count * message.bytes].view(hosts.count, message.bytes)
            headers.compare(came, hosts.across(shard))
            all_zero = headers.all_zero(came)
            if shard == hosts.shard:
                skip_updates(self.residuals.values(), bucket, all_zero, headers.findings)
            sums = self._read(message, came, all_zero, headers)
            finite.append(self._write(message, came, sums, lambda n: bucket.items[n].flat))
        bad = headers.bad | ~torch.stack(finite).all()
        return DeviceOutcome(None, sent, bad, headers.differs, headers.findings)

    def _gather(
        self,
        bucket: Bucket,
        plan: _Plan,
        own: Sequence[torch.Tensor],
        chosen: Any,
        bad: torch.Tensor,
        headers: Headers,
    ) -> tuple[torch.Tensor, int]:
        """Every host's message about this local shard, and how many bytes this rank sent."""
        across, hosts = self.groups.across, self.groups.hosts
        assert across is not None
        assert hosts.shard is not None
        message = plan.shards[hosts.shard]
        header = headers.row(bad, are_zero(own))
        uncompressed = _uncompressed(bucket, message, own, hosts.shard)
        row = self._packed(message, header, uncompressed, chosen)
        return gather(across, row), (hosts.count - 1) * message.bytes

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> DeviceOutcome:
        """Average what this rank owns: to each host goes what it owns."""
        across, hosts = self.groups.across, self.groups.hosts
        assert across is not None
        assert hosts.shard is not None
        density = self._options.density_after(steps)
        bucket = Bucket(items, self._partition)
        plan = self._plan(bucket, density)
        if plan.to_owners is None:
            plan.to_owners = _ToOwners(self, bucket, density)
        to = plan.to_owners
        headers = Headers(agreement, len(items), self.device)
        own = host_sums(bucket, self.groups, headers)
        chosen, bad = self._choose(bucket, own, density)
        header = headers.row(bad, are_zero(own))
        rows = self._zeros(hosts.count * to.bytes).view(hosts.count, -1)
        for message, row, part in zip(to.messages, rows, to.split(chosen), strict=True):
            uncompressed = _uncompressed(bucket, message, own, hosts.shard)
            row[: message.bytes] = self._packed(message, header, uncompressed, part)
        came = exchange(across, rows)
        headers.compare(came, hosts.across(hosts.shard))
        all_zero = headers.all_zero(came)
        skip_updates(self.residuals.values(), bucket, all_zero, headers.findings)
        owned = to.messages[hosts.own]
        came = came[:, : owned.bytes]
        sums = self._read(owned, came, all_zero, headers)
        finite = self._write(owned, came, sums, lambda _: out)
        sent = (hosts.count - 1) * to.bytes
        bad = headers.bad | ~finite
        return DeviceOutcome(None, sent, bad, headers.differs, headers.findings)

    def message(self, counts: Sequence[int], of: Message, density: float) -> _FixedMessage:
        """Messages about these segments of parameters of so many elements."""
        sizes = zip(of.items.tolist(), (of.stops - of.starts).tolist(), strict=True)
        most = [self._most(counts[n], size, density) for n, size in sizes]
        return _FixedMessage(of, most, self._values, self.device)

    def _most(self, count: int, size: int, density: float) -> int:
        """How many of a parameter's `count` elements can be sent of a segment of `size`.

        By chunk it is always that many.
        """
        if not self.by_chunk:
            return min(count_of(density, count), size)
        chunk = self._partition.chunk
        k = count_of(density, chunk)
        return size // chunk * k + -(-(size % chunk) * k // chunk)

    def _plan(self, bucket: Bucket, density: float) -> _Plan:
        kept = self._plans.of(bucket)
        if density not in kept:
            kept.clear()
            kept[density] = _Plan(self, bucket, density)
        return kept[density]

    def _choose(
        self, bucket: Bucket, own: Sequence[torch.Tensor], density: float
    ) -> tuple[Any, torch.Tensor]:
        """What this rank sends, by the places of its local shard; whether all is not finite.

        Nothing is sent then, nor without a local shard.
        """
        hosts, top_k = self.groups.hosts, kernels().top_k
        plan, by_tensor = self._plan(bucket, density), not self.by_chunk
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        capacity = 0 if hosts.shard is None else plan.shards[hosts.shard].capacity
        entries = top_k.Entries.empty(capacity, self._values, self.device)
        pieces = list(self._pieces(bucket, plan, own))
        if over_shards := by_tensor and hosts.shards > 1 and bool(plan.numbers):
            self._over_shards(plan, pieces, entries, flags)
        for x, held, left, place in () if over_shards else pieces:
            count = x.numel()
            if by_tensor:
                k = self._most(count, count, density)
                top_k.top_k(x, held, left, k, entries, flags, place)
            elif count:
                k, chunk = count_of(density, self._partition.chunk), self._partition.chunk
                top_k.top_k_chunks(x, held, left, k, chunk, entries, flags, place)
        bad = (flags & 1).bool().squeeze(0)
        return entries._replace(count=entries.count * ~bad), bad

    def _over_shards(
        self, plan: _Plan, pieces: Sequence[Any], entries: Any, flags: torch.Tensor
    ) -> None:
        """As `top_k`, where the ranks of a host agree on what is largest."""
        top_k = kernels().top_k
        for x, held, left, _ in pieces:
            top_k.add(x, held, left, flags)
        none = torch.empty(0, device=self.device)
        lefts = [left for _, _, left, _ in pieces] or [none] * len(plan.numbers)
        keys, ties = thresholds(top_k, lefts, plan.wanted, plan.before, self.groups.local)
        for at, (_, _, left, place) in enumerate(pieces):
            one = slice(at, at + 1)
            top_k.select(left, keys[one], ties[one], entries, place)

    def _pieces(
        self, bucket: Bucket, plan: _Plan, own: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Any, Any, int]]:
        """Of each compressed parameter this rank's piece: elements, old and new residual, and the
        place of the first."""
        if self.groups.hosts.shard is None:
            return
        place = 0
        for number in plan.numbers:
            x = own[number]
            held, left = self._send_residual.of(bucket.items[number].name, x.numel())
            yield x, held, left, place
            place += x.numel()

    def _packed(
        self,
        message: _FixedMessage,
        header: torch.Tensor,
        uncompressed: Sequence[torch.Tensor],
        entries: Any,
    ) -> torch.Tensor:
        """A message, as bytes.

        Args:
            message: what it is about.
            header: as bytes.
            uncompressed: the small parameters' elements, fp32.
            entries: of the others.
        """
        row = self._zeros(message.bytes)
        row[: len(header)] = header
        if uncompressed:
            numbers = torch.cat(list(uncompressed)).view(torch.uint8)
            row[message.of.uncompressed_at : message.tail_at] = numbers
        length = torch.empty(1, dtype=torch.int64, device=self.device)
        kernels().index_packing.write(entries, message.of.size, row[message.tail_at :], length)
        return row

    def _read(
        self, message: _FixedMessage, came: torch.Tensor, all_zero: torch.Tensor, headers: Headers
    ) -> Any:
        """The entries of messages, to be added up; None of those about no compressed parameter.

        What is all zero everywhere has the value 0.
        """
        if not message.of.size:
            return None
        modules, hosts = kernels(), len(came)
        tails = came[:, message.tail_at :]
        shifts = torch.arange(0, 32, 8, device=self.device)
        words = (tails[:, :8].to(torch.int64).view(hosts, 2, 4) << shifts).sum(2)
        lengths = 8 + words[:, 1] + words[:, 0] * self._values.itemsize
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        read = []
        for tail, length in zip(tails, lengths.split(1), strict=True):
            entries = modules.top_k.Entries.empty(message.capacity, torch.float32, self.device)
            modules.index_packing.read(tail, length, message.of.size, self._values, entries, flags)
            read.append(entries)
        headers.refuse((flags & 1).bool())
        rows = modules.sparse_sums.mark(read, message.of.size)
        places = torch.stack([self._in_use(entries) for entries in read])
        rows.values.masked_fill_(all_zero[message.bounds.items][message.bounds.within(places)], 0)
        return rows

    def _in_use(self, entries: Any) -> torch.Tensor:
        """Places as int64; those not in use are 2^32, behind all others."""
        number = torch.arange(entries.places.numel(), device=self.device)
        return torch.where(number < entries.count, entries.places.to(torch.int64) & _MASK, _SPACE)

    def _write(
        self, message: _FixedMessage, came: torch.Tensor, rows: Any, target: Callable[[int], Flat]
    ) -> torch.Tensor:
        """Write the averages of what messages are about; whether they are finite: () of bool.

        Args:
            message: what they are about.
            came: with the small parameters' elements.
            rows: with the others' entries.
            target: of each parameter.
        """
        of, ranks = message.of, self.groups.hosts.ranks
        finite = []
        if of.uncompressed:
            mean = uncompressed_mean([came[:, of.uncompressed_at : message.tail_at]], ranks)
            finite.append(torch.isfinite(mean).all())
            sizes = [stop - start for _, start, stop in of.uncompressed]
            for (number, start, stop), part in zip(of.uncompressed, mean.split(sizes), strict=True):
                put(target(number).part(start, stop), part)
        outs = [
            target(number).part(start, stop)
            for number, start, stop in zip(
                of.items.tolist(), of.starts.tolist(), of.stops.tolist(), strict=True
            )
        ]
        for dtype in {out.dtype for out in outs}:
            dense = torch.empty(of.size, dtype=dtype, device=self.device)
            kernels().sparse_sums.average(rows, dense, float(ranks))
            finite.append(torch.isfinite(dense).all())
            pieces = zip(outs, dense.split([out.numel() for out in outs]), strict=True)
            every = [(out, piece) for out, piece in pieces if out.dtype == dtype]
            copy_all(*(list(each) for each in zip(*every, strict=True)))
        return torch.stack(finite).all() if finite else self._zeros(1)[0] == 0

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)


def _uncompressed(
    bucket: Bucket, message: _FixedMessage, own: Sequence[torch.Tensor], shard: int
) -> list[torch.Tensor]:
    """The elements of small parameters that a message has, of a host's sums, in fp32."""
    found = []
    for number, start, stop in message.of.uncompressed:
        first = bucket.local_shards[number][shard][0]
        found.append(own[number][start - first : stop - first].to(torch.float32))
    return found
