"""Process groups of the backend, inside the ranks of a test."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

import pycollective.torch  # noqa: F401  registers the backend
from pycollective import Communicator
from tests.inputs import TRAITS, dtype_of, words

CPU = torch.device("cpu")


def join(comm: Communicator, backend: str = "pycollective", timeout: float = 30.0) -> None:
    """Make torch's default group of the ranks that `comm` has."""
    store = None
    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, comm.size, is_master=True, wait_for_workers=False)
        port[0] = store.port
    comm.broadcast(port)
    if store is None:
        store = dist.TCPStore("127.0.0.1", int(port[0]), comm.size, is_master=False)
    dist.init_process_group(
        backend,
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=timeout),
    )


@contextmanager
def process_group(comm: Communicator, **options) -> Iterator[dist.ProcessGroup]:
    """A default group for one block; destroyed after it, as a program should."""
    join(comm, **options)
    yield dist.group.WORLD
    dist.destroy_process_group()


def standing_group(comm: Communicator) -> dist.ProcessGroup:
    """The default group that a pool's ranks keep from call to call."""
    if not dist.is_initialized():
        join(comm)
    return dist.group.WORLD


def backend_of(group: dist.ProcessGroup):
    return group._get_backend(CPU)


def to_torch(x: np.ndarray) -> torch.Tensor:
    """A tensor with the array's bits and a memory of its own."""
    if not TRAITS[x.dtype.name].in_numpy:
        return torch.from_numpy(words(x).copy()).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x.copy())


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    if name in TRAITS and not TRAITS[name].in_numpy:
        plain = getattr(torch, f"uint{8 * tensor.itemsize}")
        return tensor.contiguous().view(plain).numpy().view(dtype_of(name))
    return tensor.contiguous().numpy()


class Gradient(torch.autograd.Function):
    """Makes the gradient of a weight whatever it is given, bit for bit."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None
