"""An accumulator whose rows are in a device's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from pycollective.errors import ConfigurationError
from pycollective.leaves.accumulator import Accumulator

ALIGNED = 16  # elements: of any type that leaves have, at least 16 bytes
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def begins_of(counts: Sequence[int], aligned: int) -> list[int]:
    """Where arrays of so many elements begin that lie one behind the other, and where all end."""
    return list(accumulate((-(-count // aligned) * aligned for count in counts), initial=0))


class DeviceAccumulator(Accumulator):
    """Adds up leaves on the current stream of their device: a bucket's in one launch a leaf.

    A leaf is a list of gradients, each contiguous and somewhere in the device's memory. In a row,
    fp32, each begins at a multiple of 16 elements; between them lie zeros. Nothing waits on the
    host. All calls are made on one stream, or on streams that wait for each other.

    Args:
        counts: elements of each gradient.
        leaves: of the whole reduction, M, on all ranks together.
        device: with its number.
    """

    def __init__(self, counts: Sequence[int], leaves: int, device: torch.device) -> None:
        super().__init__([(count,) for count in counts], leaves=leaves)
        *begins, self.size = begins_of(counts, ALIGNED)
        self.shape = (self.size,)
        self._device = device
        self._counts, self._begins = counts, begins
        self._places: Any = None  # of the kernel's
        if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from pycollective.triton.accumulate import Places

            self._places = Places(begins, counts, device)

    def _keeps(self, arrays: Sequence[Any]) -> bool:
        return False

    def _sum(self, arrays: Sequence[Any], terms: Sequence[Any], out: Any) -> None:
        if self._places is not None:
            from pycollective.triton.accumulate import accumulate as launch

            launch(self._places, arrays, terms, out)
            return
        self._check(arrays)
        for gradient, begin, count in zip(arrays, self._begins, self._counts, strict=True):
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

    def _check(self, arrays: Sequence[Any]) -> None:
        if len(arrays) != len(self._counts):
            raise ConfigurationError(
                f"a leaf has {len(self._counts)} gradients here, not {len(arrays)}"
            )
        for number, (gradient, count) in enumerate(zip(arrays, self._counts, strict=True)):
            if gradient is None:
                continue
            if (
                gradient.dtype not in _DTYPES
                or gradient.numel() != count
                or gradient.device != self._device
                or not gradient.is_contiguous()
            ):
                raise ConfigurationError(
                    f"gradient {number} must have {count} contiguous elements of a float of up to "
                    f"32 bits on {self._device}, not {gradient.numel()} of {gradient.dtype} on "
                    f"{gradient.device}"
                )
