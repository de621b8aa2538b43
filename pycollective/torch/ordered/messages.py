"""Messages between the ranks of a process group, by its own sends and receives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveError, CollectiveTimeout, PeerFailure

# Ours alone: other messages between the same ranks do not mix with them. MPI has tags up to 32767.
HEADERS, LEAVES, RESULTS = range(29811, 29814)

Message = tuple[int, torch.Tensor]  # the other rank, in the group; flat, contiguous


class Messages:
    """Sends and receives of one group on one kind of device.

    Between two ranks messages of a tag keep their order, so each rank starts its own in one order.
    They do not count as the group's collectives: a program may call those meanwhile, from any
    thread. The group is held weakly, but by messages under way.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self._batched = device.type != "cpu"
        self.sent_messages = self.sent_bytes = 0

    def receive(self, tag: int, messages: Sequence[Message]) -> Exchange:
        """Begin an exchange with what comes in; empty messages do not travel.

        On CPUs receives start at once: what is sent later finds them, and waits for no answer. On
        devices they start with the sends, as one group of NCCL's, where one message alone could
        wait for another's kernel.
        """
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        receives = [(peer, each.view(torch.uint8)) for peer, each in messages if each.numel()]
        exchange = Exchange(self, group, tag, receives)
        if not self._batched:
            for peer, each in receives:
                try:
                    exchange.start([group.recv([each], peer, tag)])
                except RuntimeError as error:
                    raise failure(error, [peer]) from error
        return exchange

    def send(self, exchange: Exchange, messages: Sequence[Message]) -> None:
        """Start what goes out, for `Exchange.send`."""
        group, tag = exchange.group, exchange.tag
        self.sent_messages += len(messages)
        self.sent_bytes += sum(each.numel() for _, each in messages)
        if not self._batched:
            exchange.start([group.send([each], peer, tag) for peer, each in messages])
        elif exchange.receives or messages:
            exchange.start(
                dist.batch_isend_irecv(
                    [
                        dist.P2POp(call, each, group=group, tag=tag, group_peer=peer)
                        for call, those in (
                            (dist.irecv, exchange.receives),
                            (dist.isend, messages),
                        )
                        for peer, each in those
                    ]
                )
            )


class Exchange:
    """Messages under way of one tag, with the memory that they use."""

    def __init__(
        self, messages: Messages, group: dist.ProcessGroup, tag: int, receives: list[Message]
    ) -> None:
        self.group, self.tag, self.receives = group, tag, receives
        self._messages = messages
        self._sends: list[Message] = []
        self._works: list[Any] = []

    def start(self, works: Sequence[Any]) -> None:
        """Add works of the backend's."""
        self._works += works

    def send(self, messages: Sequence[Message]) -> Exchange:
        """Start what goes out; once."""
        self._sends = [(r, x.view(torch.uint8)) for r, x in messages if x.numel()]
        try:
            self._messages.send(self, self._sends)
        except RuntimeError as error:
            raise failure(error, self._peers) from error
        return self

    def wait(self) -> None:
        """Wait until all have ended; on a device its current stream waits, and the host does not.

        Raises:
            CollectiveError: one has failed; names the peer and what the backend says.
        """
        peers = self._peers
        each_its_own = len(self._works) == len(peers)
        for number, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                raise failure(error, [peers[number]] if each_its_own else peers) from error

    @property
    def _peers(self) -> list[int]:
        return [peer for peer, _ in (*self.receives, *self._sends)]


def failure(error: RuntimeError, peers: Sequence[int]) -> CollectiveError:
    """What a backend's error means; those of pycollective are what they are."""
    if isinstance(error, CollectiveError):
        return error
    said = str(error).strip().partition("\nException raised from")[0]
    kind = CollectiveError
    if "timed out" in said.lower():
        kind = CollectiveTimeout
    elif any(each in said.lower() for each in ("closed by peer", "reset by peer", "broken pipe")):
        kind = PeerFailure
    with_whom = ", ".join(map(str, sorted(set(peers))))
    return kind(f"a message from or to rank(s) {with_whom} failed: {said}")
