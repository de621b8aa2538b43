"""Pieces of a call over hosts of several ranks, and, on CPUs, over ranks that stand apart.

Leaves go to the rank that reduces them; with several ranks a host, first to one of the host, whose
sums cross to other hosts. Then results go to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pycollective.leaves.deal import Deal
from pycollective.order import Node, recipe
from pycollective.torch.ordered import header, reduction
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.layout import Layout, Shard, offsets, spans
from pycollective.torch.ordered.messages import LEAVES, RESULTS, Message, Messages
from pycollective.triton.formats import name_of

# Up to so many bytes of all ranks together, every rank gets all leaves and reduces all.
_SMALL = 32 << 10
_ALIGNED = 64  # bytes: rows that begin so are read 16 bytes at a time
_UNIT = 16  # elements: 16 bytes or more of any type

WORDS = 8  # that a rank says of its nodes, behind the header
BLOCK = 8 * WORDS  # bytes


Divisor: TypeAlias = float | torch.Tensor  # a tensor on a device: see `triton.reduce.reduce`


@dataclass
class Nodes:
    """What this rank gives to an all-reduce in place of a leaf.

    Attributes:
        deal: which nodes of the order each rank gives; the same on all ranks.
        rows: one for each of this rank's, of the type of `Call.leaves`.
        block: int64, ``(WORDS,)``, where rows are: numbers of this rank, which all are told.
        divisor_of: what all ranks' blocks make, ``(size, WORDS)``. On CPUs it may raise
            CollectiveMismatch, the same on all ranks; no data are used then. So it can see whether
            ranks have the same deal, by its digest. On a device it makes a NaN then.
        compiles: whether a kernel is compiled for the deal, which pays if later calls have it too.
    """

    deal: Deal
    rows: Sequence[torch.Tensor]
    block: torch.Tensor
    divisor_of: Callable[[torch.Tensor], Divisor]
    compiles: bool = True

    def divisor(self, said: torch.Tensor) -> Divisor:
        """The divisor of the average, by all ranks' blocks as bytes, ``(size, BLOCK)``."""
        return self.divisor_of(said.view(torch.int64))


@dataclass
class Call:
    """A reduction, with flat contiguous tensors of this rank.

    Attributes:
        kind: "all_reduce" or "reduce_scatter".
        op: as the contract names it.
        leaves: the input; with `nodes` a tensor without memory, of their type and size.
        results: the output, of the same dtype; an all-reduce's may be the input itself. With
            `nodes` of any float type up to fp32.
        narrow: the dtype in which leaves travel if every rank's have exactly such values.
        narrow_check: "host": on devices the host waits to learn it. "device": leaves travel so, and
            where they do not fit results that are floats are NaN.
        done: called when the results are there.
        nodes: what this rank gives in place of a leaf.
    """

    kind: str
    op: str
    leaves: torch.Tensor
    results: torch.Tensor
    narrow: torch.dtype | None = None
    narrow_check: str = "host"
    done: Callable[[], None] = lambda: None
    nodes: Nodes | None = None

    @property
    def rows(self) -> Sequence[torch.Tensor]:
        """What this rank gives, a row for each node."""
        return [self.leaves] if self.nodes is None else self.nodes.rows

    def given(self, ranks: int) -> list[tuple[Node, int]]:
        """Each node that any rank gives, and who gives it; they ascend."""
        if self.nodes is None:
            return [((rank, rank + 1), rank) for rank in range(ranks)]
        deal = self.nodes.deal
        assert deal.size == ranks
        return sorted((node, rank) for rank in range(ranks) for node in deal.nodes(rank))

    def header(self, number: int, fits: bool) -> Header:
        """What this rank says of it, as call `number`."""
        narrow = name_of(self.narrow) if self.narrow is not None else ""
        dtype, count = name_of(self.results.dtype), self.leaves.numel()
        kind = self.kind if self.nodes is None else "all_reduce_nodes"
        return Header(number, kind, dtype, self.op, count, narrow, self.narrow_check, fits)


