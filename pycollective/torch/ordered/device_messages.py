"""Exchanges of a process group on a device: the backend's own, on the current stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from pycollective.errors import CollectiveError
from pycollective.torch.ordered.messages import Message, failure
from pycollective.torch.serving import backend_of, timeout_of

# Sends and receives in one group of NCCL's: more than 256 can hang it (pytorch#174288).
MOST_IN_A_GROUP = 128


class DeviceMessages:
    """Exchanges between the ranks of one group, behind the current stream's work.

    The host waits for none of them. They count as collectives of the group: all ranks issue what
    goes over it in the same order. The group is held weakly.

    Attributes:
        rank, size: of this one and of the group.
        names: of the ranks, in errors.
        most: the messages that one rank sends another in one `start`, at most, as all ranks know.
        issued: how many exchanges were issued, ever.
        sent_messages, sent_bytes: to other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = weakref.ref(group), device
        self._backend = backend_of(group, device)  # none: the group is one itself, in Python
        self.rank, self.size = group.rank(), group.size()
        self.names: Sequence[int] = range(self.size)
        self.most = 1
        self.issued = self.sent_messages = self.sent_bytes = 0
        self._to_all, self._from_all = AllToAllOptions(), AllgatherOptions()
        self._to_all.asyncOp = self._from_all.asyncOp = False

    @property
    def timeout(self) -> float:
        """How long ranks wait for each other: seconds."""
        return timeout_of(self._alive(), self._device)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor) -> None:
        """Send each rank its row of bytes, and have theirs; both ``(ranks, bytes)``."""
        self._count(data.numel() // self.size)
        self._make(lambda backend: backend.alltoall_base(out, data, [], [], self._to_all))

    def all_gather(self, out: torch.Tensor, row: torch.Tensor) -> None:
        """Send these bytes to all, and have theirs in `out`, of which they may be a part."""
        self._count(row.numel())
        self._make(lambda backend: backend._allgather_base(out, row, self._from_all))

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make bytes those of rank 0."""
        options = BroadcastOptions()
        options.asyncOp = False
        self._count(flat.numel() if self.rank == 0 else 0)
        self._make(lambda backend: backend.broadcast([flat], options))

    def start(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Start messages; empty ones do not travel.

        They go in groups of at most `MOST_IN_A_GROUP`. What one rank sends in a group another
        receives in the same one, or groups could wait for each other.
        """
        # A message's group follows from its way round the ranks and its number between the two.
        together = min(self.most, MOST_IN_A_GROUP // 2)
        ways = MOST_IN_A_GROUP // 2 // together
        groups: dict[tuple[int, int], list[tuple[str, int, torch.Tensor]]] = {}
        for kind, messages, sign in (("send", sends, 1), ("recv", receives, -1)):
            numbers: dict[int, int] = {}
            for peer, each in messages:
                number = numbers[peer] = numbers.get(peer, -1) + 1
                way = sign * (peer - self.rank) % self.size
                if each.numel():
                    key = way // ways, number // together
                    groups.setdefault(key, []).append((kind, peer, each.view(torch.uint8)))
        works = []
        for _, those in sorted(groups.items(), key=lambda each: each[0]):
            works += self._exchange(tag, those)
        return Exchange(works, self.failure)

    def _exchange(self, tag: int, messages: Sequence[tuple[str, int, torch.Tensor]]) -> list[Any]:
        """Start messages as one group of the backend's, where it has such."""

        def issue(backend: Any) -> list[Any]:
            grouped = getattr(backend, "supports_coalescing", False)
            if grouped:
                backend._start_coalescing()
            works = [getattr(backend, kind)([each], peer, tag) for kind, peer, each in messages]
            return [backend._end_coalescing()] if grouped else works

        for kind, _, each in messages:
            if kind == "send":
                self.sent_messages += 1
                self.sent_bytes += each.numel()
        works: list[Any] = self._issue(issue)
        return works

    def abort(self, reason: str) -> None:
        """Let what is under way fail."""
        if (group := self._group()) is not None:
            self._serving(group).abort()

    def failure(self, error: RuntimeError, peers: Iterable[int] = ()) -> CollectiveError:
        """What a backend's error means."""
        return failure(error, [self.names[peer] for peer in peers])

    def _make(self, exchange: Callable[[Any], Any]) -> None:
        """Make an exchange; the current stream waits for it."""
        work = self._issue(exchange)
        if work is not None:  # else the backend has done so
            Exchange([work], self.failure).wait()

    def _issue(self, exchange: Callable[[Any], Any]) -> Any:
        group = self._alive()
        try:
            made = exchange(self._serving(group))
        except RuntimeError as error:
            raise self.failure(error) from error
        self.issued += 1
        return made

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        return group

    def _serving(self, group: dist.ProcessGroup) -> Any:
        return self._backend if self._backend is not None else group

    def _count(self, nbytes: int) -> None:
        self.sent_messages += self.size - 1
        self.sent_bytes += (self.size - 1) * nbytes


class Exchange:
    """Messages under way."""

    def __init__(
        self, works: Sequence[Any], failure: Callable[[RuntimeError], CollectiveError]
    ) -> None:
        self._works, self._failure = works, failure

    def wait(self) -> None:
        """Let the current stream wait until all have ended; on a CPU, the host."""
        try:
            for each in self._works:
                each.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
