"""Top-k: the largest elements of each gradient, as places and values.

Every rank picks from its local shard of the host's sum, plus what it holds. By tensor, on a host of
several ranks, the local shards' histograms of magnitudes are added up three times (11, 10 and 10
bits of the 31), which gives the magnitude of the k-th element exactly. Of those that are equal to
it the first in the parameter's order are taken. So a host sends the k elements that it would send
if one rank held them all.

Every host's selection goes to all hosts, lengths first; each rank adds them up in the contract's
order. A rank receives (H - 1) payloads, in two collectives between hosts.

Small parameters go along in fp32, in the same messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.bucket import (
    Agreement,
    Bucket,
    ByBucket,
    Header,
    Outcome,
    floats,
    read_headers,
)
from pycollective.compression.groups import (
    Bytes,
    Group,
    Groups,
    exchange_lengths,
    gather_lengths,
)
from pycollective.compression.partition import (
    Numbers,
    Partition,
    Range,
    check_chunk,
    check_one_of,
    check_steps,
)
from pycollective.compression.residuals import Residuals
from pycollective.compression.sparse_layout import (
    VALUES,
    Indices,
    Layout,
    Message,
    Space,
    sum_of,
)
from pycollective.errors import ConfigurationError

# Bits of a magnitude that each round of histograms settles: (shift, bits).
ROUNDS = ((20, 11), (10, 10), (0, 10))


@dataclass
class Piece:
    """This rank's local shard of one parameter.

    Attributes:
        shard: its elements.
        x: the host's sum of the gradient there; None on a rank without a local shard.
        held, left: its old and its new residual.
        k: how many elements of the whole parameter the host sends.
    """

    shard: Range
    x: Any
    held: Floats | None
    left: Floats
    k: int


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


def over_shards(pieces: Sequence[Piece], local: Group) -> list[Indices] | None:
    """The largest of parameters in several pieces, one a rank of `local`; collective over it.

    Ranks without a local shard give empty pieces. All of them get None if an element is not finite.
    """
    finite = all(
        [_core.sparse_add(piece.x, piece.held, piece.left) for piece in pieces if piece.left.size]
    )
    starts = np.array([piece.shard[0] if piece.left.size else -1 for piece in pieces])
    wanted = np.array([piece.k for piece in pieces])
    prefixes = np.zeros(len(pieces), np.int64)
    ties = wanted
    for shift, bits in ROUNDS:
        mine = np.zeros((len(pieces), 1 << bits), np.int64)
        for piece, row, prefix in zip(pieces, mine, prefixes.tolist(), strict=True):
            if finite and piece.left.size:
                _core.sparse_histogram(piece.left, shift, bits, prefix, row)
        found = _merge_histograms(mine, starts, wanted, finite, local)
        if found is None:
            return None
        place, wanted, ties = found
        prefixes = prefixes << bits | place
    return [
        _select(piece, prefix, tie)
        for piece, prefix, tie in zip(pieces, prefixes.tolist(), ties.tolist(), strict=True)
    ]


def _merge_histograms(
    mine: Numbers, starts: Numbers, wanted: Numbers, finite: bool, local: Group
) -> tuple[Numbers, Numbers, Numbers] | None:
    """Where the elements that are wanted end, in the sum of all ranks' histograms.

    Each rank adds up those of some parameters and tells the others: a histogram goes to one rank.

    Args:
        mine: this rank's histogram of each parameter, by ascending magnitude.
        starts: where this rank's pieces start; -1 of empty ones.
        wanted: how many elements of each parameter, the largest.
        finite: whether this rank's are.
        local: the ranks.

    Returns:
        Of each parameter the bin in which they end; how many are wanted of that one, and of these
        how many at most of this rank's. None if some rank's are not finite.
    """
    ranks, count, bins = local.size, len(mine), mine.shape[1]
    each = -(-count // ranks)
    rows = np.zeros((ranks * each, 2 + bins // 2), np.int64)  # bins of 32 bits
    rows[:, 0] = not finite
    rows[:count, 1] = starts
    rows[:count, 2:] = mine.astype(np.uint32).view(np.int64)
    came = local.all_to_all(rows.reshape(ranks, -1).view(np.uint8)).view(np.int64)
    every = came.reshape(ranks, each, -1)
    histograms = np.ascontiguousarray(every[:, :, 2:]).view(np.uint32).astype(np.int64)
    first = local.rank * each
    want = np.zeros(each, np.int64)
    own = wanted[first : first + each]
    want[: own.size] = own
    above = np.cumsum(histograms.sum(0)[:, ::-1], axis=1)  # as large as this or larger
    back = np.minimum((above < want[:, None]).sum(1), bins - 1)
    one = np.arange(each)
    place = bins - 1 - back
    there = histograms[:, one, place]  # of each rank
    left = want - (above[one, back] - there.sum(0))
    # Of those that are equal the first: what the ranks before one have comes off.
    begins = every[:, :, 1]
    before = (begins[:, None] >= 0) & (begins[:, None] < begins[None])
    ties = np.maximum(0, left - (before * there[:, None]).sum(0))
    bad = np.full(each, every[:, 0, 0].any())
    told = np.concatenate([bad[None], place[None], left[None], ties]).astype(np.int64)
    heard = local.all_gather(told.view(np.uint8).reshape(-1)).view(np.int64)
    told = heard.reshape(ranks, 3 + ranks, each).transpose(1, 0, 2).reshape(3 + ranks, -1)
    if told[0].any():
        return None
    return told[1, :count], told[2, :count], told[3 + local.rank, :count]


def _select(piece: Piece, key: int, ties: int) -> Indices:
    if not piece.left.size:
        return np.empty(0, np.uint32)
    indices = np.empty(min(piece.k, piece.left.size), np.uint32)
    return indices[: _core.sparse_select(piece.left, key, min(ties, piece.left.size), indices)]


@dataclass(frozen=True)
class SparseOptions:
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

    def make(self, groups: Groups, partition: Partition) -> TopK:
        """The codec."""
        return TopK(groups, partition, self)

    def density_after(self, steps: int) -> float:
        """The density of a step that so many have gone before."""
        if steps >= self.warm_up:
            return float(self.density)
        return float(self.density) ** ((steps + 1) / (self.warm_up + 1))


class TopK:
    """Averages gradients, of which the largest elements go between hosts.

    Args:
        groups: of this rank.
        partition: of the parameters.
        options: of top-k.

    Attributes:
        residuals: the worker's.
    """

    def __init__(self, groups: Groups, partition: Partition, options: SparseOptions) -> None:
        self._groups, self._partition = groups, partition
        self._options, self._values = options, VALUES[options.values]
        self._layouts = ByBucket(Layout)
        self._send_residual = Residuals()
        self.residuals: Mapping[str, Residuals] = {"worker": self._send_residual}

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        self._send_residual.commit(float(self._options.decay))

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Outcome:
        """Average the gradients over all ranks, in place; `commit` makes new residuals count."""
        groups = self._groups
        bucket = Bucket(items, self._partition)
        layout = self._layouts.of(bucket)
        own = bucket.host_sums(groups, agreement)
        chosen = self._choose(bucket, own, self._options.density_after(steps))
        rows: list[Bytes] = []
        sent = 0
        if groups.across is not None:
            header = agreement.header(chosen is not None, bucket.is_zero(own))
            rows, sent = self._gather(bucket, layout, own, chosen, header)
        space = layout.local_shards
        finite = self._write(bucket, space, self._to_host(rows, space), agreement)
        if not finite:
            bucket.fill_nan()
        return Outcome(finite, sent)

    def _choose(self, bucket: Bucket, own: list[Any], density: float) -> dict[int, Indices] | None:
        """What this rank sends of each parameter, as places in its piece; None if not all finite.

        The pieces' residuals then hold the gradient and what was held, nothing taken off.
        """
        numbers = [n for n, item in enumerate(bucket.items) if not item.uncompressed]
        pieces = [self._piece(bucket, own, n, density) for n in numbers]
        if pieces and self._options.by == "tensor" and self._groups.hosts.shards > 1:
            every = over_shards(pieces, self._groups.local)
            return None if every is None else dict(zip(numbers, every, strict=True))
        chosen, chunk = {}, self._partition.chunk
        for number, piece in zip(numbers, pieces, strict=True):
            if not piece.left.size:
                continue
            if self._options.by == "tensor":
                indices = np.empty(piece.k, np.uint32)
                found = _core.top_k(piece.x, piece.held, piece.left, piece.k, indices)
            else:
                k, size = count_of(density, chunk), piece.left.size
                indices = np.empty(-(-size // chunk) * k, np.uint32)
                found = _core.top_k_chunks(piece.x, piece.held, piece.left, k, chunk, indices)
            if found < 0:  # not all finite
                return None
            chosen[number] = indices[:found]
        return chosen

    def _piece(self, bucket: Bucket, own: list[Any], number: int, density: float) -> Piece:
        item = bucket.items[number]
        k = count_of(density, item.flat.count)
        shard = self._groups.hosts.shard
        if shard is None:
            return Piece((0, 0), None, None, np.empty(0, np.float32), k)
        start, stop = bucket.local_shards[number][shard]
        held, left = self._send_residual.of(item.name, stop - start)
        return Piece((start, stop), own[number], held, left, k)

    def _take(
        self, bucket: Bucket, space: Space, chosen: Mapping[int, Indices]
    ) -> tuple[Numbers, NDArray[Any]]:
        """Take what was chosen off the residuals: its places in the local shard, and values."""
        counts = [indices.size for indices in chosen.values()]
        begins = np.array([space.edges[number] for number in chosen], np.int64)
        values = np.empty(sum(counts), self._values)
        at = 0
        for number, indices in chosen.items():
            left = self._send_residual.left(bucket.items[number].name)
            _core.sparse_take(left, indices, values[at : at + indices.size])
            at += indices.size
        every = np.concatenate([np.empty(0, np.uint32), *chosen.values()])
        return every + np.repeat(begins, counts), values

    def _uncompressed(self, bucket: Bucket, of: Message, own: list[Any]) -> Floats:
        shard = self._groups.hosts.shard
        assert shard is not None
        parts = [
            bucket.in_fp32(number, shard, own[number], start, stop)
            for number, start, stop in of.uncompressed
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _gather(
        self,
        bucket: Bucket,
        layout: Layout,
        own: list[Any],
        chosen: dict[int, Indices] | None,
        header: Header,
    ) -> tuple[list[Bytes], int]:
        """Every host's message about this local shard, and how many bytes this rank sent."""
        across, hosts = self._groups.across, self._groups.hosts
        assert across is not None
        assert hosts.shard is not None
        space = layout.own_local_shard
        (taken,) = space.split(*self._take(bucket, space, chosen or {}))
        (of,) = space.messages
        message = of.write(header, self._uncompressed(bucket, of, own), taken)
        senders = hosts.across(hosts.shard)
        rows = gather_lengths(across, message, senders, of.longest(self._values))
        headers = read_headers(rows, header, senders)
        self._skip_updates(bucket, headers)
        return rows, (hosts.count - 1) * (8 + max(row.size for row in rows))

    def _skip_updates(self, bucket: Bucket, headers: Sequence[Header]) -> None:
        """Leave the residuals of what is all zero everywhere where they are.

        It may be a parameter that no rank used: DDP then ignores what comes back.
        """
        all_zero = np.logical_and.reduce([each.all_zero for each in headers])
        for number in np.flatnonzero(all_zero):
            self._send_residual.skip_update(bucket.items[number].name)

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Outcome:
        """Average what this rank owns: to each host goes what it owns, lengths first.

        Whether all were finite is this rank's view; the ranks must agree on it.
        """
        across, hosts = self._groups.across, self._groups.hosts
        assert across is not None
        assert hosts.shard is not None
        bucket = Bucket(items, self._partition)
        space = self._layouts.of(bucket).own_host_shards
        own = bucket.host_sums(self._groups, agreement)
        chosen = self._choose(bucket, own, self._options.density_after(steps))
        header = agreement.header(chosen is not None, bucket.is_zero(own))
        parts = space.split(*self._take(bucket, space, chosen or {}))
        messages = [
            of.write(header, self._uncompressed(bucket, of, own), part)
            for of, part in zip(space.messages, parts, strict=True)
        ]
        senders = hosts.across(hosts.shard)
        rows, longest = exchange_lengths(across, messages, senders, space.longest(self._values))
        headers = read_headers(rows, header, senders)
        self._skip_updates(bucket, headers)
        finite = all(each.finite for each in headers)
        if finite:
            owned = Space([space.messages[hosts.own]], len(items))
            self._write_averages(owned, [rows], lambda _: out)
        sent = (hosts.count - 1) * (8 * hosts.count + longest)
        return Outcome(finite and out.is_finite(), sent)

    def _write_averages(
        self, space: Space, rows: Sequence[Sequence[Bytes]], target: Callable[[int], Flat]
    ) -> bool:
        """Write averages, each from some ranks' messages about the same segments.

        Args:
            space: of the segments; what it has of an item is written from the item's start on.
            rows: of each of its messages, as the ranks sent it.
            target: of each item.

        Returns:
            Whether they are finite: small parameters are as they came, and sums may overflow.
        """
        ranks = self._groups.hosts.ranks
        uncompressed = np.empty(sum(of.uncompressed_count for of in space.messages), np.float32)
        at = 0
        for of, sent in zip(space.messages, rows, strict=True):
            if of.uncompressed_count:
                part = uncompressed[at : at + of.uncompressed_count]
                leaves = [floats(row, of.uncompressed_at, part.size) for row in sent]
                _core.reduce_into(leaves, "sum", part)
                at += part.size
        uncompressed /= np.float32(ranks)
        at = 0
        for of in space.messages:
            for number, start, stop in of.uncompressed:
                target(number).put(start, uncompressed[at : at + stop - start])
                at += stop - start
        parts, all_zero = [], []
        for of, sent in zip(space.messages, rows, strict=True):
            read = [of.read(row, self._values) for row in sent]
            parts.append(sum_of(read))
            all_zero.append(np.logical_and.reduce([Header.all_zero_of(row) for row in sent]))
        places, values = space.merge(parts, all_zero)
        for number, count, indices, there in space.by_item(places):
            _core.sparse_scatter(indices, values[there], target(number).part(0, count), ranks)
        return bool(np.isfinite(uncompressed).all() and np.isfinite(values).all())

    def _to_host(self, rows: Sequence[Bytes], space: Space) -> list[list[Bytes]]:
        """Bring every rank of this host the messages of each local shard."""
        local, hosts = self._groups.local, self._groups.hosts
        if local.size == 1:
            return [list(rows)]
        most = 8 + hosts.count * (8 + space.longest(self._values))
        lengths = np.array([len(rows), *(row.size for row in rows)], np.int64).view(np.uint8)
        mine = np.concatenate([lengths, *rows]) if rows else np.empty(0, np.uint8)
        found = []
        for whole in gather_lengths(local, mine, hosts.local, most)[: hosts.shards]:
            count = int(whole[:8].copy().view(np.int64)[0])
            sizes = whole[8 : 8 * (1 + count)].copy().view(np.int64)
            bounds = 8 * (1 + count) + np.concatenate([[0], np.cumsum(sizes)])
            found.append([whole[bounds[i] : bounds[i + 1]] for i in range(count)])
        return found

    def _write(
        self, bucket: Bucket, space: Space, rows: list[list[Bytes]], agreement: Agreement
    ) -> bool:
        """Write all local shards' averages to the gradients, if all are finite."""
        mine = agreement.header(True, [False] * len(bucket.items))
        for shard, messages in enumerate(rows):
            headers = read_headers(messages, mine, self._groups.hosts.across(shard))
            if not all(each.finite for each in headers):
                return False
        return self._write_averages(space, rows, lambda number: bucket.items[number].flat)
