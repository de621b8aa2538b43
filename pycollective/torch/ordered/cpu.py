"""Calls on CPUs, whose host compares what all ranks have called before it uses any data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pycollective.torch.ordered import header
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.layout import Layout, Shard
from pycollective.torch.ordered.messages import HEADERS, LEAVES, ROWS, Messages
from pycollective.torch.ordered.pieces import (
    BLOCK,
    Buffers,
    Call,
    Divisor,
    Pieces,
    combine,
    cut,
    is_small,
    most_rows,
)


class CpuCalls:
    """A call goes like this, between ranks that all exchange with all:

    1. Headers. Every rank tells all others what it has called. Where data are few, all of them
       travel with that, or to all ranks right behind it. Each rank reduces what it keeps, and that
       is all.
    2. Leaves. Each rank sends to every other the elements that the other reduces; with the headers,
       if there is room.
    3. Each rank adds its own shard up, in the contract's order, and rounds once.
    4. An all-reduce's results go to all ranks.

    Args:
        rank: this one, in the group.
        size: of the group.
        messages: of the group.
        buffers: of the group.
    """

    def __init__(self, rank: int, size: int, messages: Messages, buffers: Buffers) -> None:
        self._rank, self._size = rank, size
        self._messages, self._buffers = messages, buffers
        self._pieces = Pieces(rank, size, messages, buffers, in_rows=False)

    def raise_late(self) -> None:
        """Nothing is learnt late."""

    def tell_names(self, number: int, name: torch.Tensor) -> list[bytes]:
        """Tell all ranks bytes of this one, as call `number`; returns every rank's."""
        head = _head(Header(number, "prepare"))
        rows = self._exchange_headers(head, [[name]] * self._size)
        header.compare([row[: header.BYTES].numpy() for row in rows], self._rank)
        names = [row[header.BYTES :][: name.numel()] for row in rows]
        names[self._rank] = name
        return [each.numpy().tobytes() for each in names]

    def run(self, call: Call, layout: Layout, number: int, piece: int) -> Header:
        """Make a call of several ranks. Returns what it is."""
        narrow: Call | None = None
        fits = False
        if call.narrow is not None:
            narrow, fits = _narrowed(call, call.narrow)
        small = is_small(call, self._size)
        parts = self._eager(call, layout, small, piece)
        made = call.header(number, fits)
        head = _head(made)
        if call.nodes is not None:
            head = torch.cat([head, call.nodes.block.view(torch.uint8)])
        eager = [[row[begin:end] for row in call.rows] for begin, end in parts]
        rows = self._exchange_headers(head, eager)
        agreed = header.compare([row[: header.BYTES].numpy() for row in rows], self._rank)
        divisor: Divisor = self._size
        if call.nodes is not None:
            said = [row[header.BYTES : head.numel()] for row in rows]
            divisor = call.nodes.divisor(torch.stack(said))
        data = [row[head.numel() :] for row in rows]
        received = self._terms(call, data, parts[self._rank]) if parts else []
        if agreed and narrow is not None:
            call = narrow
        if small:
            if not received:
                count = call.leaves.numel()
                gathered = self._buffers.rows("gathered", call.leaves.dtype, self._size, count)
                received = list(gathered)
                received[self._rank].copy_(call.leaves)
                self._all_gather(LEAVES, received)
            each = call.results.numel()
            begin = self._rank * each if call.kind == "reduce_scatter" else 0
            terms = [leaf[begin : begin + each] for leaf in received]
            nodes = [node for node, _ in call.given(self._size)]
            combine(call, terms, call.results, nodes, divisor, finish=True)
            return made
        for shards in cut(call, layout, piece):
            results = self._pieces.reduce(call, layout, shards, received, divisor=divisor)
            few = call.results.nbytes <= self._messages.eager_bytes
            if call.kind == "all_reduce" and layout.apart and few:
                self._all_gather_results(call.results, shards)
            else:
                self._pieces.send_results(call, layout, shards, results)
        return made

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0; nothing is compared."""
        others = [(rank, flat) for rank in range(1, self._size)]
        mine = (others, []) if self._rank == 0 else ([], [(0, flat)])
        self._messages.start(ROWS, *mine).wait()

    def all_gather(self, number: int, row: np.ndarray) -> np.ndarray:
        """Have every rank's row of bytes, of any length; nothing is compared."""
        out = torch.empty(self._size, row.size, dtype=torch.uint8)
        self.exchange([torch.from_numpy(row.copy())] * self._size, out)
        return out.numpy()

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Send each rank its row of bytes, and have theirs; nothing is compared."""
        if out.nbytes <= self._messages.eager_bytes:
            each = [row.numel() for row in rows]
            self._all_to_all([[row] for row in rows], out.view(-1), each)
            return
        out[self._rank].copy_(rows[self._rank])
        others = [rank for rank in range(self._size) if rank != self._rank]
        sends = [(rank, rows[rank]) for rank in others]
        self._messages.start(ROWS, sends, [(rank, out[rank]) for rank in others]).wait()

    def _eager(self, call: Call, layout: Layout, small: bool, piece: int) -> list[tuple[int, int]]:
        """The elements of each row that go to each rank, this one too, with the header: those that
        the rank reduces, (begin, end), or none.

        Args:
            call: of which.
            layout: of the group.
            small: whether every rank gets all.
            piece: bytes of a piece.
        """
        most, rows = self._messages.eager_bytes_per_rank, most_rows(call)
        if call.nodes is not None:
            most -= BLOCK
        if small:
            all_of_it = (0, call.leaves.numel())
            return [all_of_it] * self._size if rows * call.leaves.nbytes <= most else []
        fits = rows * call.leaves.nbytes <= self._messages.eager_bytes and layout.apart
        if not fits or call.narrow is not None:  # whether they may travel so is not known yet
            return []
        first, *more = cut(call, layout, piece)
        if more or rows * max(each.size for each in first) * call.leaves.itemsize > most:
            return []
        return [(each.begin, each.end) for each in first]

    def _terms(
        self, call: Call, data: Sequence[torch.Tensor], part: tuple[int, int]
    ) -> list[torch.Tensor]:
        """What has come with the headers, in the order of nodes.

        Args:
            call: of which.
            data: of each rank, bytes behind what it says.
            part: the elements of each row that came here.
        """
        begin, end = part
        nbytes, dtype = (end - begin) * call.leaves.itemsize, call.leaves.dtype
        own = iter(call.rows)
        places = [0] * self._size
        terms = []
        for _, rank in call.given(self._size):
            at = places[rank]
            places[rank] += nbytes
            mine = rank == self._rank
            terms.append(next(own)[begin:end] if mine else data[rank][at : at + nbytes].view(dtype))
        return terms

    def _all_gather(self, tag: int, rows: Sequence[torch.Tensor]) -> None:
        """Send this rank's row to all others, and have theirs."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        sends = [(rank, rows[self._rank]) for rank in others]
        self._messages.start(tag, sends, [(rank, rows[rank]) for rank in others]).wait()

    def _exchange_headers(
        self, head: torch.Tensor, eager: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Tell all ranks what is called here, and data with that.

        Args:
            head: the header, and what goes with it to all.
            eager: data for each rank, this one too, of at most the messages' eager bytes a rank; or
                nothing.

        Returns:
            Every rank's row of bytes: what it has said, and data for this rank; this one's `head`
            alone.
        """
        row_bytes = header.BYTES + self._messages.eager_bytes_per_rank
        if self._messages.eager_bytes:
            memory = self._buffers.rows("headers", torch.uint8, self._size - 1, row_bytes)
            memory[:, : header.BYTES] = 0  # of the call before
            rows = list(memory)
            rows.insert(self._rank, head)
            data = eager or [()] * self._size
            each = [[head, *(part.view(torch.uint8) for part in parts)] for parts in data]
            each[self._rank] = []
            room = [row_bytes if parts else 0 for parts in each]

            def silent() -> list[int]:
                return [rank for rank, row in enumerate(rows) if not row[: header.BYTES].any()]

            self._all_to_all(each, memory.view(-1), room, silent)
        else:
            rows = list(self._buffers.rows("headers", torch.uint8, self._size, row_bytes))
            at = 0
            for part in (head, *(eager[self._rank] if eager else ())):  # the same for all
                rows[self._rank][at : at + part.nbytes] = part.view(torch.uint8)
                at += part.nbytes
            self._all_gather(HEADERS, rows)
        return rows

    def _all_gather_results(self, results: torch.Tensor, shards: Sequence[Shard]) -> None:
        """Bring every rank's shard of a piece's results to all ranks, at once."""
        begin, end = shards[0].at, shards[-1].at + shards[-1].size
        mine = shards[self._rank]
        own = results[mine.at : mine.at + mine.size].view(torch.uint8)
        each = [[own]] * self._size
        # At an end it need not travel to this rank itself.
        if self._rank == 0:
            begin, each[0] = mine.at + mine.size, []
        elif self._rank == self._size - 1:
            end, each[-1] = mine.at, []
        received = [shard.size * results.itemsize for shard in shards]
        if not each[self._rank]:
            received[self._rank] = 0
        self._all_to_all(each, results[begin:end].view(torch.uint8), received)

    def _all_to_all(
        self,
        each: Sequence[Sequence[torch.Tensor]],
        out: torch.Tensor,
        received: Sequence[int],
        silent: Callable[[], Sequence[int]] = list,
    ) -> None:
        """Send bytes to each rank, and have theirs in `out`, which has so much room for each."""
        sent = [sum([part.numel() for part in parts]) for parts in each]
        parts = [part for parts in each for part in parts]
        data = parts[0]
        if len(parts) > 1:
            data = self._buffers.rows("staged", torch.uint8, 1, sum(sent))[0]
            torch.cat(parts, out=data)
        self._messages.all_to_all(data, sent, out, received, silent)


def _head(mine: Header) -> torch.Tensor:
    return torch.tensor(mine.words).view(torch.uint8)


def _narrowed(call: Call, dtype: torch.dtype) -> tuple[Call, bool]:
    """A call whose rows are of another type; whether they have the same values."""
    rows = [row.to(dtype) for row in call.rows]
    fits = all(map(_equal, rows, call.rows))
    if call.nodes is None:
        return replace(call, leaves=rows[0]), fits
    nodes = replace(call.nodes, rows=rows)
    return replace(call, leaves=call.leaves.to(dtype), nodes=nodes), fits


def _equal(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether a narrow type has all of these values, bit for bit."""
    words = {4: torch.int32, 8: torch.int64}[wide.itemsize]
    return torch.equal(narrow.to(wide.dtype).view(words), wide.view(words))
