"""Messages between the ranks of a process group, on CPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveError, CollectiveTimeout, PeerFailure
from pycollective.torch.ordered import header
from pycollective.torch.serving import backend_of, is_gloo, store_of

# Ours alone: other messages between the same ranks do not mix with them. MPI has tags up to 32767.
HEADERS, LEAVES, RESULTS, PROBES, ROWS, ENDS, ANSWERS = range(29811, 29818)

# Over Gloo inputs of up to so many bytes travel with the headers, and results of as many are one
# exchange. Beyond, copies of data would cost more than messages do.
EAGER_BYTES = 4 << 20

# Gloo signals a death to receives whose message has not begun to come. It never does so to a
# message that is half through. Up to so many bytes to or from a rank a socket takes as a whole.
_UNGUARDED_BYTES = 64 << 10
_NO_WAIT = timedelta(milliseconds=1)

Message = tuple[int, torch.Tensor]  # the other rank, in the group; flat, contiguous

_CPU = torch.device("cpu")


class Messages:
    """Messages of one group between CPUs.

    Between two ranks messages of a tag keep their order, so each rank starts its own in one order.
    They do not count as the group's collectives. Over Gloo they go over connections of our own, so
    a program may use the group meanwhile, from any thread. The group is held weakly.

    Args:
        group: of torch's.
        name: of the part of its store by which connections are made; each is for one.
    """

    def __init__(self, group: dist.ProcessGroup, name: str = "pycollective.torch.ordered") -> None:
        self._group = weakref.ref(group)
        self._name = name
        self._rank, self._size = group.rank(), group.size()
        self.names: Sequence[int] = range(self._size)  # of the ranks, in errors
        self._own: Any = None  # a backend of ours, over Gloo
        self._closed = False
        self._scrap = torch.empty(1, dtype=torch.uint8)  # for receives that nobody waits for
        self.issued = self.sent_messages = self.sent_bytes = 0
        # Those that have failed, too. Gloo's thread spins if messages come for receives that were
        # dropped, and the group's other messages behind them wait.
        self._under_way: list[Exchange] = []
        # Keeps the last answer to each rank alive until that rank has received it.
        self._answers: dict[int, Any] = {}

    def connect(self) -> None:
        """Make connections of our own between a Gloo group's ranks; collective over the group.

        Gloo numbers a group's collectives when they are issued, so ours would mix with the
        program's. Nothing happens over other backends. Waits as long as the group does, and up to
        30 s more.

        Raises:
            CollectiveError: they cannot be made.
        """
        group = self._alive()
        if self._size == 1 or self._own is not None:
            return
        if not is_gloo(group):
            return
        try:
            store = store_of(group, self._name)
            timeout = backend_of(group, _CPU).options._timeout
            self._own = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        except RuntimeError as error:
            timed_out = any(each in str(error).lower() for each in ("timeout", "timed out"))
            raise (CollectiveTimeout if timed_out else CollectiveError)(
                "the group's ranks cannot connect by way of its store; all must make the group's "
                f"first ordered call: {_said(error)}"
            ) from error

    @property
    def eager_bytes(self) -> int:
        """The largest input whose leaves may travel with the headers; 0 without `all_to_all`."""
        return EAGER_BYTES if self._own is not None else 0

    @property
    def eager_bytes_per_rank(self) -> int:
        """Bytes of data for each rank that may travel with a header; a multiple of 64."""
        return max(header.ROOM, -(-self.eager_bytes // self._size // 64) * 64)

    def start(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Start messages, all at once; empty ones do not travel."""
        group = self._alive()
        here = [(peer, each.view(torch.uint8)) for peer, each in sends if each.numel()]
        there = [(peer, each.view(torch.uint8)) for peer, each in receives if each.numel()]
        self._count(each.numel() for _, each in here)
        exchange = Exchange(self._under_way, here + there, self.failure)
        works = exchange.works
        peer = -1
        try:
            # Sends first: a send that finds its receive is written by this thread, which then
            # holds what Gloo's own thread needs, and spins for.
            by = group if self._own is None else self._own
            for peer, each in here:
                works.append(by.send([each], peer, tag))
            for peer, each in there:
                works.append(by.recv([each], peer, tag))
            if self._own is not None:
                for peer in _long(here) | _long(there):
                    exchange.guards[peer] = Guard(self._own, peer, self._answers)
        except RuntimeError as error:
            raise self.failure(error, [peer]) from error
        return exchange

    def all_to_all(
        self,
        data: torch.Tensor,
        sent: Sequence[int],
        out: torch.Tensor,
        received: Sequence[int],
        silent: Callable[[], Sequence[int]] = list,
    ) -> None:
        """Exchange with all ranks at once, and wait; where `eager_bytes` is not 0.

        Args:
            data: bytes for each rank, in rank order. As long as `out` has for it, or shorter.
            sent: how many for each.
            out: where theirs go.
            received: room for each.
            silent: says, if this has failed, which ranks have sent nothing.

        Raises:
            CollectiveError: it has failed; names the ranks whose connections are broken, or that
                were silent, or all.
        """
        self._alive()
        self._count(each for rank, each in enumerate(sent) if each and rank != self._rank)
        try:
            # By Gloo's own threads: this one would hold what they spin for.
            self._own.alltoall_base(out, data, list(received), list(sent)).wait()
        except RuntimeError as error:
            raise self.failure(error, self._unreachable() or silent() or self._others()) from error

    def _unreachable(self) -> list[int]:
        """The ranks to which nothing goes any more; none if that is all, as after a timeout.

        For a group that has failed: what this starts is never waited for.
        """
        found = []
        for rank in self._others():
            try:
                self._own.recv([self._scrap], rank, PROBES)
            except RuntimeError:
                found.append(rank)
        return found if len(found) < len(self._others()) else []

    def disconnect(self) -> None:
        """Close connections of our own, if there are any: who waits here or at a peer fails."""
        if self._own is not None:
            # What waits in vain makes Gloo close all of them; there is no other way.
            with contextlib.suppress(RuntimeError):
                receive = self._own.recv([self._scrap], self._others()[0], PROBES)
                receive.wait(_NO_WAIT)

    def close(self) -> None:
        """Let go of connections of our own, and of what is under way."""
        self._own, self._closed = None, True
        self._under_way.clear()
        self._answers.clear()

    def abort(self, reason: str) -> None:
        """Let what is under way fail."""
        self.disconnect()
        if self._own is None and not self._closed and (group := self._group()) is not None:
            (backend_of(group, _CPU) or group).abort()

    def failure(self, error: RuntimeError, peers: Iterable[int]) -> CollectiveError:
        """`failure`, of ranks by their names."""
        return failure(error, [self.names[peer] for peer in peers])

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        if self._closed:  # or what is still under way would go over the program's own connections
            raise CollectiveError("the connections were closed")
        return group

    def _count(self, messages: Iterable[int]) -> None:
        for each in messages:
            self.sent_messages += 1
            self.sent_bytes += each


