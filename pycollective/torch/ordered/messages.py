"""Messages between the ranks of a process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveError, CollectiveTimeout, PeerFailure
from pycollective.torch.ordered import header

# Ours alone: other messages between the same ranks do not mix with them. MPI has tags up to 32767.
HEADERS, LEAVES, RESULTS, PROBES = range(29811, 29815)

# Over Gloo inputs of up to so many bytes travel with the headers; results of as many are one
# exchange. Beyond, copies of data would cost more than messages do.
MEDIUM = 4 << 20

Message = tuple[int, torch.Tensor]  # the other rank, in the group; flat, contiguous

_CPU = torch.device("cpu")
_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


class Messages:
    """Sends and receives of one group on one device.

    Between two ranks messages of a tag keep their order, so each rank starts its own in one order.
    They do not count as the group's collectives. Over Gloo they go over connections of our own, so
    a program may use the group meanwhile, from any thread. NCCL has no tags, and wants one order on
    all ranks. The group is held weakly.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._batched = device.type != "cpu"
        self.sent_messages = self.sent_bytes = 0
        # Those that have failed, too. Gloo's thread spins if messages come for receives that were
        # dropped, and other messages behind them wait.
        self._under_way: list[Exchange] = []

    @property
    def medium(self) -> int:
        """Bytes of an input or a result that one exchange of all ranks brings, by `all_to_all`.

        0 where there is no such exchange. Collective over the group the first time.
        """
        return MEDIUM if self._connections() is not None else 0

    @property
    def room(self) -> int:
        """Bytes of data for each rank that may travel with a header."""
        return max(header.ROOM, -(-self.medium // self._size // 64) * 64)

    def start(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Start messages, all at once; empty ones do not travel."""
        group = self._alive()
        own = self._connections()
        here = [(peer, each.view(torch.uint8)) for peer, each in sends if each.numel()]
        there = [(peer, each.view(torch.uint8)) for peer, each in receives if each.numel()]
        self._count(each.numel() for _, each in here)
        exchange = Exchange(self._under_way, here + there)
        works = exchange.works
        try:
            if not self._batched:
                # Sends first: a send that finds its receive is written by this thread, which then
                # holds what Gloo's own thread needs, and spins for.
                by = group if own is None else own
                for peer, each in here:
                    works.append(by.send([each], peer, tag))
                for peer, each in there:
                    works.append(by.recv([each], peer, tag))
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

    def all_to_all(
        self,
        data: torch.Tensor,
        sent: Sequence[int],
        out: torch.Tensor,
        received: Sequence[int],
        silent: Callable[[], Sequence[int]] = list,
    ) -> None:
        """Exchange with all ranks at once, and wait; where `medium` is not 0.

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
        own = self._connections()
        self._alive()
        self._count(each for rank, each in enumerate(sent) if each and rank != self._rank)
        exchange = Exchange(self._under_way, [(-1, data), (-1, out)])
        try:
            # By Gloo's own threads: this one would hold what they spin for.
            exchange.works.append(own.alltoall_base(out, data, list(received), list(sent)))
            exchange.works[0].wait()
        except RuntimeError as error:
            raise failure(error, self._broken() or silent() or self._others()) from error
        self._under_way.remove(exchange)

    def _broken(self) -> list[int]:
        """The ranks to which nothing goes any more; none if that is all, as after a timeout.

        For a group that has failed: what this starts is never waited for.
        """
        own, scrap = self._connections(), torch.empty(1, dtype=torch.uint8)
        probes = Exchange(self._under_way, [(rank, scrap) for rank in self._others()])
        found = []
        for rank in self._others():
            try:
                probes.works.append(own.recv([scrap], rank, PROBES))
            except RuntimeError:
                found.append(rank)
        return found if probes.works else []

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _connections(self) -> Any:
        group = self._group()
        alone = self._batched or self._size == 1
        return None if alone or group is None else connections(group)

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise CollectiveError("the process group was destroyed")
        return group

    def _count(self, messages: Iterable[int]) -> None:
        for each in messages:
            self.sent_messages += 1
            self.sent_bytes += each


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


def connections(group: dist.ProcessGroup) -> Any:
    """Connections of our own between a Gloo group's ranks, as its; None over other backends.

    Gloo numbers a group's collectives when they are issued, so ours would mix with the program's.
    They live as long as the group. Collective over the group when they are made, with the first
    call; waits as long as the group does.

    Raises:
        CollectiveError: they cannot be made.
    """
    if group not in _connections:
        _connections[group] = _connect(group)
    return _connections[group]


def _connect(group: dist.ProcessGroup) -> Any:
    if not dist.is_gloo_available() or _CPU not in group._device_types:
        return None
    backend = group._get_backend(_CPU)
    if not isinstance(backend, dist.ProcessGroupGloo):
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore("pycollective.torch.ordered", group.get_group_store())
    try:
        return dist.ProcessGroupGloo(store, rank, size, backend.options)  # type: ignore[arg-type]
    except RuntimeError as error:
        others = [other for other in range(size) if other != rank]
        raise failure(error, others) from error


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the messages of a group fail that are under way."""
    own = _connections.get(group)
    (group._get_backend(device) if own is None else own).abort()


def failure(error: RuntimeError, peers: Sequence[int]) -> CollectiveError:
    """What a backend's error means; those of pycollective are what they are."""
    if isinstance(error, CollectiveError):
        return error
    said = str(error).strip().partition("\nException raised from")[0]
    kind = CollectiveError
    if any(each in said.lower() for each in ("timed out", "timeout")):
        kind = CollectiveTimeout
    elif any(each in said.lower() for each in ("closed by peer", "reset by peer", "broken pipe")):
        kind = PeerFailure
    with_whom = ", ".join(map(str, sorted(set(peers))))
    return kind(f"a message from or to rank(s) {with_whom} failed: {said}")
