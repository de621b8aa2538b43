"""An accumulator whose rows are in a device's memory."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from pycollective.leaves.accumulator import Accumulator

_UNIT = 16  # elements, at whose multiples gradients begin: of any type 16 bytes or more


def kernels_of(device: torch.device) -> Any:
    """The module whose kernel adds leaves on a device; None where there is none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("pycollective.triton.accumulate")


class DeviceAccumulator(Accumulator):
    """Adds up leaves on the current stream of their device: a bucket's in one launch a leaf.

    A leaf is a list of gradients, each contiguous and anywhere in the device's memory. In a row of
    fp32 each begins at a multiple of 16 elements; between them lie zeros. The host waits for
    nothing. All calls are made on one stream, or on streams that wait for each other.

    Args:
        counts: elements of each gradient.
        leaves: of the whole reduction, M, on all ranks together.
        device: with its number.
    """

    def __init__(self, counts: Sequence[int], leaves: int, device: torch.device) -> None:
        super().__init__([(count,) for count in counts], leaves=leaves)
        rooms = (-(-count // _UNIT) * _UNIT for count in counts)
        *self.begins, self.size = accumulate(rooms, initial=0)
        self.shape = (self.size,)
        self._counts, self._device = counts, device
        self._kernels = kernels_of(device)
        if self._kernels is not None:
            self._places = self._kernels.Places(self.begins, counts, device)

    def _keeps(self, arrays: Sequence[Any]) -> bool:
        return False

    def _sum(self, arrays: Sequence[Any], terms: Sequence[Any], out: Any) -> None:
        if self._kernels is not None:
            self._kernels.accumulate(self._places, arrays, terms, out)
            return
        for gradient, begin, count in zip(arrays, self.begins, self._counts, strict=True):
            part = slice(begin, begin + count)
            if gradient is None:
                value = torch.zeros(count, device=self._device)
            else:
                value = gradient.reshape(-1).to(torch.float32)
            for term in terms:
                value = value + term[part]
            out[part] = value

    def _new_row(self) -> torch.Tensor:
        return torch.zeros(self.size, device=self._device)
