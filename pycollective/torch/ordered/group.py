"""A process group whose reductions have the contract's bits, whatever its backend.

A call goes like this, between ranks that all exchange with all:

1. Headers. Every rank tells all others what it has called. Where data are few, all of them travel
   with that, or to all ranks right behind it. Each rank reduces what it keeps, and that is all.
2. Leaves. Each rank sends to every other the elements that the other reduces; with the headers, if
   there is room.
3. Each rank adds its own shard up, in the contract's order, and rounds once.
4. An all-reduce's results go to all ranks.

With several ranks on each of several hosts (`layout.Layout`) each host adds its leaves up first, so
that sums cross to other hosts, and once a host. Large tensors are cut into pieces, so that little
memory is needed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.bootstrap.attach import host_identity
from pycollective.bootstrap.init import simulated_hosts
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
)
from pycollective.order import Node, recipe
from pycollective.placement import number_hosts
from pycollective.torch.ordered import header, reduction
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.layout import Layout, Shard, layout_of, offsets, spans
from pycollective.torch.ordered.messages import (
    HEADERS,
    LEAVES,
    RESULTS,
    ROWS,
    Message,
    Messages,
)
from pycollective.torch.streams import Streams
from pycollective.torch.worker import Worker
from pycollective.triton.formats import name_of

# Bytes of a piece. Smaller ones cost more by their messages than they gain.
_PIECE = 64 << 20
# Up to so many bytes of all ranks together, every rank gets all leaves and reduces all.
_SMALL = 32 << 10
_ALIGNED = 64  # bytes, of a row of a buffer


@dataclass
class Call:
    """A reduction, with flat contiguous tensors of this rank.

    Attributes:
        kind: "all_reduce" or "reduce_scatter".
        op: as the contract names it.
        leaves: the input.
        results: the output, of the same dtype; an all-reduce's may be the input itself.
        narrow: the dtype in which leaves travel if every rank's have exactly such values.
        done: called when the results are there.
    """

    kind: str
    op: str
    leaves: torch.Tensor
    results: torch.Tensor
    narrow: torch.dtype | None = None
    done: Callable[[], None] = lambda: None


class OrderedGroup:
    """The ordered reductions of one process group on one device.

    On CPUs a call without `async_op` runs on the caller's thread, behind those that were issued
    before; all others run on a thread of the group's own, in their order. On devices all is issued
    at the call, on a stream of the group's own.

    Args:
        group: of torch's; held weakly.
        device: where its tensors are.
        streams: of the device; None on CPUs.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, streams: Streams | None
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = device
        self.streams = streams
        self.calls = 0
        self.failure: CollectiveError | None = None
        self.piece = _PIECE
        self.group = weakref.ref(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._layout: Layout | None = None
        self._messages = Messages(group, device)
        self._memory: dict[str, torch.Tensor] = {}
        self._unread: deque[tuple[Any, torch.Tensor]] = deque()
        self._one_at_a_time = threading.Lock()
        # Nothing here refers to this, so that its memory and thread go with the group at once.
        self.worker = Worker("an ordered group", self._messages.abort)

    def run(self, call: Call) -> None:
        """Make a call here and now.

        Raises:
            CollectiveError: it failed, or one before it has; then the group makes no more calls.
            ConfigurationError: this process is a fork, whose messages would mix with its parent's.
        """
        with self._alone(call.kind):
            self._run(call)
        call.done()

    def prepare(self) -> None:
        """Learn which ranks share hosts, unless it is known. Collective over the group.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        with self._alone("prepare"):
            self._learn_layout()

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Send each rank its row of bytes, and have theirs. Collective; nothing is compared.

        Args:
            rows: as long as each other, on every rank.
            out: a row for each rank.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        with self._alone("exchange"):
            self._messages.connect()
            self.calls += 1
            if out.nbytes <= self._messages.eager_bytes:
                each = [row.numel() for row in rows]
                self._all_to_all([[row] for row in rows], out.view(-1), each)
                return
            out[self.rank].copy_(rows[self.rank])
            others = [rank for rank in range(self.size) if rank != self.rank]
            sends = [(rank, rows[rank]) for rank in others]
            self._messages.start(ROWS, sends, [(rank, out[rank]) for rank in others]).wait()

    def name_ranks(self, names: Sequence[int]) -> None:
        """Call the ranks so in errors; by default by their numbers in the group."""
        self._messages.names = names

    def disconnect(self) -> None:
        """Let the calls under way fail over Gloo, here and on the peers."""
        self._messages.disconnect()

    def stats(self) -> dict[str, int]:
        """What `ordered.stats` says."""
        return {
            "calls": self.calls,
            "sent_messages": self._messages.sent_messages,
            "sent_bytes": self._messages.sent_bytes,
            # A list, for a call may run meanwhile.
            "buffer_bytes": sum(each.numel() for each in list(self._memory.values())),
        }

    @contextlib.contextmanager
    def _alone(self, kind: str) -> Iterator[None]:
        """Let no other call run meanwhile, and none after a failure."""
        self.worker.refuse_in_a_fork()
        with self._one_at_a_time:
            if self.failure is not None:
                raise type(self.failure)(str(self.failure), self.rank, kind, self.calls + 1)
            try:
                yield
            except BaseException as error:
                # Not the one that is raised, whose traceback keeps tensors and the group.
                self.failure = self._described(error, kind)
                if not isinstance(error, CollectiveMismatch):  # which all ranks see
                    self._messages.disconnect()
                if isinstance(error, RuntimeError):
                    raise self._described(error, kind) from error
                raise

    def _described(self, error: BaseException, kind: str) -> CollectiveError:
        how = type(error) if isinstance(error, CollectiveError) else CollectiveError
        if not isinstance(error, Exception):
            how = CollectiveAborted  # Ctrl-C, in the middle of a call
        said = str(error) or type(error).__name__
        return how(f"{kind} number {self.calls}: {said}", self.rank, kind, self.calls)

    # --- A call.

    def _run(self, call: Call) -> None:
        layout = self._learn_layout()
        self._look_at_headers()
        self.calls += 1
        if self.size == 1:
            self._reduce(call, [call.leaves], call.results, [(0, 1)], finish=True)
            return
        narrow = call.leaves.to(call.narrow) if call.narrow is not None else None
        fits = narrow is not None and _equal(narrow, call.leaves)
        mine = Header(
            self.calls,
            call.kind,
            name_of(call.leaves.dtype),
            call.op,
            call.leaves.numel(),
            name_of(call.narrow) if call.narrow is not None else "",
            fits,
        )
        small = call.leaves.nbytes <= header.ROOM or call.leaves.nbytes * self.size <= _SMALL
        eager = self._eager(call, layout, small)
        headers, received = self._exchange_headers(mine, eager)
        differs: torch.Tensor | None = None
        if self.streams is None or narrow is not None:
            if header.compare(headers.cpu().numpy(), self.rank) and narrow is not None:
                call = Call(call.kind, call.op, narrow, call.results)
        else:
            differs = self._look_later(headers)
        if small:
            if not received:
                received = list(self._flat("gathered", call.leaves.dtype, self.size, mine.count))
                received[self.rank].copy_(call.leaves)
                self._all_gather(LEAVES, received)
            self._reduce_all_here(call, received)
        else:
            for shards in self._cut(call, layout):
                self._reduce_piece(call, layout, shards, received)
        if differs is not None and call.results.dtype.is_floating_point:
            _poison(call.results, differs)

    def _cut(self, call: Call, layout: Layout) -> Iterator[list[Shard]]:
        """The shards of each piece."""
        elements = max(1, self.piece // call.leaves.itemsize)
        if call.kind == "all_reduce":
            for begin in range(0, call.leaves.numel(), elements):
                yield layout.shards_of(begin, min(begin + elements, call.leaves.numel()))
            return
        each = call.results.numel()
        part = max(1, elements // self.size)
        for begin in range(0, each, part):
            yield layout.shards_for_ranks(each, begin, min(begin + part, each))

    def _eager(self, call: Call, layout: Layout, small: bool) -> list[torch.Tensor]:
        """What goes to each rank, this one too, with the header: leaves that it reduces, or none.

        Args:
            call: of which.
            layout: of the group.
            small: whether every rank gets all.
        """
        most = self._messages.eager_bytes_per_rank
        if small:
            return [call.leaves] * self.size if call.leaves.nbytes <= most else []
        fits = call.leaves.nbytes <= self._messages.eager_bytes and layout.apart
        if not fits or call.narrow is not None:  # whether they may travel so is not known yet
            return []
        first, *more = self._cut(call, layout)
        if more or max(each.size for each in first) * call.leaves.itemsize > most:
            return []
        return [call.leaves[each.begin : each.end] for each in first]

    def _reduce_piece(
        self,
        call: Call,
        layout: Layout,
        shards: Sequence[Shard],
        received: Sequence[torch.Tensor],
    ) -> None:
        """Reduce a piece.

        Args:
            call: of which.
            layout: of the group.
            shards: of the piece.
            received: of every rank the leaves that this rank reduces, if they came with headers.
        """
        rail = [each for each in shards if each.rail == layout.index]
        mine = [each for each in rail if each.host == layout.host]
        nodes = sorted((node, h) for h, those in enumerate(layout.nodes) for node in those)
        dtype = call.leaves.dtype
        if layout.apart:
            terms = [[call.leaves[each.begin : each.end]] for each in rail]
        else:
            rows = self._buffer("rows", dtype, len(layout.local), rail)
            within = _leaves_within_host(call.leaves, layout, shards, rows)
            self._messages.start(LEAVES, *within).wait()
            terms = self._host_sums(call, layout, rail, rows)
            dtype = reduction.node_dtype(dtype, call.op)
        if not received:
            # Between hosts in the memory of the host's leaves, which are added up by now.
            received = list(self._buffer("rows", dtype, len(nodes), mine))
            between = _terms_between_hosts(layout, rail, terms, nodes, received, offsets(mine))
            self._messages.start(LEAVES, *between).wait()

        results = [self._result_of(call, each) for each in mine]
        for shard, result, at in zip(mine, results, offsets(mine), strict=False):
            own = iter(terms[rail.index(shard)])
            operands = [
                self._own(next(own), row[at : at + shard.size])
                if h == layout.host
                else row[at : at + shard.size]
                for row, (_, h) in zip(received, nodes, strict=True)
            ]
            self._reduce(call, operands, result, [node for node, _ in nodes], finish=True)
        if call.kind == "reduce_scatter":
            kept = list(zip(mine, results, strict=True))
            self._messages.start(RESULTS, *_forwarded(call.results, layout, shards, kept)).wait()
            return
        if layout.apart and call.results.nbytes <= self._messages.eager_bytes:
            self._all_gather_results(call.results, shards)
            return
        between = _results_between_hosts(call.results, layout, rail)
        self._messages.start(RESULTS, *between).wait()
        within = _results_within_host(call.results, layout, shards)
        self._messages.start(RESULTS, *within).wait()

    def _host_sums(
        self,
        call: Call,
        layout: Layout,
        rail: Sequence[Shard],
        rows: torch.Tensor,
    ) -> list[list[torch.Tensor]]:
        """For each shard of the rail what this host has of the order, added up."""
        nodes = layout.nodes[layout.host]
        dtype = reduction.node_dtype(call.leaves.dtype, call.op)
        sums = self._buffer("sums", dtype, len(nodes), rail)
        found = []
        for shard, at in zip(rail, offsets(rail), strict=False):
            leaves = {
                rank: self._own(call.leaves[shard.begin : shard.end], row[at : at + shard.size])
                if rank == self.rank
                else row[at : at + shard.size]
                for rank, row in zip(layout.local, rows, strict=True)
            }
            found.append([each[at : at + shard.size] for each in sums])
            for node, out in zip(nodes, found[-1], strict=True):
                ranks = range(*node)
                terms = [leaves[rank] for rank in ranks]
                self._reduce(call, terms, out, [(r, r + 1) for r in ranks], finish=False)
        return found

    def _result_of(self, call: Call, shard: Shard) -> torch.Tensor:
        """Where a shard's result goes that this rank makes."""
        if shard.rank is None or shard.rank == self.rank:
            return call.results[shard.at : shard.at + shard.size]
        return self._buffer(f"forward {shard.rank}", call.results.dtype, 1, [shard])[0]

    # --- Parts of calls.

    def _reduce_all_here(self, call: Call, leaves: Iterable[torch.Tensor]) -> None:
        """Reduce what this rank keeps, from every rank's whole input."""
        each = call.results.numel()
        begin = self.rank * each if call.kind == "reduce_scatter" else 0
        nodes = [(rank, rank + 1) for rank in range(self.size)]
        terms = [leaf[begin : begin + each] for leaf in leaves]
        self._reduce(call, terms, call.results, nodes, finish=True)

    def _all_gather(self, tag: int, rows: Sequence[torch.Tensor]) -> None:
        """Send this rank's row to all others, and have theirs."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(rank, rows[self.rank]) for rank in others]
        self._messages.start(tag, sends, [(rank, rows[rank]) for rank in others]).wait()

    def _reduce(
        self,
        call: Call,
        terms: Sequence[torch.Tensor],
        out: torch.Tensor,
        nodes: Sequence[Node],
        finish: bool,
    ) -> None:
        if out.numel():
            root = nodes[0][0], nodes[-1][1]
            steps = recipe(root, nodes)
            reduction.reduce(terms, out, call.op, steps, self.size, call.leaves.dtype, finish)

    def _own(self, term: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """A term of this rank's own: on a device in its row among the others."""
        if self.streams is None:
            return term
        return row.copy_(term)

    def _exchange_headers(
        self, mine: Header, eager: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tell all ranks what is called here, and data with that.

        Args:
            mine: the header.
            eager: data for each rank, this one too, of at most the messages' eager bytes a rank; or
                nothing.

        Returns:
            Every rank's header, as rows; and what each has sent to this rank, if ranks agree.
        """
        written = np.empty(header.BYTES, np.uint8)
        mine.write(written)
        head = torch.from_numpy(written).to(self.device, non_blocking=True)
        data = [each.view(torch.uint8) for each in eager]
        row_bytes = header.BYTES + self._messages.eager_bytes_per_rank
        if self._messages.eager_bytes:
            memory = self._flat("headers", torch.uint8, self.size - 1, row_bytes)
            memory[:, : header.BYTES] = 0  # of the call before
            rows = list(memory)
            rows.insert(self.rank, head)
            each = [[head, *data[rank : rank + 1]] for rank in range(self.size)]
            each[self.rank] = []
            room = [row_bytes if parts else 0 for parts in each]

            def silent() -> list[int]:
                return [rank for rank, row in enumerate(rows) if not row[: header.BYTES].any()]

            self._all_to_all(each, memory.view(-1), room, silent)
        else:
            rows = list(self._flat("headers", torch.uint8, self.size, row_bytes))
            rows[self.rank][: header.BYTES] = head
            if data:  # the same for all
                rows[self.rank][header.BYTES :][: data[0].numel()] = data[0]
            self._all_gather(HEADERS, rows)
        headers = torch.stack([row[: header.BYTES] for row in rows])
        if not eager:
            return headers, []
        own = eager[self.rank]
        received = [row[header.BYTES :][: own.nbytes].view(own.dtype) for row in rows]
        if self.streams is None:
            received[self.rank] = own
        return headers, received

    def _all_gather_results(self, results: torch.Tensor, shards: Sequence[Shard]) -> None:
        """Bring every rank's shard of a piece's results to all ranks, at once."""
        begin, end = shards[0].at, shards[-1].at + shards[-1].size
        mine = shards[self.rank]
        own = results[mine.at : mine.at + mine.size].view(torch.uint8)
        each = [[own]] * self.size
        # At an end it need not travel to this rank itself.
        if self.rank == 0:
            begin, each[0] = mine.at + mine.size, []
        elif self.rank == self.size - 1:
            end, each[-1] = mine.at, []
        received = [shard.size * results.itemsize for shard in shards]
        if not each[self.rank]:
            received[self.rank] = 0
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
            data = self._flat("staged", torch.uint8, 1, sum(sent))[0]
            torch.cat(parts, out=data)
        self._messages.all_to_all(data, sent, out, received, silent)

    def _look_later(self, headers: torch.Tensor) -> torch.Tensor:
        """Compare headers on the device, and let the next call look at them.

        Returns:
            Whether they differ, on the device.
        """
        assert self.streams is not None
        there = headers.to("cpu", non_blocking=True, copy=True)
        self._unread.append((self.streams.event(), there))
        return (headers != headers[self.rank]).any()

    def _look_at_headers(self) -> None:
        """Raise if a call before this one met others; never waits for the device."""
        while self._unread and self._unread[0][0].query():
            _, headers = self._unread.popleft()
            header.compare(headers.numpy(), self.rank, "Results that are floats are NaN")

    def _learn_layout(self) -> Layout:
        if self._layout is None:
            self.calls += 1
            self._messages.connect()
            name = _host_name(self._ranks[self.rank])
            mine = Header(self.calls, "prepare")
            headers, names = self._exchange_headers(mine, [name.to(self.device)] * self.size)
            header.compare(headers.cpu().numpy(), self.rank)
            # Of what all have been told alone, so that all have the same layout.
            host_of = number_hosts([each.cpu().numpy().tobytes() for each in names])
            self._layout = layout_of(self.rank, host_of)
        return self._layout

    # --- Buffers, kept from call to call.

    def _buffer(
        self, name: str, dtype: torch.dtype, rows: int, shards: Sequence[Shard]
    ) -> torch.Tensor:
        """Rows that hold these shards, one behind the other."""
        return self._flat(name, dtype, rows, offsets(shards)[-1])

    def _flat(self, name: str, dtype: torch.dtype, rows: int, elements: int) -> torch.Tensor:
        stride = -(-elements * dtype.itemsize // _ALIGNED) * _ALIGNED
        held = self._memory.get(name)
        if held is None or held.numel() < rows * stride:
            held = torch.empty(rows * stride, dtype=torch.uint8, device=self.device)
            self._memory[name] = held
        whole = held[: rows * stride].view(dtype)
        return whole.view(rows, stride // dtype.itemsize)[:, :elements]


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


def _poison(results: torch.Tensor, differs: torch.Tensor) -> None:
    """Make floats NaN where `differs` is true, which is one truth for all of them."""
    if results.itemsize == 1:  # torch fills no floats of a byte
        results.view(torch.uint8).masked_fill_(differs, 0x7F)
    else:
        results.masked_fill_(differs, torch.nan)


def _equal(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether a narrow type has all of these values, bit for bit. Waits for a device."""
    words = {4: torch.int32, 8: torch.int64}[wide.itemsize]
    return torch.equal(narrow.to(wide.dtype).view(words), wide.view(words))


def _host_name(rank: int) -> torch.Tensor:
    """The host of this rank of the default group, real or simulated, as all ranks are told."""
    name = np.zeros(header.ROOM, np.uint8)
    simulated = simulated_hosts(dist.get_world_size())
    said = str(simulated[rank] if simulated else host_identity()).encode()[: name.size]
    name[: len(said)] = np.frombuffer(said, np.uint8)
    return torch.from_numpy(name)
