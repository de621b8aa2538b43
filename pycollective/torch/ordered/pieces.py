"""Pieces of a call over hosts of several ranks, and, on CPUs, over ranks that stand apart.

Leaves go to the rank that reduces them; with several ranks a host, first to one of the host, whose
sums cross to other hosts. Then results go to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

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


@dataclass
class Call:
    """A reduction, with flat contiguous tensors of this rank.

    Attributes:
        kind: "all_reduce" or "reduce_scatter".
        op: as the contract names it.
        leaves: the input.
        results: the output, of the same dtype; an all-reduce's may be the input itself.
        narrow: the dtype in which leaves travel if every rank's have exactly such values.
        narrow_check: "host": on devices the host waits to learn it. "device": leaves travel so, and
            where they do not fit results that are floats are NaN.
        done: called when the results are there.
    """

    kind: str
    op: str
    leaves: torch.Tensor
    results: torch.Tensor
    narrow: torch.dtype | None = None
    narrow_check: str = "host"
    done: Callable[[], None] = lambda: None

    def header(self, number: int, fits: bool) -> Header:
        """What this rank says of it, as call `number`."""
        narrow = name_of(self.narrow) if self.narrow is not None else ""
        dtype, count = name_of(self.leaves.dtype), self.leaves.numel()
        return Header(number, self.kind, dtype, self.op, count, narrow, self.narrow_check, fits)


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
    ) -> list[tuple[Shard, torch.Tensor]]:
        """Reduce this rank's shards of a piece.

        Args:
            call: of which.
            layout: of the group.
            shards: of the piece.
            received: of every rank the leaves that this rank reduces, if they came with headers.
            check: of headers, on devices.

        Returns:
            The shards that this rank has reduced, and their results.
        """
        rail = [each for each in shards if each.rail == layout.index]
        mine = [each for each in rail if each.host == layout.host]
        nodes = sorted((node, h) for h, those in enumerate(layout.nodes) for node in those)
        dtype = call.leaves.dtype
        if layout.apart:
            terms = [[call.leaves[each.begin : each.end]] for each in rail]
        else:
            rows = self._buffers.shards("rows", dtype, len(layout.local), rail)
            within = _leaves_within_host(call.leaves, layout, shards, rows)
            self._sender.start(LEAVES, *within).wait()
            terms = self._host_sums(call, layout, rail, rows)
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
            combine(call, operands, result, [node for node, _ in nodes], self._size, True, check)
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
        self, call: Call, layout: Layout, rail: Sequence[Shard], rows: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """For each shard of the rail what this host has of the order, added up."""
        nodes = layout.nodes[layout.host]
        dtype = reduction.node_dtype(call.leaves.dtype, call.op)
        sums = self._buffers.shards("sums", dtype, len(nodes), rail)
        found = []
        for shard, at in zip(rail, offsets(rail), strict=False):
            leaves = {
                rank: self._own(call.leaves[shard.begin : shard.end], row[at : at + shard.size])
                if rank == self._rank
                else row[at : at + shard.size]
                for rank, row in zip(layout.local, rows, strict=True)
            }
            found.append([each[at : at + shard.size] for each in sums])
            for node, out in zip(nodes, found[-1], strict=True):
                ranks = range(*node)
                terms = [leaves[rank] for rank in ranks]
                combine(call, terms, out, [(r, r + 1) for r in ranks], self._size, False)
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
    return call.leaves.nbytes <= header.ROOM or call.leaves.nbytes * ranks <= _SMALL


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
        for begin in range(0, call.leaves.numel(), elements):
            yield layout.shards_of(begin, min(begin + elements, call.leaves.numel()))
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
    ranks: int,
    finish: bool,
    check: reduction.Check | None = None,
) -> None:
    """Combine what lies here.

    Args:
        call: of which.
        terms: as `reduction.reduce` has them.
        out: the node, or the result.
        nodes: what each term is of the order.
        ranks: of the group.
        finish: whether `out` is the result.
        check: of headers, on devices.
    """
    if out.numel() or check is not None:
        steps = recipe((nodes[0][0], nodes[-1][1]), nodes)
        reduction.reduce(terms, out, call.op, steps, ranks, call.leaves.dtype, finish, check)


def _leaves_within_host(
    leaves: torch.Tensor, layout: Layout, shards: Sequence[Shard], rows: torch.Tensor
) -> tuple[list[Message], list[Message]]:
    """Sends and receives that bring each rank of the host the leaves of its rail's shards."""
    receives = []
    for rank, row in zip(layout.local, rows, strict=True):
        at = 0
        for begin, end in spans([each for each in shards if each.rail == layout.index]):
            if rank != layout.rank:
                receives.append((rank, row[at : at + end - begin]))
            at += end - begin
    sends = [
        (layout.local[number], leaves[begin:end])
        for number in range(layout.rails)
        if number != layout.index
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
