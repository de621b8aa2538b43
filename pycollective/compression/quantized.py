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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Elements, Flat, Item, Numbers, Segments
from pycollective.compression.bucket import Bucket, ByBucket, HostSums
from pycollective.compression.groups import Groups
from pycollective.compression.header import Agreement, header_bytes
from pycollective.compression.kernels import Kernels
from pycollective.compression.message import Call, Learning
from pycollective.compression.options import check_chunk
from pycollective.compression.partition import Partition
from pycollective.compression.residuals import Residuals
from pycollective.segments import zero_at


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

    def make(
        self, groups: Groups, partition: Partition, kernels: Kernels, learning: Learning
    ) -> Quantized:
        """The codec."""
        return Quantized(groups, partition, self.codec, kernels, learning)


class HostShards(NamedTuple):
    """The host shards of one local shard, and where they lie in the messages about it.

    Attributes:
        bytes: how long each of these messages is.
        hosts: the host that owns each; ascending.
        items, starts, stops: the parameter of each, and its elements; none is empty.
        ats: its first byte in its message.
        compressed: 0 or 1.
    """

    bytes: int
    hosts: Numbers
    items: Numbers
    starts: Numbers
    stops: Numbers
    ats: Numbers
    compressed: Numbers

    @classmethod
    def of(cls, bucket: Bucket, shard: int, codec: str, chunk: int) -> HostShards:
        """Those of a bucket's local shard."""
        shards = bucket.shards
        header = header_bytes(len(shards))
        longest, found = header, []
        for host in range(shards.hosts.count):
            starts, stops = shards.host(shard, host)
            items = np.flatnonzero(stops > starts)
            counts = (stops - starts)[items]
            bytes_of = {n: _core.quantized_bytes(codec, chunk, n) for n in set(counts.tolist())}
            packed = np.array([bytes_of[count] for count in counts.tolist()], np.int64)
            compressed = 1 - shards.uncompressed[items].astype(np.int64)
            sizes = np.where(compressed, packed, 4 * counts)
            ends = header + np.cumsum(sizes)
            longest = max(longest, int(ends[-1]) if ends.size else 0)
            owner = np.full(items.size, host)
            found.append((owner, items, starts[items], stops[items], ends - sizes, compressed))
        return cls(longest, *(np.concatenate(each) for each in zip(*found, strict=True)))

    def segments(self, first: int = 0) -> Segments:
        """All of them, in messages one behind another from byte `first` on."""
        ats = first + self.hosts * self.bytes + self.ats
        return Segments(self.items, self.starts, self.stops, ats, self.compressed)

    def owned(self, host: int) -> Segments:
        """Those that a host owns, in its message."""
        mine = self.hosts == host
        columns = self.items, self.starts, self.stops, self.ats, self.compressed
        return Segments(*(each[mine] for each in columns))


class Plan:
    """What does not change from call to call, of one bucket.

    Attributes:
        sums: over the ranks of this host.
        bytes: how long the messages about this rank's local shard are; 0 without one.
        sent: its host shards, in the messages to their owners; `ranges`: of each parameter.
        owned: the one that this rank owns, in its message to all; `owned_ranges` likewise.
        copies: where the averages of what is not compressed of that lie, fp32 numbers one behind
            another; `copied` of them, in `memory` once it is needed.
        results: all local shards' host shards in what the ranks of a host tell each other.
        results_bytes: how long that is, of each rank.
        heads: where messages begin in it, and `senders`.
    """

    def __init__(self, bucket: Bucket, codec: str, chunk: int) -> None:
        hosts = bucket.shards.hosts
        self.sums = HostSums(bucket)
        shards = [HostShards.of(bucket, n, codec, chunk) for n in range(hosts.shards)]
        self.results_bytes = hosts.count * max(each.bytes for each in shards)
        firsts = [n * self.results_bytes for n in range(hosts.shards)]
        each_first = list(zip(shards, firsts, strict=True))
        self.results = Segments.joined([each.segments(first) for each, first in each_first])
        every = np.arange(hosts.count)
        self.heads = np.concatenate([first + every * each.bytes for each, first in each_first])
        self.senders = [rank for shard in range(hosts.shards) for rank in hosts.across(shard)]
        self.bytes = 0
        if hosts.shard is not None:
            own = shards[hosts.shard]
            self.bytes, self.sent, self.owned = own.bytes, own.segments(), own.owned(hosts.own)
            self.ranges = [ranges[hosts.shard] for ranges in bucket.local_shards]
            starts, stops = bucket.shards.host(hosts.shard, hosts.own)
            self.owned_ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
            sizes = np.where(bucket.shards.uncompressed, stops - starts, 0)
            self.copied = int(sizes.sum())
            self.copies = 4 * (np.cumsum(sizes) - sizes - starts)  # of element 0
            self.memory: Any = None