class Buffers:
    """Memory on a device that is kept from call to call.

    Args:
        device: where it is.
        zeroed: whether it is zero at first, so that no message seems to have come that was another
            group's.
    """

    def __init__(self, device: torch.device, zeroed: bool) -> None:
        self._device, self._make = device, torch.zeros if zeroed else torch.empty
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        # A list, for a call may run meanwhile.
        return sum(each.numel() for each in list(self._memory.values()))

    def shards(
        self, name: str, dtype: torch.dtype, rows: int, shards: Sequence[Shard]
    ) -> torch.Tensor:
        """Rows that hold these shards, one behind the other."""
        return self.rows(name, dtype, rows, offsets(shards)[-1])

    def rows(self, name: str, dtype: torch.dtype, rows: int, elements: int) -> torch.Tensor:
        """Rows of so many elements, each of which begins at a multiple of 64 bytes."""
        stride = aligned(elements * dtype.itemsize)
        held = self._memory.get(name)
        if held is None or held.numel() < rows * stride:
            with torch.inference_mode(False):  # or calls outside of that mode could not write it
                held = self._make(rows * stride, dtype=torch.uint8, device=self._device)
            self._memory[name] = held
        typed = held if dtype == torch.uint8 else held.view(dtype)
        return typed.as_strided((rows, elements), (stride // dtype.itemsize, 1))


class Pieces:
    """Reduces pieces of calls.

    Args:
        rank: this one, in the group.
        size: of the group.
        sender: of its messages.
        buffers: for what comes.
        in_rows: whether terms are to lie in the rows of one matrix, as kernels of devices want.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sender: Messages | DeviceMessages,
        buffers: Buffers,
        in_rows: bool,
    ) -> None:
        self._rank, self._size = rank, size
        self._sender, self._buffers = sender, buffers
        self._in_rows = in_rows

    def reduce(
        self,
        call: Call,
        layout: Layout,
        shards: Sequence[Shard],
        received: Sequence[torch.Tensor] = (),
        check: reduction.Check | None = None,
        divisor: Divisor | None = None,
    ) -> list[tuple[Shard, torch.Tensor]]:
        """Reduce this rank's shards of a piece.

        Args:
            call: of which.
            layout: of the group.
            shards: of the piece.
            received: of every rank the leaves that this rank reduces, if they came with headers.
            check: of headers, on devices.
            divisor: of an average; None for the number of ranks.

        Returns:
            The shards that this rank has reduced, and their results.
        """
        divisor = self._size if divisor is None else divisor
        rail = [each for each in shards if each.rail == layout.index]
        mine = [each for each in rail if each.host == layout.host]
        of_hosts = layout.nodes if call.nodes is None else layout.nodes_of(call.nodes.deal)
        nodes = sorted((node, h) for h, those in enumerate(of_hosts) for node in those)
        dtype = call.leaves.dtype
        if layout.apart:
            terms = [[row[each.begin : each.end] for row in call.rows] for each in rail]
        else:
            local = [each for each in call.given(self._size) if each[1] in layout.local]
            rows = self._buffers.shards("rows", dtype, len(local), rail)
            within = _rows_within_host(call.rows, layout, shards, [r for _, r in local], rows)
            self._sender.start(LEAVES, *within).wait()
            terms = self._host_sums(call, of_hosts[layout.host], rail, local, rows)
            dtype = reduction.node_dtype(dtype, call.op)
        if not received:
            # Between hosts in the memory of the host's leaves, which are added up by now.
            received = list(self._buffers.shards("rows", dtype, len(nodes), mine))
            between = _terms_between_hosts(layout, rail, terms, nodes, received, offsets(mine))
            self._sender.start(LEAVES, *between).wait()

        results = [self._result_of(call, each) for each in mine]
        for shard, result, at in zip(mine, results, offsets(mine), strict=False):
            own = iter(terms[rail.index(shard)])
            operands = [
                self._own(next(own), row[at : at + shard.size])
                if h == layout.host
                else row[at : at + shard.size]
                for row, (_, h) in zip(received, nodes, strict=True)
            ]
            combine(call, operands, result, [node for node, _ in nodes], divisor, True, check)
        return list(zip(mine, results, strict=True))

    def send_results(
        self,
        call: Call,
        layout: Layout,
        shards: Sequence[Shard],
        results: Sequence[tuple[Shard, torch.Tensor]],
    ) -> None:
        """Bring a piece's results to the ranks that want them.

        Args:
            call: of which.
            layout: of the group.
            shards: of the piece.
            results: what `reduce` has returned.
        """
        if call.kind == "reduce_scatter":
            messages = _forwarded(call.results, layout, shards, results)
            self._sender.start(RESULTS, *messages).wait()
            return
        rail = [each for each in shards if each.rail == layout.index]
        between = _results_between_hosts(call.results, layout, rail)
        self._sender.start(RESULTS, *between).wait()
        within = _results_within_host(call.results, layout, shards)
        self._sender.start(RESULTS, *within).wait()

    def _host_sums(
        self,
        call: Call,
        nodes: Sequence[Node],
        rail: Sequence[Shard],
        local: Sequence[tuple[Node, int]],
        rows: torch.Tensor,
    ) -> list[list[torch.Tensor]]:
        """For each shard of the rail what this host has of the order, `nodes`, added up.

        Args:
            call: of which.
            nodes: of this host.
            rail: the shards.
            local: what each row is, and whose.
            rows: of the host's ranks.
        """
        dtype = reduction.node_dtype(call.leaves.dtype, call.op)
        sums = self._buffers.shards("sums", dtype, len(nodes), rail)
        found = []
        for shard, at in zip(rail, offsets(rail), strict=False):
            own = iter(call.rows)
            given = [
                self._own(next(own)[shard.begin : shard.end], row[at : at + shard.size])
                if rank == self._rank
                else row[at : at + shard.size]
                for (_, rank), row in zip(local, rows, strict=True)
            ]
            found.append([each[at : at + shard.size] for each in sums])
            for (lo, hi), out in zip(nodes, found[-1], strict=True):
                inside = [i for i, ((first, _), _) in enumerate(local) if lo <= first < hi]
                of = [local[i][0] for i in inside]
                combine(call, [given[i] for i in inside], out, of, self._size, False)
        return found

    def _result_of(self, call: Call, shard: Shard) -> torch.Tensor:
        """Where a shard's result goes that this rank makes."""
        if shard.rank is None or shard.rank == self._rank:
            return call.results[shard.at : shard.at + shard.size]
        return self._buffers.shards(f"forward {shard.rank}", call.results.dtype, 1, [shard])[0]

    def _own(self, term: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """A term of this rank's own, in its row among the others if they lie in rows."""
        return row.copy_(term) if self._in_rows else term


def aligned(nbytes: int) -> int:
    """As many bytes, or some more, so that another row may begin behind them."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def is_small(call: Call, ranks: int) -> bool:
    """Whether every rank gets all leaves, and reduces all."""
    most = call.leaves.nbytes * most_rows(call)
    if call.nodes is not None:
        return most + BLOCK <= header.ROOM
    return most <= header.ROOM or most * ranks <= _SMALL


def most_rows(call: Call) -> int:
    """How many rows any rank gives."""
    if call.nodes is None:
        return 1
    deal = call.nodes.deal
    return max(len(deal.nodes(rank)) for rank in range(deal.size))


def leaves_of(ranks: int) -> list[Node]:
    """What each rank's leaves are of the order."""
    return [(rank, rank + 1) for rank in range(ranks)]


def cut(call: Call, layout: Layout, piece: int) -> Iterator[list[Shard]]:
    """The shards of each piece of a call.

    Args:
        call: of which.
        layout: of the group.
        piece: bytes of leaves, at most.
    """
    elements = max(1, piece // call.leaves.itemsize)
    if call.kind == "all_reduce":
        unit = _UNIT if call.nodes is not None else 1  # kernels take vectors of what is aligned
        for begin in range(0, call.leaves.numel(), elements):
            yield layout.shards_of(begin, min(begin + elements, call.leaves.numel()), unit)
        return
    each = call.results.numel()
    part = max(1, elements // layout.size)
    for begin in range(0, each, part):
        yield layout.shards_for_ranks(each, begin, min(begin + part, each))


def combine(
    call: Call,
    terms: Sequence[torch.Tensor] | torch.Tensor,
    out: torch.Tensor,
    nodes: Sequence[Node],
    divisor: Divisor,
    finish: bool,
    check: reduction.Check | None = None,
) -> None:
    """Combine what lies here.

    Args:
        call: of which.
        terms: as `reduction.reduce` has them.
        out: the node, or the result.
        nodes: what each term is of the order.
        divisor: of an average.
        finish: whether `out` is the result.
        check: of headers, on devices.
    """
    if out.numel() or check is not None:
        steps = recipe((nodes[0][0], nodes[-1][1]), nodes)
        # Sums in fp32 that make a result of a smaller type are that type's.
        dtype = min(call.leaves.dtype, out.dtype, key=lambda each: each.itemsize)
        compiles = call.nodes is None or call.nodes.compiles
        reduction.reduce(terms, out, call.op, steps, divisor, dtype, finish, check, compiles)


def _rows_within_host(
    given: Sequence[torch.Tensor],
    layout: Layout,
    shards: Sequence[Shard],
    ranks: Sequence[int],
    rows: torch.Tensor,
) -> tuple[list[Message], list[Message]]:
    """Sends and receives that bring each rank of the host what it gives of its rail's shards.

    Args:
        given: what this rank gives.
        layout: of the group.
        shards: of a piece.
        ranks: whose each row is.
        rows: where it goes.
    """
    receives = []
    for rank, row in zip(ranks, rows, strict=True):
        at = 0
        for begin, end in spans([each for each in shards if each.rail == layout.index]):
            if rank != layout.rank:
                receives.append((rank, row[at : at + end - begin]))
            at += end - begin
    sends = [
        (layout.local[number], row[begin:end])
        for number in range(layout.rails)
        if number != layout.index
        for row in given
        for begin, end in spans([each for each in shards if each.rail == number])
    ]
    return sends, receives


def _terms_between_hosts(
    layout: Layout,
    rail: Sequence[Shard],
    terms: Sequence[Sequence[torch.Tensor]],
    nodes: Sequence[tuple[Node, int]],
    rows: Sequence[torch.Tensor],
    starts: Sequence[int],
) -> tuple[list[Message], list[Message]]:
    """Sends and receives that bring each rank every host's terms of the shards that it reduces.

    Args:
        layout: of the group.
        rail: its shards.
        terms: of each of these, this host's.
        nodes: what each row is, and whose.
        rows: where terms go.
        starts: where each of this rank's shards begins in a row.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    mine = [each for each in rail if each.host == layout.host]
    for h, peer in enumerate(layout.peers_of_rail):
        if h == layout.host:
            continue
        sends += [
            (peer, each)
            for shard, those in zip(rail, terms, strict=True)
            if shard.host == h
            for each in those
        ]
        theirs = [row for row, (_, host) in zip(rows, nodes, strict=True) if host == h]
        receives += [
            (peer, row[at : at + shard.size])
            for shard, at in zip(mine, starts, strict=False)
            for row in theirs
        ]
    return sends, receives


def _results_between_hosts(
    out: torch.Tensor, layout: Layout, rail: Sequence[Shard]
) -> tuple[list[Message], list[Message]]:
    """Sends and receives that bring each rank all results of its rail."""
    of_host = [[each for each in rail if each.host == h] for h in range(len(layout.hosts))]
    peers = [(h, rank) for h, rank in enumerate(layout.peers_of_rail) if h != layout.host]
    return (
        [(rank, out[at:end]) for _, rank in peers for at, end in spans(of_host[layout.host])],
        [(rank, out[at:end]) for h, rank in peers for at, end in spans(of_host[h])],
    )


def _results_within_host(
    out: torch.Tensor, layout: Layout, shards: Sequence[Shard]
) -> tuple[list[Message], list[Message]]:
    """Sends and receives that bring each rank of the host the results of all rails."""
    of_rail = [[each for each in shards if each.rail == rail] for rail in range(layout.rails)]
    others = [rank for rank in layout.local if rank != layout.rank]
    mine = of_rail[layout.index] if layout.index < layout.rails else []
    return (
        [(rank, out[at:end]) for rank in others for at, end in spans(mine)],
        [
            (layout.local[rail], out[at:end])
            for rail in range(layout.rails)
            if rail != layout.index
            for at, end in spans(of_rail[rail])
        ],
    )


def _forwarded(
    out: torch.Tensor,
    layout: Layout,
    shards: Sequence[Shard],
    kept: Sequence[tuple[Shard, torch.Tensor]],
) -> tuple[list[Message], list[Message]]:
    """Sends and receives of results for those ranks of this host that reduce nothing themselves."""
    return (
        [(s.rank, x) for s, x in kept if s.rank is not None and s.rank != layout.rank],
        [
            (layout.owner(each), out[each.at : each.at + each.size])
            for each in shards
            if each.rank == layout.rank and layout.owner(each) != layout.rank
        ],
    )
