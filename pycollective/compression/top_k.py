"""Top-k: the largest elements of each gradient, as places and values.

Every rank picks from its local shard of the host's sum, plus what it holds. By tensor, on a host of
several ranks, the local shards' histograms of magnitudes are added up three times (11, 10 and 10
bits of the 31), which gives the magnitude of the k-th element exactly. Of those that are equal to
it the first in the parameter's order are taken. So a host sends the k elements that it would send
if one rank held them all.

Every host's selection goes to all hosts; each rank adds them up in the contract's order. A rank
receives (H - 1) payloads. How many elements a message has may depend on the data. Where the host
knows it, lengths go first, in a collective of their own. Where it does not, messages have room for
as many as there can be.

The segments of a message, one a parameter, lie one behind another in one space of places, so that
one stream of ascending places serves them all. Small parameters go along in fp32, in the same
messages (docs/inside/wire.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.arrays import Elements, Flat, Item, Numbers, Segments
from pycollective.compression.bucket import Bucket, ByBucket, HostSums
from pycollective.compression.groups import Groups, exchange_lengths, gather_lengths
from pycollective.compression.header import Agreement, header_bytes
from pycollective.compression.kernels import TAIL, VALUES, Came, Kernels, Part, tail_bound
from pycollective.compression.message import Call, Learning
from pycollective.compression.options import check_chunk, check_one_of, check_steps
from pycollective.compression.partition import Partition
from pycollective.compression.residuals import Residuals
from pycollective.errors import CollectiveMismatch, ConfigurationError

# Bits of a magnitude that each round of histograms settles: (shift, bits).
ROUNDS = ((20, 11), (10, 10), (0, 10))


def count_of(density: float, count: int) -> int:
    """How many of `count` elements are sent: the nearest whole number, at least one."""
    return min(count, max(1, round(density * count)))


def check_density(density: float, by: str, chunk: int) -> None:
    """Refuse a density that no chunk can have.

    Raises:
        ConfigurationError: by chunk it would be less than one element of each.
    """
    if by == "chunk" and round(density * chunk, 9) < 1:
        least = math.ceil(round(1 / density, 6) / 64) * 64
        raise ConfigurationError(
            f"density={density!r} by chunk is less than one of chunk={chunk} elements: take chunk="
            f"{least} or more, a density of at least {1 / chunk:.6g}, or by='tensor'"
        )


@dataclass(frozen=True)
class TopKOptions:
    """The options of top-k; see `TopKState`."""

    density: float
    by: str
    chunk: int
    values: str
    exchange: str
    warm_up: int
    decay: float
    codec = "top_k"

    def checked(self) -> dict[str, Any]:
        """By name; see `Options`."""
        if not (isinstance(self.density, float | int) and 1e-4 <= self.density <= 1):
            raise ConfigurationError(f"density={self.density!r} is not between 0.0001 and 1")
        check_one_of("by", self.by, ("tensor", "chunk"))
        check_one_of("values", self.values, tuple(VALUES))
        if self.exchange == "region":
            raise ConfigurationError(
                "exchange='region' is gone, since it was slower between 4 hosts: leave exchange out"
            )
        check_one_of("exchange", self.exchange, ("gather", "auto"))
        check_steps("warm_up", self.warm_up)
        if not (isinstance(self.decay, float | int) and 0 <= self.decay <= 1):
            raise ConfigurationError(f"decay={self.decay!r} is not between 0 and 1")
        check_chunk(self.chunk)
        check_density(self.density, self.by, self.chunk)
        return {
            "density": float(self.density),
            "by": self.by,
            "chunk": self.chunk,
            "values": self.values,
            "warm_up": self.warm_up,
            "decay": float(self.decay),
        }

    def make(
        self, groups: Groups, partition: Partition, kernels: Kernels, learning: Learning
    ) -> TopK:
        """The codec."""
        if groups.hosts.count > kernels.most_hosts:
            groups.close()
            raise ConfigurationError(
                f"top-k takes tensors on devices between up to {kernels.most_hosts} hosts, not "
                f"{groups.hosts.count}; make the state of CPU tensors"
            )
        return TopK(groups, partition, self, kernels, learning)

    def density_after(self, steps: int) -> float:
        """The density of a step that so many have gone before."""
        if steps >= self.warm_up:
            return float(self.density)
        return float(self.density) ** ((steps + 1) / (self.warm_up + 1))


class Message:
    """What a message is about: a segment of each parameter, of which none is empty.

    Args:
        starts, stops: the elements of each parameter of the call; some may be empty.
        uncompressed: which parameters are.
        options: of top-k; `ks`: of each parameter how many of it, or of each chunk, are taken.

    Attributes:
        items, starts, stops: the segments of the compressed ones.
        places: where each begins in the space of places, whose size is `size`.
        ks: how many elements are taken of each, or of each of its chunks.
        counts: how many entries each has, or at most; `capacity` all together.
        copied: the others: (items, starts, stops, first bytes).
        tail: where the entries begin, bytes.
        bytes: how long a message is at most.
    """

    def __init__(
        self,
        starts: Numbers,
        stops: Numbers,
        uncompressed: NDArray[np.bool_],
        ks: Numbers,
        options: TopKOptions,
    ) -> None:
        sizes, chunk = stops - starts, options.chunk
        most = np.minimum(ks, sizes)
        if options.by == "chunk":
            most = sizes // chunk * ks + -(-(sizes % chunk) * ks // chunk)
        else:
            ks = most
        self.items = np.flatnonzero((sizes > 0) & ~uncompressed)
        self.starts, self.stops = starts[self.items], stops[self.items]
        self.ks, self.counts = ks[self.items], most[self.items]
        self.capacity, self.size = int(self.counts.sum()), int(sizes[self.items].sum())
        self.places = np.cumsum(sizes[self.items]) - sizes[self.items]
        copied = np.flatnonzero((sizes > 0) & uncompressed)
        bytes_of = 4 * sizes[copied]
        first = header_bytes(len(starts)) + np.cumsum(bytes_of) - bytes_of
        self.copied = copied, starts[copied], stops[copied], first
        self.tail = header_bytes(len(starts)) + int(bytes_of.sum())
        self.bytes = self.tail + tail_bound(self.capacity, self.size, options.values)

    def came(self, shard: int) -> Segments:
        """The compressed ones, for who gets it."""
        return Segments(self.items, self.starts, self.stops, self.places, 1, shard)

    def copies(self, first: int = 0) -> Segments:
        """The others, in a message that begins at that byte."""
        items, starts, stops, ats = self.copied
        return Segments(items, starts, stops, first + ats)


class Sent:
    """This rank's messages.

    Args:
        messages: what each is about.

    Attributes:
        chosen: the segments of the compressed parameters; `copied` of the others.
        parts: where their entries are; `capacity` of all together.
        bytes: of each message, as long as the longest.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.bytes = max(each.bytes for each in messages)
        chosen, copied, parts, self.capacity = [], [], [], 0
        for number, each in enumerate(messages):
            entries = self.capacity + np.cumsum(each.counts) - each.counts
            chosen.append(
                Segments(each.items, each.starts, each.stops, each.places, each.ks, entries)
            )
            first = number * self.bytes
            copied.append(each.copies(first))
            parts.append(Part(self.capacity, each.capacity, each.size, first + each.tail))
            self.capacity += each.capacity
        self.chosen, self.copied = Segments.joined(chosen), Segments.joined(copied)
        self.parts = np.array(parts, np.int64)


