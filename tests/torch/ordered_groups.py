"""Ordered calls over groups of any backend, inside the ranks of a test."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from pycollective import Communicator
from pycollective.torch.ordered import calls, pieces
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.messages import Messages
from pycollective.torch.ordered.pieces import Call
from tests.torch.groups import CPU, standing_group, to_numpy, to_torch

Hosts = tuple[tuple[int, ...], ...]

# A group's connections are made once, and then are those of all ordered reductions over it.
_messages: weakref.WeakKeyDictionary[dist.ProcessGroup, Messages] = weakref.WeakKeyDictionary()

_standing: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def standing(comm: Communicator, backend: str = "gloo") -> dist.ProcessGroup:
    """A group of all ranks that a pool's ranks keep from call to call."""
    world = standing_group(comm)
    if backend == "pycollective":
        return world
    made_in, group = _standing.get(backend, (None, None))
    if made_in is not world:
        group = dist.new_group(backend=backend)
        _standing[backend] = world, group
    return group


@contextmanager
def own_group(comm: Communicator, **options) -> Iterator[dist.ProcessGroup]:
    """A Gloo group for one block: receives of calls that fail in it would meet later messages.

    A rank that raises in the block meets the others behind it, too: what it raised is what they all
    hear of, at once.
    """
    standing_group(comm)
    group = dist.new_group(backend="gloo", **options)
    try:
        yield group
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def apart(ranks: int) -> Hosts:
    """Hosts of one rank each."""
    return tuple((rank,) for rank in range(ranks))


def size_of(hosts: Hosts) -> int:
    return sum(map(len, hosts))


def named(hosts: Hosts) -> str:
    return "|".join("".join(map(str, ranks)) for ranks in hosts)


@contextmanager
def laid_out(
    group: dist.ProcessGroup,
    hosts: Hosts | None = None,
    piece: int | None = None,
    in_pieces: bool = False,
) -> Iterator[OrderedGroup]:
    """The public calls go over new ordered reductions, with these hosts and bytes a piece.

    Also over the backend pycollective, which would make them itself. What does not travel with the
    header may be made to travel in pieces, however little it is.
    """
    ordered = OrderedGroup(group, CPU, None)
    messages = _messages.setdefault(group, ordered._messages)
    ordered._messages = ordered._calls._messages = ordered._calls._pieces._sender = messages
    ordered._messages.sent_messages = ordered._messages.sent_bytes = 0
    if hosts is not None:
        ordered._messages.connect()
        ordered._layout = Layout(ordered.rank, hosts)
    if piece is not None:
        ordered.piece = piece
    with (
        mock.patch.object(pieces, "_SMALL", 0 if in_pieces else pieces._SMALL),
        mock.patch.object(calls, "own_backend", return_value=None),
        mock.patch.dict(calls._groups, {group: {CPU: ordered}}),
    ):
        yield ordered


class StandInStreams:
    """Of a device whose work is done at once, but that says so only when it is told."""

    def __init__(self) -> None:
        self.done = True
        self.used: list[int] = []  # addresses of what calls use
        self.joined = 0  # how often the caller's stream waited

    @contextmanager
    def behind_caller(self, *tensors: torch.Tensor) -> Iterator[None]:
        self.used = [each.data_ptr() for each in tensors]
        yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    on_device = entered

    def join_caller(self) -> None:
        self.joined += 1

    def let_caller_wait(self, event: StandInStreams) -> None:
        self.joined += 1

    def event(self) -> StandInStreams:
        return self

    def query(self) -> bool:
        return self.done


def as_on_a_device(group: dist.ProcessGroup, hosts: Hosts | None = None) -> OrderedGroup:
    """Reductions that go the way of devices, with tensors of the CPU."""
    ordered = OrderedGroup(group, CPU, StandInStreams())
    if hosts is not None:
        ordered._layout = Layout(ordered.rank, hosts)
    return ordered


def run(ordered: OrderedGroup, kind: str, op: str, leaves: np.ndarray) -> np.ndarray:
    """The result of one call."""
    tensor = to_torch(leaves)
    part = tensor[: leaves.size // ordered.size].clone()
    out = tensor if kind == "all_reduce" else part
    ordered.run(Call(kind, op, tensor, out))
    return to_numpy(out)


def each_rank_gets(kind: str, reduced: np.ndarray, ranks: int) -> Sequence[np.ndarray]:
    """Of what all leaves reduce to, each rank's part."""
    return [reduced] * ranks if kind == "all_reduce" else np.split(reduced, ranks)


class CountingGroup(dist.ProcessGroup):
    """A backend that this library has never heard of: in Python, and able only to send and receive.

    Attributes:
        sent: bytes to each rank.
        tags: of all messages.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.sent = [0] * size
        self.tags: set[int] = set()

    def getBackendName(self) -> str:
        return "counting"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self.sent[peer] += tensors[0].nbytes
        self.tags.add(tag)
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self.tags.add(tag)
        return self._gloo.recv(tensors, peer, tag)


dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
