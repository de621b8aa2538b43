"""Calls on devices: all is issued at once, on one stream, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pycollective.errors import CollectiveError
from pycollective.order import recipe
from pycollective.torch.ordered import header, reduction
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.pieces import (
    Buffers,
    Call,
    Pieces,
    aligned,
    cut,
    is_small,
    leaves_of,
    most_rows,
)
from pycollective.torch.ordered.work import Issued, UnderWay
from pycollective.torch.streams import Streams, wait_for


class _Head(NamedTuple):
    """What a header says: its words, the last of which may be known to the device alone."""

    words: Sequence[int]
    fits: torch.Tensor | None = None


class DeviceCalls:
    """A call goes like this, between ranks that all exchange with all:

    1. A kernel lays out a row for each rank: a header, and the leaves that the rank reduces.
    2. Rows go to all ranks at once.
    3. A kernel adds this rank's shard up, in the contract's order, and rounds once. It compares the
       headers where they lie. If they differ, its shard becomes NaN, and the host learns it later.
    4. An all-reduce's results go to all ranks at once.

    Where data are few, all of them go to all ranks in one exchange. Between hosts of several ranks,
    and where ranks give nodes, headers go to all ranks first, and the rest is `Pieces`.

    Attributes:
        last: the call that was made last; None before the first.

    Args:
        device: where tensors are.
        messages: of the group.
        buffers: of the group.
        streams: of the device.
        under_way: the group's calls.
    """

    def __init__(
        self,
        device: torch.device,
        messages: DeviceMessages,
        buffers: Buffers,
        streams: Streams,
        under_way: UnderWay,
    ) -> None:
        self._under_way = under_way
        rank, size = self._rank, self._size = messages.rank, messages.size
        self._device = device
        self._messages, self._buffers, self._streams = messages, buffers, streams
        self._pieces = Pieces(rank, size, messages, buffers, in_rows=True)
        self._recipe = tuple(recipe((0, size), leaves_of(size)))
        self.last: Header | None = None
        with torch.inference_mode(False):  # or calls outside of that mode could not write them
            self._number = torch.zeros(1, dtype=torch.int64, device=device)
            self._own = torch.zeros(header.WORDS, dtype=torch.int64, device=device)
            self._fits = torch.ones(1, dtype=torch.int64, device=device)
            found = torch.zeros(1 + size * header.WORDS, dtype=torch.int64)
            self._found = found if device.type == "cpu" else found.pin_memory()
        under_way.written = self._found
        self._seen = self._found.numpy()  # the same memory

    def found(self, until: int | None = None) -> CollectiveError | None:
        """What calls that the device has ended have found; never waits.

        Args:
            until: the last call that counts, by its number; None: the last one.
        """
        if not self._seen[0]:
            return None
        rows = list(self._seen[1:].reshape(self._size, header.WORDS).view("uint8"))
        headers = [Header.read(row) for row in rows]
        mine = headers[self._rank]
        assert mine is not None
        if until is not None and mine.number > until:
            return None
        # A backend that was aborted leaves what the call before has left, or nothing.
        came = [each is not None and each.number >= mine.number for each in headers]
        known = [row if there else None for row, there in zip(rows, came, strict=True)]
        try:
            fit = header.compare(known, self._rank, "Results that are floats are NaN")
        except CollectiveError as error:
            return error
        if not fit:
            return header.misfit(known, self._rank)
        # None, if only this rank's own row has not come.
        others = [rank for rank, there in enumerate(came) if not there] or [self._rank]
        absent = ", ".join(map(str, others))
        return CollectiveError(
            f"nothing has come from rank(s) {absent} for {mine}: the backend has ended the "
            "exchange. Results that are floats are NaN",
            self._rank,
            mine.kind,
            mine.number,
        )

    @property
    def failing(self) -> Header | None:
        """The call that has failed, if one has: of which something was found, or the last one."""
        mine = self._seen[1:].reshape(self._size, header.WORDS)[self._rank].view("uint8")
        return Header.read(mine) if self._seen[0] else self.last

    def raise_late(self) -> None:
        """Raise what calls before this one have found."""
        if (error := self.found()) is not None:
            raise error

    def raise_at(self, issued: Issued, what: str) -> None:
        """Wait for a call, as long as the group does, and raise what those up to it have found.

        Once one has, peers may not make the calls behind it, so those are not waited for.
        """
        self._wait(issued, what)

    def tell_names(self, number: int, name: torch.Tensor) -> list[bytes]:
        """Tell all ranks bytes of this one, as call `number`; returns every rank's.

        The host waits for that as long as the group does.
        """
        rows = self._gather(Header(number, "prepare"), name, header.MESSAGE)
        return [row.tobytes() for row in rows]

    def all_gather(self, number: int, row: np.ndarray) -> np.ndarray:
        """Have every rank's row of bytes, as call `number`; as `tell_names`."""
        said = Header(number, "all_gather", count=row.size)
        rows = self._gather(said, torch.from_numpy(row), header.BYTES + aligned(row.size))
        return rows[:, : row.size]

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0; nothing is compared."""
        self._messages.broadcast(flat)
        self._number += 1

    def _gather(self, called: Header, data: torch.Tensor, row_bytes: int) -> np.ndarray:
        """Tell all ranks bytes of the host, and wait for theirs."""
        self.last = called
        rows = self._to_all(data.to(self._device), _Head(called.words), row_bytes)
        self._number += 1
        told = self._on_host(rows)
        header.compare([row[: header.BYTES] for row in told], self._rank)
        return told[:, header.BYTES :]

    def run(self, call: Call, layout: Layout, number: int, piece: int) -> Header:
        """Make a call of several ranks, on the current stream. Returns what it is."""
        made = self.last = call.header(number, fits=True)
        if call.nodes is not None:  # by which messages are cut
            made.deal = call.nodes.deal.digest >> header.NOT_OF_DEAL
        head = _Head(made.words)
        small = call.nodes is None and is_small(call, self._size)
        if call.narrow is not None and not small:
            narrow = self._narrowed(call, call.narrow)
            told = head._replace(fits=self._fits)
            if call.narrow_check == "device":
                call, head = narrow, told
            elif self._all_fit(call, told):
                call = narrow
        if small:
            self._run_small(call, head)
        elif call.nodes is not None or not layout.apart:
            self._run_in_pieces(call, layout, head, piece)
        elif call.kind == "all_reduce":
            count, most = call.leaves.numel(), max(1, piece // call.leaves.itemsize)
            for begin in range(0, count, most):
                end = min(begin + most, count)
                leaves, results = _part(call.leaves, begin, end), _part(call.results, begin, end)
                self._all_reduce(call, head, leaves, results, last=end == count)
        else:
            each = call.results.numel()
            most = max(1, piece // call.leaves.itemsize // self._size)
            for begin in range(0, each, most):
                end = min(begin + most, each)
                leaves, out = _part(call.leaves, begin), _part(call.results, begin, end)
                self._reduce_shards(call, head, leaves, each, end - begin, out, end == each)
        return made

    def _run_small(self, call: Call, head: _Head) -> None:
        """All leaves to all ranks; each reduces what it keeps."""
        leaves = call.leaves
        row_bytes = max(header.MESSAGE, header.BYTES + aligned(leaves.nbytes))
        rows = self._to_all(leaves, head, row_bytes)
        begin = self._rank * call.results.numel() if call.kind == "reduce_scatter" else 0
        at = header.BYTES + begin * leaves.itemsize
        self._combine(call, rows, at, call.results, last=True)

    def _all_reduce(
        self, call: Call, head: _Head, leaves: torch.Tensor, results: torch.Tensor, last: bool
    ) -> None:
        """Reduce a piece, and bring its results to all."""
        count = leaves.numel()
        nbytes = aligned(-(-count // self._size) * leaves.itemsize)  # of a shard of leaves
        shard = nbytes // leaves.itemsize
        divides = shard * self._size == count
        row_bytes = shard * results.itemsize
        if divides:
            gathered = results.view(torch.uint8)
        else:  # in memory that holds what was sent, which is there by then
            gathered = self._buffers.rows("sent", torch.uint8, 1, self._size * row_bytes)[0]
        row = gathered[self._rank * row_bytes : (self._rank + 1) * row_bytes]
        out = row.view(results.dtype)
        if not divides:
            out = out[: max(count - self._rank * shard, 0)]
        self._reduce_shards(call, head, leaves, shard, shard, out, last)
        self._messages.all_gather(gathered, row)
        if not divides:
            results.copy_(gathered.view(results.dtype)[:count])

    def _reduce_shards(
        self,
        call: Call,
        head: _Head,
        leaves: torch.Tensor,
        step: int,
        size: int,
        out: torch.Tensor,
        last: bool,
    ) -> None:
        """Send each rank its shard, and reduce this rank's.

        Args:
            call: of which.
            head: of the messages.
            leaves: of the piece; those of the next rank begin `step` elements later.
            step: elements.
            size: of a shard.
            out: the result; it may have less elements than a shard.
            last: whether this is the last piece.
        """
        row_bytes = header.BYTES + aligned(size * leaves.itemsize)
        sent = self._buffers.rows("sent", torch.uint8, self._size, row_bytes)
        received = self._buffers.rows("received", torch.uint8, self._size, row_bytes)
        self._lay_out(leaves, step, size, sent, head)
        self._messages.all_to_all(received, sent)
        self._combine(call, received, header.BYTES, out, last)

    def _run_in_pieces(self, call: Call, layout: Layout, head: _Head, piece: int) -> None:
        """Headers to all ranks, with what ranks say of their nodes, and the pieces."""
        nodes, said, divisor = call.nodes, call.leaves[:0], None
        if nodes is not None:
            said = nodes.block.view(torch.uint8)
        headers = self._to_all(said, head, header.BYTES + said.nbytes)
        self._combine(call, headers, header.BYTES, call.results[:0], last=True)
        most = layout.most_messages(call.kind)
        if nodes is not None:
            divisor = nodes.divisor(headers[:, header.BYTES :])
            most = max(most, most_rows(call), *map(len, layout.nodes_of(nodes.deal)))
        self._messages.most = most
        check = self._check(headers, False)
        for shards in cut(call, layout, piece):
            results = self._pieces.reduce(call, layout, shards, check=check, divisor=divisor)
            self._pieces.send_results(call, layout, shards, results)

    def _narrowed(self, call: Call, dtype: torch.dtype) -> Call:
        """The call with rows of another type; `_fits` becomes whether they have the same values."""
        assert len(call.rows) <= 1
        if not call.rows:
            self._fits.fill_(1)
        rows = [torch.empty_like(row, dtype=dtype) for row in call.rows]
        for wide, narrow in zip(call.rows, rows, strict=True):
            reduction.narrowed(wide, narrow, self._fits)
        if call.nodes is None:
            return replace(call, leaves=rows[0])
        nodes = replace(call.nodes, rows=rows)
        return replace(call, leaves=call.leaves.to(dtype), nodes=nodes)

    def _all_fit(self, call: Call, head: _Head) -> bool:
        """Whether all ranks' leaves fit the narrow type; the host waits for that."""
        rows = self._to_all(call.leaves[:0], head, header.BYTES)
        return header.compare(list(self._on_host(rows)), self._rank)

    def _to_all(self, data: torch.Tensor, head: _Head, row_bytes: int) -> torch.Tensor:
        """Send a header and data to all ranks; returns every rank's, ``(ranks, row_bytes)``."""
        sent = self._buffers.rows("sent", torch.uint8, 1, row_bytes)
        received = self._buffers.rows("received", torch.uint8, self._size, row_bytes)
        self._lay_out(data, 0, data.numel(), sent, head)
        self._messages.all_gather(received, sent)
        return received

    def _lay_out(
        self, leaves: torch.Tensor, step: int, size: int, rows: torch.Tensor, head: _Head
    ) -> None:
        told = self._number, self._own, head.fits
        reduction.lay_out(leaves, step, size, rows, head.words, *told)

    def _combine(
        self, call: Call, rows: torch.Tensor, at: int, out: torch.Tensor, last: bool
    ) -> None:
        """Reduce what every rank's row has from byte `at` on, and compare the headers."""
        dtype = call.leaves.dtype
        stride, begin = rows.shape[1] // dtype.itemsize, at // dtype.itemsize
        leaves = rows.view(dtype).as_strided((self._size, out.numel()), (stride, 1), begin)
        check = self._check(rows, last)
        reduction.reduce(leaves, out, call.op, self._recipe, self._size, dtype, True, check)

    def _check(self, rows: torch.Tensor, last: bool) -> reduction.Check:
        words = rows.view(torch.int64)
        return reduction.Check(words, self._own, self._rank, self._found, self._number, last)

    def _on_host(self, rows: torch.Tensor) -> np.ndarray:
        """Bring rows to the host, which waits for them as long as the group does. This rank's says
        what it has sent, also if nothing has come."""
        assert self.last is not None
        there = rows.to("cpu", non_blocking=True, copy=True)
        issued = Issued([self.last], self._streams.event(), [there])
        with self._under_way.listed(issued):
            self._wait(issued, self.last.kind)
        found = there.numpy()
        known = np.array(self.last.words[: header.FITS]).view(np.uint8)
        found[self._rank, : known.size] = known
        return found

    def _wait(self, issued: Issued, what: str) -> None:
        """Let the host wait, until something is known to be wrong.

        Raises:
            CollectiveError: it is, or the group's timeout is over.
        """
        come = _Any(issued, self._seen)
        wait_for(come, self._messages.timeout, f"ordered: {what}")
        if issued.error is not None:
            raise issued.error
        self.raise_late()  # if something was found the device may not have come to the end


class _Any:
    """An event that also counts as come to once something is found, or told."""

    def __init__(self, issued: Issued, seen: np.ndarray) -> None:
        self._issued, self._seen = issued, seen

    def query(self) -> bool:
        issued = self._issued
        return bool(issued.error is not None or self._seen[0] or issued.event.query())


def _part(x: torch.Tensor, begin: int, end: int | None = None) -> torch.Tensor:
    whole = begin == 0 and end in (None, x.numel())
    return x if whole else x[begin:end]  # a view takes a microsecond