class Quantized:
    """Averages gradients, quantized between hosts.

    Args:
        groups: of this rank.
        partition: of the parameters.
        name: of `_core.quantize_codecs()`.
        kernels: where the gradients are.
        learning: when the host learns what calls have found.

    Attributes:
        residuals: this rank's for what it sends, and for what it owns (the worker and server errors
            of 1-bit Adam).
    """

    def __init__(
        self,
        groups: Groups,
        partition: Partition,
        name: str,
        kernels: Kernels,
        learning: Learning,
    ) -> None:
        self._groups, self._partition = groups, partition
        self._kernels, self._learning = kernels, learning
        self._codec = name, partition.chunk
        self._send_residual, self._owner_residual = Residuals(kernels), Residuals(kernels)
        self.residuals: Mapping[str, Residuals] = {
            "worker": self._send_residual,
            "server": self._owner_residual,
        }
        self._plans = ByBucket(lambda bucket: Plan(bucket, *self._codec))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Call:
        """Average the gradients over all ranks, in place; `commit` makes new residuals count."""
        groups, hosts = self._groups, self._groups.hosts
        bucket = Bucket(items, self._partition)
        plan = self._plans.of(bucket)
        call = self._call(agreement, plan, plan.results_bytes)
        mean, results = call.messages[2:]
        came = self._send_to_owners(bucket, plan, call)
        if groups.across is not None:
            self._average(bucket, plan, call, came)
            means = groups.across.all_gather(mean).reshape(-1)
            if hosts.count * plan.bytes == plan.results_bytes:
                results = means
            else:
                results[: hosts.count * plan.bytes] = means
        call.sent = 2 * (hosts.count - 1) * plan.bytes
        every = groups.local.all_gather(results).reshape(-1)
        call.note(every, plan.heads, plan.senders)
        call.headers()
        table = plan.results.table(bucket.elements())
        self._kernels.dequantize(*self._codec, table, every.reshape(1, -1), 1, call.found)
        return call

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Call:
        """Phase one alone: `out` gets the average of what this rank owns."""
        hosts = self._groups.hosts
        bucket = Bucket(items, self._partition)
        plan = self._plans.of(bucket)
        call = self._call(agreement, plan, 0, hosts.ranks)
        came = self._send_to_owners(bucket, plan, call)
        call.headers(means=True)
        table = plan.owned.table(Elements.of([out] * len(items)))
        self._decode_owned(table, came, call)
        call.sent = (hosts.count - 1) * plan.bytes
        return call

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        for each in self.residuals.values():
            each.commit()

    def _call(self, agreement: Agreement, plan: Plan, results: int, ranks: int = 0) -> Call:
        """A call whose messages are: within the host, to the owners, of an owner, of the host."""
        to_owners = self._groups.hosts.count * plan.bytes
        sizes = plan.sums.size, to_owners, plan.bytes, 0 if to_owners == results else results
        heads = plan.sums.heads + self._groups.hosts.count + len(plan.heads)
        return Call(self._kernels, self._learning, agreement, heads, sizes, ranks=ranks)

    def _send_to_owners(self, bucket: Bucket, plan: Plan, call: Call) -> Any:
        """Phase one: quantize this rank's local shard, and send each host shard to its owner.

        Returns:
            What came from each host of the host shard that this rank owns; None without one.
        """
        groups, kernels = self._groups, self._kernels
        local, messages = call.messages[:2]
        own = plan.sums.of(bucket, call, local, groups, kernels)
        if groups.across is None:
            return None
        errors = bucket.errors(self._send_residual, plan.ranges, kernels)
        kernels.quantize(*self._codec, plan.sent.table(own, errors), messages, call.found)
        rows = messages.reshape(groups.across.size, -1)
        call.headers(rows)
        came = groups.across.all_to_all(rows)
        assert groups.hosts.shard is not None
        heads = np.arange(groups.across.size) * plan.bytes
        call.note(came.reshape(-1), heads, groups.hosts.across(groups.hosts.shard))
        return came

    def _average(self, bucket: Bucket, plan: Plan, call: Call, came: Any) -> None:
        """Phase two: write the message of the means that this rank owns."""
        kernels, message = self._kernels, call.messages[2]
        errors = bucket.errors(self._owner_residual, plan.owned_ranges, kernels)
        if plan.memory is None:
            plan.memory = kernels.floats(plan.copied)
        copies = kernels.address(plan.memory) + plan.copies
        # The means lie where what they leave will lie: each number is read before it is written.
        addresses = np.where(errors.left != 0, errors.left, copies)
        means = Elements(addresses, np.zeros_like(addresses))
        # Decodes the hosts' payloads, adds them up in the contract's order, from the first host to
        # the last, and divides by the number of ranks.
        self._decode_owned(plan.owned.table(means), came, call)
        # What is all zero on every host may be a parameter that no rank used: DDP then ignores what
        # comes back, so it is sent as zeros, and its residuals stay where they are.
        zeros = zero_at(len(bucket.items))
        table = plan.owned.table(means, errors)
        kernels.quantize(*self._codec, table, message, call.found, zeros)
        call.headers(message.reshape(1, -1), means=True)

    def _decode_owned(self, table: Any, came: Any, call: Call) -> None:
        zeros = zero_at(call.agreement.items)
        ranks = self._groups.hosts.ranks
        self._kernels.dequantize(*self._codec, table, came, ranks, call.found, zeros)