class Guard:
    """Notices that a peer dies in the middle of a large message.

    Each side sends an empty message (ENDS) behind its data. When the peer's has come, its data have
    come too. Then this rank receives the peer's empty ANSWERS, which says that ours have arrived.
    Both are receives that have not begun, so Gloo fails them if the peer dies.

    Args:
        own: the backend.
        peer: the rank.
        answers: where the answer is kept that the peer may ask for later.
    """

    def __init__(self, own: Any, peer: int, answers: dict[int, Any]) -> None:
        self._own, self._peer, self._answers = own, peer, answers
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._come = own.recv([self._nothing], peer, ENDS)
        self._answer = own.send([self._nothing], peer, ANSWERS)
        self._end = own.send([self._nothing], peer, ENDS)
        self._asked: Any = None
        self._gone: RuntimeError | None = None

    def receive(self) -> None:
        """Wait until what the rank sends is here, and ask it whether it has all."""
        self._come.wait()
        self._answers[self._peer] = self._answer  # the one before was asked for before this end
        try:
            self._asked = self._own.recv([self._nothing], self._peer, ANSWERS)
        except RuntimeError as error:
            self._gone = error

    def wait(self) -> RuntimeError | None:
        """Wait until what was sent has arrived, behind `receive`; the error, if it may not have."""
        try:
            if self._gone is None:
                self._asked.wait()
        except RuntimeError as error:
            self._gone = error
        return self._gone  # the rank has died, or has ended with all that it wanted


class Exchange:
    """Messages under way, with the memory that they use.

    Attributes:
        works: the backend's.
        guards: of the ranks with which large messages are exchanged.
    """

    def __init__(
        self,
        under_way: list[Exchange],
        messages: Sequence[Message],
        failure: Callable[[RuntimeError, Iterable[int]], CollectiveError],
    ) -> None:
        self._failure = failure
        self.works: list[Any] = []
        self.guards: dict[int, Guard] = {}
        self._messages = messages
        self._under_way = under_way
        under_way.append(self)

    def wait(self) -> None:
        """Wait until all have ended.

        Raises:
            CollectiveError: one has failed; names the peer and what the backend says.
        """
        peers = [peer for peer, _ in self._messages]
        those: Sequence[int] = peers
        gone: dict[int, RuntimeError] = {}
        try:
            for peer, guard in self.guards.items():
                those = [peer]
                guard.receive()
            for peer, guard in self.guards.items():
                if (error := guard.wait()) is not None:
                    gone[peer] = error
            for number, work in enumerate(self.works):
                those = peers[number : number + 1]
                if those[0] not in gone:
                    work.wait()
                    continue
                try:
                    work.wait(_NO_WAIT)
                except RuntimeError:
                    raise gone[those[0]] from None
        except RuntimeError as error:
            raise self._failure(error, those) from error
        self._under_way.remove(self)


def _long(messages: Sequence[Message]) -> set[int]:
    """The ranks with which these exchange so much that a message may be half through."""
    bytes_of: Counter[int] = Counter()
    for peer, each in messages:
        bytes_of[peer] += each.numel()
    return {peer for peer, count in bytes_of.items() if count > _UNGUARDED_BYTES}


def failure(error: RuntimeError, peers: Sequence[int]) -> CollectiveError:
    """What a backend's error means; those of pycollective are what they are."""
    if isinstance(error, CollectiveError):
        return error
    said = _said(error)
    kind = CollectiveError
    if "timed out" in said.lower():
        kind = CollectiveTimeout
    elif any(each in said.lower() for each in ("closed by peer", "reset by peer", "broken pipe")):
        kind = PeerFailure
    with_whom = ", ".join(map(str, sorted(set(peers))))
    what = f"a message from or to rank(s) {with_whom}" if peers else "an exchange"
    return kind(f"{what} failed: {said}")


def _said(error: RuntimeError) -> str:
    return str(error).strip().partition("\nException raised from")[0]
