"""Messages between the ranks of a process group, by its own sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveError, CollectiveTimeout, PeerFailure

# Ours alone: other messages between the same ranks do not mix with them. MPI has tags up to 32767.
TAG = 29811

Message = tuple[int, torch.Tensor]  # the other rank, in the group; flat, contiguous


class Messages:
    """Sends and receives of one group on one kind of device.

    Between two ranks messages keep their order, so each rank starts its own in one order. They do
    not count as the group's collectives: a program may call those meanwhile, from any thread.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._batched = device.type != "cpu"
        self.sent_messages = self.sent_bytes = 0

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> Exchange:
        """Start messages, all at once; empty ones do not travel."""
        there = [(peer, each.view(torch.uint8)) for peer, each in receives if each.numel()]
        here = [(peer, each.view(torch.uint8)) for peer, each in sends if each.numel()]
        self.sent_messages += len(here)
        self.sent_bytes += sum(each.numel() for _, each in here)
        peers = [peer for peer, _ in (*there, *here)]
        try:
            works = self._batch(there, here) if self._batched else self._each(there, here)
        except RuntimeError as error:
            raise failure(error, peers) from error
        return Exchange(works, peers, (there, here))

    def _each(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        return [
            *(self._group.recv([each], peer, TAG) for peer, each in receives),
            *(self._group.send([each], peer, TAG) for peer, each in sends),
        ]

    def _batch(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        """As one group of NCCL's, where one message alone could wait for another's kernel."""
        if not receives and not sends:
            return []
        return dist.batch_isend_irecv(
            [
                dist.P2POp(call, each, group=self._group, tag=TAG, group_peer=peer)
                for call, messages in ((dist.irecv, receives), (dist.isend, sends))
                for peer, each in messages
            ]
        )


class Exchange:
    """Messages under way, with the memory that they use."""

    def __init__(self, works: Sequence[Any], peers: Sequence[int], memory: object) -> None:
        self._works, self._peers, self._memory = works, peers, memory

    def wait(self) -> None:
        """Wait until all have ended; on a device its current stream waits, and the host does not.

        Raises:
            CollectiveError: one has failed; names the peer and what the backend says.
        """
        each_its_own = len(self._works) == len(self._peers)
        for number, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                peers = [self._peers[number]] if each_its_own else self._peers
                raise failure(error, peers) from error


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