class Thresholds:
    """Where ranks of a host agree which elements of a parameter are the largest.

    Attributes:
        segments: this rank's of each compressed parameter, perhaps empty, without entries.
        wanted: how many elements of each a host sends.
        begins: where each rank's segments begin, -1 of an empty one: (ranks, parameters), with more
            parameters up to a multiple of the ranks.
        sizes: bytes of the histograms of each round.
    """

    def __init__(self, bucket: Bucket, ks: Numbers) -> None:
        shards, hosts = bucket.shards, bucket.shards.hosts
        items = np.flatnonzero(~shards.uncompressed)
        starts, stops = (np.zeros_like(items) for _ in range(2))
        if hosts.shard is not None:
            starts, stops = (each[items] for each in shards.local(hosts.shard))
        sizes = stops - starts
        places = np.cumsum(sizes) - sizes
        self.segments = Segments(items, starts, stops, places, ks[items])
        self.wanted = ks[items]
        ranks = len(hosts.local)
        rows = -(-len(items) // ranks) * ranks
        self.begins = np.full((ranks, rows), -1)
        for shard in range(hosts.shards):
            first, last = (each[items] for each in shards.local(shard))
            self.begins[shard, : len(items)] = np.where(last > first, first, -1)
        self.sizes = [4 * rows << bits for _, bits in ROUNDS]


class Arrived(NamedTuple):
    """Messages about some shards, as they lie in one array.

    Attributes:
        buffer: all of them, flat.
        first: where those about each shard begin, and `stride` how far apart they lie.
        lengths: how long each is: (shards, hosts).
    """

    buffer: Any
    first: Sequence[int]
    stride: Sequence[int]
    lengths: Numbers

    def starts(self, shard: int) -> Numbers:
        """Where those about a shard begin."""
        return self.first[shard] + np.arange(self.lengths.shape[1]) * self.stride[shard]


class Plan:
    """What does not change from step to step, of one bucket at one density.

    Attributes:
        sums: over the ranks of this host.
        sent: this rank's messages; None without a local shard.
        ranges: of each parameter this rank's local shard.
        thresholds: None where each rank finds its own.
        came: what the messages are about that come, of each shard.
        averages: their segments of compressed parameters; `copies` of the others.
    """

    def __init__(
        self, bucket: Bucket, density: float, options: TopKOptions, scatters: bool
    ) -> None:
        shards, hosts = bucket.shards, bucket.shards.hosts
        by_chunk = options.by == "chunk"
        counts = [options.chunk if by_chunk else item.flat.count for item in bucket.items]
        ks = np.array([count_of(density, count) for count in counts], np.int64)

        def message(ranges: tuple[Numbers, Numbers]) -> Message:
            return Message(*ranges, shards.uncompressed, ks, options)

        self.sums = HostSums(bucket)
        self.sent: Sent | None = None
        self.thresholds: Thresholds | None = None
        if hosts.shard is not None:
            self.ranges = [ranges[hosts.shard] for ranges in bucket.local_shards]
        if scatters:
            assert hosts.shard is not None
            to_hosts = [message(shards.host(hosts.shard, host)) for host in range(hosts.count)]
            self.sent, self.came = Sent(to_hosts), [to_hosts[hosts.own]]
        else:
            self.came = [message(shards.local(shard)) for shard in range(hosts.shards)]
            if hosts.shard is not None:
                self.sent = Sent([self.came[hosts.shard]])
            if not by_chunk and hosts.shards > 1 and not shards.uncompressed.all():
                self.thresholds = Thresholds(bucket, ks)
        self.averages = Segments.joined([each.came(n) for n, each in enumerate(self.came)])
        self.copies = [each.copies() for each in self.came]

    def parts(self, arrived: Arrived) -> Numbers:
        """Where the entries of all messages that came are."""
        found = []
        for shard, of in enumerate(self.came):
            starts, lengths = arrived.starts(shard).tolist(), arrived.lengths[shard].tolist()
            found += [
                Came(start, start + of.tail, length - of.tail, of.size, of.capacity, shard)
                for start, length in zip(starts, lengths, strict=True)
            ]
        return np.array(found, np.int64)


class TopK:
    """Averages gradients, of which the largest elements go between hosts.

    Args:
        groups: of this rank.
        partition: of the parameters.
        options: of top-k.
        kernels: where the gradients are.
        learning: when the host learns what calls have found.

    Attributes:
        residuals: the worker's.
    """

    def __init__(
        self,
        groups: Groups,
        partition: Partition,
        options: TopKOptions,
        kernels: Kernels,
        learning: Learning,
    ) -> None:
        self._groups, self._partition, self._options = groups, partition, options
        self._kernels, self._learning = kernels, learning
        self._plans: ByBucket[dict[float, Plan]] = ByBucket(lambda _: {})
        self._send_residual = Residuals(kernels)
        self.residuals: Mapping[str, Residuals] = {"worker": self._send_residual}

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        self._send_residual.commit(float(self._options.decay))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Call:
        """Average the gradients over all ranks, in place; `commit` makes new residuals count."""
        hosts, across = self._groups.hosts, self._groups.across
        bucket = Bucket(items, self._partition)
        plan = self._plan(bucket, steps, False)
        call, message = self._call(agreement, plan)
        own = plan.sums.of(bucket, call, call.messages[0], self._groups, self._kernels)
        ends = self._write(bucket, plan, call, own, message)
        rows, lengths = None, None
        if across is not None and hosts.shard is not None:
            if self._learning.at_once:
                senders = hosts.across(hosts.shard)
                row = message[: int(ends[0])]
                rows, lengths = gather_lengths(across, row, senders, plan.came[hosts.shard].bytes)
                call.sent = (hosts.count - 1) * (8 + int(lengths.max()))
            else:
                rows = across.all_gather(message)
                call.sent = (hosts.count - 1) * plan.came[hosts.shard].bytes
        call.sent = call.sent or 0
        arrived = self._to_host(plan, call, rows, lengths)
        order = [shard for shard in range(hosts.shards) if shard != hosts.shard]
        for shards in (order, [] if hosts.shard is None else [hosts.shard]):
            if shards:
                starts = np.concatenate([arrived.starts(shard) for shard in shards])
                senders = [rank for shard in shards for rank in hosts.across(shard)]
                call.note(arrived.buffer, starts, senders)
        call.headers(means=hosts.shard is not None)
        self._read(plan, call, arrived, bucket.elements())
        return call

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Call:
        """Average what this rank owns: to each host goes what it owns."""
        hosts, across = self._groups.hosts, self._groups.across
        assert across is not None
        assert hosts.shard is not None
        bucket = Bucket(items, self._partition)
        plan = self._plan(bucket, steps, True)
        assert plan.sent is not None
        call, messages = self._call(agreement, plan, hosts.ranks)
        own = plan.sums.of(bucket, call, call.messages[0], self._groups, self._kernels)
        ends = self._write(bucket, plan, call, own, messages)
        senders, longest = hosts.across(hosts.shard), plan.sent.bytes
        rows = messages.reshape(hosts.count, -1)
        if self._learning.at_once:
            lengths = ends - np.arange(hosts.count) * longest
            cut = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
            came, lengths = exchange_lengths(across, cut, senders, longest)
            stride = came.shape[1]
            call.sent = (hosts.count - 1) * (8 * hosts.count + stride)
        else:
            came, stride = across.all_to_all(rows), longest
            lengths = np.full(hosts.count, plan.came[0].bytes)
            call.sent = (hosts.count - 1) * longest
        arrived = Arrived(came.reshape(-1), [0], [stride], lengths[None])
        call.note(arrived.buffer, arrived.starts(0), senders)
        call.headers(means=True)
        self._read(plan, call, arrived, Elements.of([out] * len(items)))
        return call

    def _plan(self, bucket: Bucket, steps: int, scatters: bool) -> Plan:
        density = self._options.density_after(steps)
        kept = self._plans.of(bucket)
        if density not in kept:
            kept.clear()
            kept[density] = Plan(bucket, density, self._options, scatters)
        return kept[density]

    def _call(self, agreement: Agreement, plan: Plan, ranks: int = 0) -> tuple[Call, Any]:
        """A call, and this rank's messages to other hosts.

        Its messages are: within the host, to other hosts, of the host, histograms of three rounds.
        """
        hosts, sent = self._groups.hosts, plan.sent
        several = self._groups.local.size > 1 and not self._learning.at_once
        rows = max(each.bytes for each in plan.came) * hosts.count if several else 0
        sizes = [plan.sums.size, sent.parts.shape[0] * sent.bytes if sent else 0, rows]
        sizes += plan.thresholds.sizes if plan.thresholds else []
        heads = plan.sums.heads + hosts.count * len(plan.came)
        call = Call(self._kernels, self._learning, agreement, heads, sizes, ranks=ranks)
        return call, call.messages[1]

    def _write(self, bucket: Bucket, plan: Plan, call: Call, own: Elements, messages: Any) -> Any:
        """Choose what this rank sends, and write its messages; where they end, if the host knows.

        Their residuals then hold the gradient and what was held, less what was taken.
        """
        kernels, sent, thresholds = self._kernels, plan.sent, plan.thresholds
        found, counts = call.found, None
        places, values = kernels.entries(sent.capacity if sent else 0, self._options.values)
        segments = thresholds.segments if thresholds else sent.chosen if sent else None
        if segments is None:
            return None
        errors = bucket.errors(self._send_residual, plan.ranges, kernels) if sent else None
        chosen = segments.table(own, errors)
        table = np.concatenate([chosen, sent.copied.table(own)]) if sent else chosen
        if thresholds is not None:
            kernels.add(table, messages, found)
            counts = self._agree(thresholds, chosen, call, places, values)
        else:
            chunk = self._partition.chunk if self._options.by == "chunk" else 0
            kernels.top_k(table, chunk, places, values, messages, found)
        if sent is None:
            return None
        ends = kernels.pack(places, values, sent.parts, counts, messages, found)
        call.headers(messages.reshape(len(sent.parts), -1))
        return ends

    def _agree(
        self, thresholds: Thresholds, table: Any, call: Call, places: Any, values: Any
    ) -> Any:
        """Choose the largest of parameters in several segments, one a rank of the host.

        Each rank adds up the histograms of some parameters, and tells the others what it finds.
        Where something is not finite these are some numbers or other.

        Returns:
            How many entries this rank has in all.
        """
        local, kernels = self._groups.local, self._kernels
        wanted = ties = kernels.numbers(thresholds.wanted)
        prefixes = kernels.numbers(np.zeros_like(thresholds.wanted))
        for (shift, bits), bins in zip(ROUNDS, call.messages[3:], strict=True):
            kernels.histogram(table, shift, bits, prefixes, bins)
            came = local.all_to_all(bins.reshape(local.size, -1))
            told = kernels.merge(came, bits, wanted, thresholds.begins, local.rank)
            heard = local.all_gather(told)
            prefixes, wanted, ties = kernels.take(heard, bits, prefixes, local.rank)
        return kernels.select(table, prefixes, ties, places, values)

    def _to_host(self, plan: Plan, call: Call, rows: Any, lengths: Numbers | None) -> Arrived:
        """Bring every rank of this host the messages of each local shard.

        Args:
            plan: of the call.
            call: has room for them.
            rows: this rank's, (hosts, bytes); None without a local shard.
            lengths: of these; None where they are as long as they can be.
        """
        local, hosts = self._groups.local, self._groups.hosts
        most = np.array([[each.bytes] * hosts.count for each in plan.came], np.int64)
        if local.size == 1:
            own = most if lengths is None else lengths[None]
            return Arrived(rows.reshape(-1), [0], [rows.shape[1]], own)
        if not self._learning.at_once:
            row = call.messages[2]
            if rows is not None:
                row[: rows.shape[0] * rows.shape[1]] = rows.reshape(-1)
            every = local.all_gather(row)
            firsts = [shard * every.shape[1] for shard in range(hosts.shards)]
            return Arrived(every.reshape(-1), firsts, most[:, 0].tolist(), most)
        # Here rows have other lengths on each rank; each row of lengths goes before.
        before = 8 * hosts.count
        row = np.empty(0, np.uint8)
        if rows is not None and lengths is not None:
            row = np.concatenate([lengths.view(np.uint8), rows.reshape(-1)])
        longest = before + int(most.max()) * hosts.count
        every, sizes = gather_lengths(local, row, hosts.local, longest)
        strides = (sizes[: hosts.shards] - before) // hosts.count
        heads = np.ascontiguousarray(every[: hosts.shards, :before]).view(np.int64)
        firsts = [shard * every.shape[1] + before for shard in range(hosts.shards)]
        return Arrived(every.reshape(-1), firsts, strides.tolist(), heads)

    def _read(self, plan: Plan, call: Call, arrived: Arrived, outs: Elements) -> None:
        """Write averages, each from all hosts' messages about the same segments."""
        kernels, ranks, found = self._kernels, self._groups.hosts.ranks, call.found
        tails = np.array([[each.tail + TAIL] for each in plan.came])
        if (arrived.lengths < tails).any() or (arrived.lengths.max(axis=1) > arrived.stride).any():
            raise CollectiveMismatch("compressed exchange: a message of a wrong length")
        if len(plan.averages):
            parts, table = plan.parts(arrived), plan.averages.table(outs)
            kernels.average(arrived.buffer, parts, self._options.values, table, ranks, found)
        for shard, copies in enumerate(plan.copies):
            if len(copies):
                first, stride = arrived.first[shard], arrived.stride[shard]
                rows = arrived.buffer[first : first + arrived.lengths.shape[1] * stride]
                table = copies.table(outs)
                rows = rows.reshape(-1, stride)
                kernels.average_copies(table, rows, ranks, found)
