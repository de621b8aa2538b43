"""States of compression that go the way of devices, with tensors of the CPU.

The kernels run in Triton's interpreter. What a device's host would have to wait for is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from pycollective.torch.compression import states
from pycollective.torch.compression.devices import quantized
from pycollective.torch.compression.groups import OfProcessGroup
from tests.torch.compressed import state_of
from tests.torch.ordered_groups import StandInStreams
from tests.triton.compiled import module

_KERNELS = module("quantized", interpreted=True)

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
        if not NoWaits.inside_kernel and (name in _WAITS or to_host):
            raise HostWait(name)
        return func(*args, **kwargs)


class Kernels:
    """Those of `pycollective.triton.quantized` in the interpreter, which copies tensors."""

    def quantize(self, *args):
        NoWaits.inside_kernel = True
        _KERNELS.quantize(*args)
        NoWaits.inside_kernel = False

    def dequantize(self, *args):
        NoWaits.inside_kernel = True
        _KERNELS.dequantize(*args)
        NoWaits.inside_kernel = False


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


@contextmanager
def interpreted() -> Iterator[None]:
    """Codecs on devices have interpreted kernels."""
    with mock.patch.object(quantized, "kernels", Kernels):
        yield


def as_on_a_device(model, codec, topology, group, **options):
    """A state of such parameters, whose stream is a stand-in."""
    with mock.patch.object(states, "streams_of", return_value=Streams()), interpreted():
        return state_of(model, codec, topology, group, **options)


@contextmanager
def sent_by_states() -> Iterator[list[str]]:
    """Digests of all messages that states send meanwhile."""
    sent: list[str] = []
    exchange, gather = OfProcessGroup.exchange, OfProcessGroup.gather

    def note(kind: str, rows: torch.Tensor) -> None:
        digest = hashlib.blake2b(rows.contiguous().numpy().tobytes(), digest_size=8)
        sent.append(f"{kind} of {tuple(rows.shape)}: {digest.hexdigest()}")

    def noted_exchange(self, rows):
        with torch._C.DisableTorchFunction():
            note("exchange", rows)
        return exchange(self, rows)

    def noted_gather(self, row):
        with torch._C.DisableTorchFunction():
            note("gather", row.view(1, -1))
        return gather(self, row)

    with (
        mock.patch.object(OfProcessGroup, "exchange", noted_exchange),
        mock.patch.object(OfProcessGroup, "gather", noted_gather),
    ):
        yield sent
