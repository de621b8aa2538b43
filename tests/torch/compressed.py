"""What the tests of compressed DDP share: states whose ranks simulate hosts, and gradients."""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest
import torch
import torch._dynamo  # DDP does, in each fork unless it is there
import torch.distributed as dist
import torch.distributed.checkpoint

import pycollective.torch as pct
from pycollective.compression import CODECS
from tests.harness import Ranks, results
from tests.inputs import TRAITS, words
from tests.torch.groups import Gradient, standing_group, to_numpy

HOOKS = {codec: getattr(pct, f"{codec}_hook") for codec in CODECS}

_groups: dict[str, dist.ProcessGroup] = {}


def ranks_of(module, size, timeout=100.0, scope="module"):
    """The fixture `ranks` of a module of tests: results of a call on so many ranks of it."""

    @pytest.fixture(scope=scope)
    def ranks():
        with Ranks(size, timeout=timeout, module=module) as started:

            def call(function, *args):
                found = results(started.call(function, *args))
                results(started.call(close_groups))
                return found

            yield call

    return ranks


def group_of(comm, backend):
    """One of each backend, kept from call to call."""
    standing_group(comm)
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


def close_groups(_):
    """Destroys the groups that states have made: each of gloo's has threads that wake all the time.

    No rank may be in a call of them any more. Those of `group_of` stay.
    """
    kept = [dist.group.WORLD, *_groups.values()]
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in kept:
            dist.destroy_process_group(group)


def state_of(model, codec, topology, group, **options):
    """A state whose ranks simulate hosts."""
    os.environ["PYCOLLECTIVE_TOPOLOGY"] = topology
    try:
        usual = {"density": 0.03} if codec == "top_k" else {"chunk": 256}
        state = getattr(pct, CODECS[codec].__name__)
        return state(model, group=group, **{**usual, **options})
    finally:
        del os.environ["PYCOLLECTIVE_TOPOLOGY"]


class Bucket:
    """What a hook sees of a bucket of DDP's, and how often it looked for its parameters."""

    def __init__(self, model, gradients, last=True):
        self._parameters = [getattr(model, name) for name in gradients]
        self._buffer = torch.cat([each.reshape(-1) for each in gradients.values()])
        self._last, self.looks = last, 0

    def buffer(self):
        return self._buffer

    def parameters(self):
        self.looks += 1
        return self._parameters

    def index(self):
        return 0

    def is_last(self):
        return self._last


class Arrays:
    """A state of torch's that takes and gives NumPy arrays; all else is its own."""

    def __init__(self, state):
        self.of_torch = state

    def __getattr__(self, name):
        return getattr(self.of_torch, name)

    def all_reduce(self, gradients):
        tensors = {name: shared(x) for name, x in gradients.items()}
        if len(tensors) != 1:
            return self.of_torch.all_reduce(tensors)
        [(name, tensor)] = tensors.items()
        return pct.compressed_all_reduce(tensor, self.of_torch, name)

    def reduce_scatter(self, out, tensor, key):
        return pct.compressed_reduce_scatter(shared(out), shared(tensor), self.of_torch, key)

    def flush(self):
        return {name: to_numpy(each) for name, each in self.of_torch.flush().items()}


def shared(x):
    """A tensor in the memory of an array."""
    if TRAITS[x.dtype.name].in_numpy:
        return torch.from_numpy(x)
    return torch.from_numpy(words(x)).view(getattr(torch, x.dtype.name))


def arrays_over(comm, face, state, shapes, host_of, **options):
    """`Arrays` of a state whose ranks simulate these hosts."""
    group = group_of(comm, "pycollective" if face == "torch" else face)
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in shapes.items()]
    counts = [len(list(ranks)) for _, ranks in itertools.groupby(host_of or ())]
    with pytest.MonkeyPatch.context() as patch:
        if host_of is not None:
            patch.setenv("PYCOLLECTIVE_TOPOLOGY", ",".join(map(str, counts)))
        return Arrays(getattr(pct, state)(pairs, group=group, **options))


def digest_of(tensors):
    found = hashlib.blake2b(digest_size=8)
    for each in tensors:
        found.update(to_numpy(each.detach().contiguous()).tobytes())
    return found.hexdigest()


class Given(torch.nn.Module):
    """Its gradients are what it is called with, bit for bit."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(80, 90, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(30, dtype=dtype))
        self.v = torch.nn.Parameter(torch.zeros(50, 101, dtype=dtype))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(Gradient.apply(p, gradients[n]) for n, p in self.named_parameters())


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
        return Gradient.apply(self.weight, gradient)
