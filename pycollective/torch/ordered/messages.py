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

    def start(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Start messages, all at once; empty ones do not travel."""
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        here = [(peer, each.view(torch.uint8)) for peer, each in sends if each.numel()]
        there = [(peer, each.view(torch.uint8)) for peer, each in receives if each.numel()]
        self.sent_messages += len(here)
        self.sent_bytes += sum([each.numel() for _, each in here])
        works: list[Any] = []
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
                works = dist.batch_isend_irecv(
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
        return Exchange(group, works, here + there)


class Exchange:
    """Messages under way, with the memory that they use."""

    def __init__(
        self, group: dist.ProcessGroup, works: Sequence[Any], messages: Sequence[Message]
    ) -> None:
        self._group, self._works, self._messages = group, works, messages

    def wait(self) -> None:
        """Wait until all have ended; on a device its current stream waits, and the host does not.

        Raises:
            CollectiveError: one has failed; names the peer and what the backend says.
        """
        each_its_own = len(self._works) == len(self._messages)
        for number, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                those = self._messages[number : number + 1] if each_its_own else self._messages
                raise failure(error, [peer for peer, _ in those]) from error


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
