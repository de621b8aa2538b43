"""States of compression that go the way of devices, with tensors of the CPU.

What a device's host would have to wait for is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from pycollective.torch.compression import kernels as device_kernels
from pycollective.torch.compression import states
from pycollective.torch.compression.groups import TorchGroup
from tests.torch import cpu_kernels
from tests.torch.compressed import state_of
from tests.torch.ordered_groups import StandInStreams
from tests.triton.compiled import module

# What brings a device's data to the host, or depends on it there.
_WAITS = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "equal", "unique"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero"),
)


class HostWait(AssertionError):
    """The host would wait for the device."""


class NoWaits(TorchFunctionMode):
    """Refuses what a device's host would wait for, outside of kernels that are interpreted."""

    inside_kernel = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        moves = name == "to" and not kwargs.get("non_blocking")
        to_host = moves and any(str(each) == "cpu" for each in (*args[1:], *kwargs.values()))
        # A list as an index is uploaded, and the host waits for that.
        index = args[1] if name == "__getitem__" else ()
        uploads = any(
            isinstance(each, list) for each in (index if type(index) is tuple else [index])
        )
        if not NoWaits.inside_kernel and (name in _WAITS or to_host or uploads):
            raise HostWait(name)
        return func(*args, **kwargs)


class Launched:
    """A module of kernels, which look at tensors' data."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if not inspect.isfunction(found):
            return found

        def launch(*args, **more):
            NoWaits.inside_kernel = True
            try:
                return found(*args, **more)
            finally:
                NoWaits.inside_kernel = False

        return launch


@functools.cache
def _load(kernels, name):
    made = cpu_kernels.module(name) if kernels == "cpu" else module(name, interpreted=True)
    return Launched(made)


def loading(kernels):
    """Within, `TritonKernels` are made of these: "cpu": the CPU's; "triton": interpreted."""
    return mock.patch.object(device_kernels, "load", functools.partial(_load, kernels))


class Streams(StandInStreams):
    """Counts how often the host has asked for a device's events, which it does to wait.

    Attributes:
        waits: so many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def query(self) -> bool:
        self.waits += 1
        return super().query()


def as_on_a_device(model, codec, topology, group, kernels="cpu", **options):
    """A state of such parameters, whose stream is a stand-in; see `loading` for the kernels."""
    with mock.patch.object(states, "streams_of", return_value=Streams()), loading(kernels):
        return state_of(model, codec, topology, group, **options)


@contextmanager
def sent_by_states() -> Iterator[list[tuple[str, tuple[int, ...], bytes]]]:
    """All messages that states send meanwhile: how, their shape, and their bytes."""
    sent: list[tuple[str, tuple[int, ...], bytes]] = []
    exchange, gather = TorchGroup.all_to_all, TorchGroup.all_gather

    def note(kind: str, rows: torch.Tensor) -> None:
        sent.append((kind, tuple(rows.shape), rows.contiguous().numpy().tobytes()))

    def noted_exchange(self, rows):
        if isinstance(rows, torch.Tensor):
            with torch._C.DisableTorchFunction():
                note("exchange", rows)
        return exchange(self, rows)

    def noted_gather(self, row):
        if isinstance(row, torch.Tensor):
            with torch._C.DisableTorchFunction():
                note("gather", row.view(1, -1))
        return gather(self, row)

    with (
        mock.patch.object(TorchGroup, "all_to_all", noted_exchange),
        mock.patch.object(TorchGroup, "all_gather", noted_gather),
    ):
        yield sent
