"""What the tests of compressed DDP share: states whose ranks play hosts, and gradients."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
import torch._dynamo  # DDP does, in each fork unless it is there
import torch.distributed as dist
import torch.distributed.checkpoint

import pycollective.torch as pct
from pycollective.compression import CODECS
from tests.harness import Ranks, results
from tests.torch.groups import standing_group, to_numpy

HOOKS = {codec: getattr(pct, f"{codec}_hook") for codec in CODECS}

_groups: dict[str, dist.ProcessGroup] = {}


def ranks_of(module, size, timeout=100.0, scope="module"):
    """The fixture `ranks` of a module of tests: results of a call on so many ranks of it."""

    @pytest.fixture(scope=scope)
    def ranks():
        with Ranks(size, timeout=timeout, module=module) as started:
            yield lambda function, *args: results(started.call(function, *args))

    return ranks


def group_of(comm, backend):
    """One of each backend, kept from call to call."""
    standing_group(comm)
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


def state_of(model, codec, topology, group, **options):
    """A state whose ranks play hosts."""
    os.environ["PYCOLLECTIVE_TOPOLOGY"] = topology
    try:
        usual = {"density": 0.03} if codec == "top_k" else {"chunk": 256}
        state = getattr(pct, CODECS[codec].__name__)
        return state(model, group=group, **{**usual, **options})
    finally:
        del os.environ["PYCOLLECTIVE_TOPOLOGY"]


def digest_of(tensors):
    found = hashlib.blake2b(digest_size=8)
    for each in tensors:
        found.update(to_numpy(each.detach().contiguous()).tobytes())
    return found.hexdigest()


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


class Given(torch.nn.Module):
    """Its gradients are what it is called with, bit for bit."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(80, 90, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(30, dtype=dtype))
        self.v = torch.nn.Parameter(torch.zeros(50, 101, dtype=dtype))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(_Gradient.apply(p, gradients[n]) for n, p in self.named_parameters())


def given(rank, step, dtype=torch.float32):
    random = torch.Generator().manual_seed(1000 * step + rank)
    shapes = {name: p.shape for name, p in Given().named_parameters()}
    return {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}


class Convolution(torch.nn.Module):
    """Given gradients of a weight that lies in memory channels last."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.zeros(20, 30, 3, 3).to(memory_format=torch.channels_last)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return _Gradient.apply(self.weight, gradient)
