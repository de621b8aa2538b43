"""Ordered calls on a device wait wherever they must: sums are right though streams work late."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pycollective import reference
from pycollective.torch.ordered import calls
from pycollective.torch.ordered import group as groups
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.pieces import Call
from tests.harness import PerRank
from tests.inputs import order_sensitive, same_bits
from tests.torch.groups import CPU, to_numpy, to_torch
from tests.torch.ordered_groups import apart, named, size_of, standing
from tests.torch.streams import LateDevice, late_streams


def late(comm, leaves, hosts, seed):
    """Sums of several calls in the same memory, the first of which the host does not wait for."""
    device = LateDevice(seed)
    with mock.patch.object(groups, "WATCH"):  # whose thread would let streams go on meanwhile
        ordered = OrderedGroup(standing(comm), CPU, late_streams(device, "ordered"))
    ordered._layout = Layout(ordered.rank, hosts)
    memory, found = torch.empty(leaves[0].size), []
    with device.in_use():
        for number, mine in enumerate(leaves):
            memory.copy_(to_torch(mine))
            call = Call("all_reduce", "sum", memory, memory)
            work = calls._issue(ordered, [call], memory, async_op=number == 1)
            if work is not None:
                work.get_future().wait()
            found.append(memory.clone())
            if number:
                device.current.synchronize()
    device.synchronize()
    return [to_numpy(each) for each in found]


@pytest.mark.parametrize(
    ("hosts", "seed"),
    [
        (apart(3), None),
        (((0, 1), (2,)), 1),
        *(
            pytest.param(hosts, seed, marks=pytest.mark.storm)
            for hosts in (apart(3), ((0, 1), (2, 3)))
            for seed in range(2, 8)
        ),
    ],
    ids=lambda each: named(each) if isinstance(each, tuple) else str(each),
)
def test_sums_are_right_though_streams_work_late(pool, hosts, seed):
    ranks = size_of(hosts)
    leaves = [order_sensitive("float32", ranks, 20_000, number) for number in range(3)]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(ranks)])
    for found in pool(ranks).call(late, of_ranks, hosts, seed):
        for got, inputs in zip(found, leaves, strict=True):
            assert same_bits(got, reference.reduce(inputs, "sum"))
