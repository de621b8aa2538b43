"""A torch tensor as the exchanges of compression see it."""

from __future__ import annotations

import math

import torch

from pycollective.compression.arrays import Floats
from pycollective.errors import ConfigurationError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class OfTensor:
    """A dense CPU tensor; see `pycollective.compression.arrays.Flat`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _DTYPES or tensor.device.type != "cpu" or tensor.is_sparse:
            raise ConfigurationError(
                "a gradient to compress is a dense CPU tensor of float32, float16 or bfloat16, not "
                f"{tensor.dtype} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ConfigurationError("a gradient to compress must be contiguous")
        self._flat = tensor.detach().view(-1)
        self.count = tensor.numel()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """See `Flat`."""
        return self._flat[start:stop]

    def widen(self, start: int, stop: int, out: Floats) -> None:
        """See `Flat`."""
        torch.from_numpy(out).copy_(self._flat[start:stop])

    def put(self, start: int, values: Floats) -> None:
        """See `Flat`."""
        self._flat[start : start + values.size].copy_(torch.from_numpy(values))

    def fill(self, value: float) -> None:
        """See `Flat`."""
        self._flat.fill_(value)

    def is_finite(self) -> bool:
        """See `Flat`."""
        # Some 30 times as fast as torch.isfinite; a NaN is both.
        least, most = self._flat.aminmax() if self.count else (0.0, 0.0)
        return math.isfinite(least) and math.isfinite(most)

    def is_zero(self) -> bool:
        """See `Flat`."""
        return not self._flat.any()

    @property
    def narrow(self) -> bool:
        """See `Flat`."""
        return self._flat.itemsize == 2
