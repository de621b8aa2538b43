"""Exchanges of ordered calls on devices: how many there are, and how many messages go together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from pycollective.torch.ordered import device_messages, pieces
from pycollective.torch.ordered.device_messages import MOST_IN_A_GROUP, DeviceMessages
from pycollective.torch.ordered.layout import Layout
from tests.inputs import order_sensitive
from tests.torch.groups import CPU
from tests.torch.ordered_groups import apart, as_on_a_device, run, standing

# --- Exchanges of a call.


def exchanges(comm, hosts):
    """Of each kind of call."""
    made, found = as_on_a_device(standing(comm), hosts), {}
    large = order_sensitive("float32", 1, 60_000)[0]
    for name, kind, leaves, piece in (
        ("small", "all_reduce", large[:100], 64 << 20),
        ("small, scattered", "reduce_scatter", large[:120], 64 << 20),
        ("large", "all_reduce", large, 64 << 20),
        ("large, a shard for each", "all_reduce", large[: 16 * 3 * 1000], 64 << 20),
        ("scattered", "reduce_scatter", large, 64 << 20),
        ("in three pieces", "all_reduce", large, 80_000),
    ):
        made.piece, before = piece, made._messages.issued
        run(made, kind, "sum", leaves)
        found[name] = made._messages.issued - before
    # What is sent and what comes, of the largest.
    assert 2 * large.nbytes < made._buffers.nbytes < 2 * (large.nbytes + 128 * comm.size)
    return found


def test_a_call_is_two_exchanges_and_a_small_one_is_one(pool):
    want = {"small": 1, "small, scattered": 1, "large": 2, "large, a shard for each": 2}
    want |= {"scattered": 1, "in three pieces": 6}
    for found in pool(3).call(exchanges, apart(3)):
        assert found == want


# --- Messages in groups.


class Backend:
    """Notes what is issued together."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.groups: list[list[tuple[str, int]]] = []

    def _start_coalescing(self) -> None:
        self.groups.append([])

    def _end_coalescing(self) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    def send(self, tensors, peer, tag):
        self.groups[-1].append(("send", peer))

    def recv(self, tensors, peer, tag):
        self.groups[-1].append(("recv", peer))


def issued(layout, call, shards):
    """The groups of messages that one rank issues for a piece."""
    group = SimpleNamespace(rank=lambda: layout.rank, size=lambda: layout.size)
    backend = Backend()
    with (
        mock.patch.object(device_messages.weakref, "ref", lambda it: lambda: it),
        mock.patch.object(device_messages, "backend_of", return_value=backend),
    ):
        messages = DeviceMessages(group, CPU)
        messages.most = layout.most_messages(call.kind)
        made = pieces.Pieces(
            layout.rank, layout.size, messages, pieces.Buffers(CPU, zeroed=True), True
        )
        with mock.patch.object(pieces, "combine"):
            results = made.reduce(call, layout, shards)
        made.send_results(call, layout, shards, results)
    return backend.groups


def all_end(of_ranks):
    """Whether all groups end, if a message goes once both ranks are in the groups that have it."""
    at = [0] * len(of_ranks)
    left = [{} for _ in of_ranks]

    def enter(rank):
        left[rank] = {}
        for kind, peer in of_ranks[rank][at[rank]] if at[rank] < len(of_ranks[rank]) else ():
            left[rank][kind, peer] = left[rank].get((kind, peer), 0) + 1

    for rank in range(len(of_ranks)):
        enter(rank)
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            for (kind, peer), count in list(mine.items()):
                other = "recv" if kind == "send" else "send"
                both = min(count, left[peer].get((other, rank), 0))
                if both:
                    moved = True
                    for those, key in ((mine, (kind, peer)), (left[peer], (other, rank))):
                        those[key] -= both
                        if not those[key]:
                            del those[key]
        for rank, mine in enumerate(left):
            while at[rank] < len(of_ranks[rank]) and not left[rank]:
                at[rank] += 1
                moved = True
                enter(rank)
                mine = left[rank]
    return all(place == len(groups) for place, groups in zip(at, of_ranks, strict=True))


MANY = {
    "40 hosts of 2": [2] * 40,
    "70 hosts of 1 or 2": [1, 2] * 35,
    "2 hosts of 70": [70] * 2,
    "hosts of 3, 5 and 7": [3, 5, 7] * 3,
}


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", MANY)
def test_groups_of_messages_are_small_and_all_end(name, kind):
    sizes, drawn = MANY[name], random.Random(0)
    ranks = list(range(sum(sizes)))
    drawn.shuffle(ranks)
    hosts, taken = [], 0
    for size in sizes:
        hosts.append(tuple(sorted(ranks[taken : taken + size])))
        taken += size
    count = 2 * len(ranks)
    leaves = torch.zeros(count)
    out = leaves if kind == "all_reduce" else torch.zeros(count // len(ranks))
    of_ranks = []
    for rank in range(len(ranks)):
        layout, call = Layout(rank, tuple(hosts)), pieces.Call(kind, "sum", leaves, out)
        (shards,) = pieces.cut(call, layout, 64 << 20)
        of_ranks.append(issued(layout, call, shards))
        assert max(map(len, of_ranks[-1]), default=0) <= MOST_IN_A_GROUP
    assert all_end(of_ranks)
