"""What `ordered.prepare` does on devices before the first step: kernels are compiled."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from pycollective.torch.ordered import reduction
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.pieces import Call
from tests.torch.groups import CPU
from tests.torch.ordered_groups import Hosts, StandInStreams, size_of
from tests.triton.compiled import module
from tests.triton.driver import driven

PREPARED = [
    (d, op) for d in (torch.bfloat16, torch.float16, torch.float32) for op in ("sum", "avg")
]


def fake_group(ranks: int) -> dist.ProcessGroup:
    """A group whose exchanges bring this rank its own rows."""
    group = dist.ProcessGroup(dist.HashStore(), 0, ranks)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    backend = FakeProcessGroup._create_internal(0, ranks, FakeProcessGroup.Options())
    group._register_backend(CPU, kind, backend)
    group._set_default_backend(kind)
    return group


def later_calls(ranks: int) -> list[Call]:
    """Those of a step, of the sizes that it may have."""
    calls = []
    for dtype, op in PREPARED:
        for count in (1, 40_001, 1 << 20):
            x = torch.zeros(count, dtype=dtype)
            calls.append(Call("all_reduce", op, x, x))
        for part in (8, 1 << 16):
            leaves = torch.zeros(part * ranks, dtype=dtype)
            calls.append(Call("reduce_scatter", op, leaves, leaves[:part].clone()))
    return calls


@pytest.mark.parametrize("hosts", [((0,),), ((0,), (1,), (2,)), ((0, 1), (2, 3))])
@pytest.mark.parametrize("has_triton", [True, False])
def test_later_calls_compile_nothing(monkeypatch, hosts: Hosts, has_triton):
    ranks = size_of(hosts)
    group = fake_group(ranks)
    with contextlib.ExitStack() as stack:
        if has_triton:
            kernels = {name: module(name, interpreted=False) for name in ("reduce", "rows")}
            monkeypatch.setattr(reduction, "_triton", lambda name, device_type: kernels[name])
            driver = stack.enter_context(driven())
        ordered = OrderedGroup(group, CPU, StandInStreams(), range(ranks))
        ordered._layout = Layout(0, hosts)
        ordered.prepare()
        assert ordered.calls == len(PREPARED)
        if has_triton:
            assert driver.launches
            for each in kernels.values():
                monkeypatch.setattr(each.Launcher, "_launch_by_triton", None)
        for call in later_calls(ranks):
            ordered.run(call)
        assert ordered._calls.found() is None
