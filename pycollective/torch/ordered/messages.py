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
    """Sends and receives of one group on one device.

    Between two ranks messages of a tag keep their order, so each rank starts its own in one order.
    They do not count as the group's collectives. Over Gloo a program may call those meanwhile, from
    any thread; NCCL has no tags, and wants one order on all ranks. The group is held weakly.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self._batched = device.type != "cpu"
        self.sent_messages = self.sent_bytes = 0
        # Those that have failed, too. Gloo's thread spins if messages come for receives that were
        # dropped, and the group's other messages behind them wait.
        self._under_way: list[Exchange] = []

    def start(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Start messages, all at once; empty ones do not travel."""
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        here = [(peer, each.view(torch.uint8)) for peer, each in sends if each.numel()]
        there = [(peer, each.view(torch.uint8)) for peer, each in receives if each.numel()]
        self.sent_messages += len(here)
        self.sent_bytes += sum([each.numel() for _, each in here])
        exchange = Exchange(self._under_way, here + there)
        works = exchange.works
        try:
            if not self._batched:
                # Sends first: a send that finds its receive is written by this thread, which then
                # holds what Gloo's own thread needs, and spins for.
                for peer, each in here:
                    works.append(group.send([each], peer, tag))
                for peer, each in there:
                    works.append(group.recv([each], peer, tag))
            elif here or there:
                # As one group of NCCL's, where one message alone could wait for another's kernel.
                works += dist.batch_isend_irecv(
                    [
                        dist.P2POp(call, each, group=group, tag=tag, group_peer=peer)
                        for call, messages in ((dist.isend, here), (dist.irecv, there))
                        for peer, each in messages
                    ]
                )
        except RuntimeError as error:
            failed = (here + there)[len(works) :]
            raise failure(
                error, [peer for peer, _ in failed[: None if self._batched else 1]]
            ) from error
        return exchange


class Exchange:
    """Messages under way, with the memory that they use.

    Attributes:
        works: the backend's.
    """

    def __init__(self, under_way: list[Exchange], messages: Sequence[Message]) -> None:
        self.works: list[Any] = []
        self._messages = messages
        self._under_way = under_way
        under_way.append(self)

    def wait(self) -> None:
        """Wait until all have ended; on a device its current stream waits, and the host does not.

        Raises:
            CollectiveError: one has failed; names the peer and what the backend says.
        """
        each_its_own = len(self.works) == len(self._messages)
        for number, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                those = self._messages[number : number + 1] if each_its_own else self._messages
                raise failure(error, [peer for peer, _ in those]) from error
        self._under_way.remove(self)


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
