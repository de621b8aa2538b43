"""Tensors as compression sees them: flat, in the order in which their elements are kept.

DDP's buckets hold a parameter that fills its memory in memory's order, whatever the order of its
dimensions (channels last), and all others in their shape's. So do the residuals.
"""

from __future__ import annotations

import math

import torch

from pycollective.compression.arrays import Floats
from pycollective.errors import ConfigurationError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class OfTensor:
    """A dense CPU tensor."""

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
        return self._flat[start:stop]

    def widen(self, start: int, stop: int, out: Floats) -> None:
        torch.from_numpy(out).copy_(self._flat[start:stop])

    def put(self, start: int, values: Floats) -> None:
        self._flat[start : start + values.size].copy_(torch.from_numpy(values))

    def fill(self, value: float) -> None:
        self._flat.fill_(value)

    def is_finite(self) -> bool:
        # Some 30 times as fast as torch.isfinite; a NaN is both.
        least, most = self._flat.aminmax() if self.count else (0.0, 0.0)
        return math.isfinite(least) and math.isfinite(most)

    def is_zero(self) -> bool:
        return not self._flat.any()

    @property
    def narrow(self) -> bool:
        return self._flat.itemsize == 2


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and length of each side of several elements; the stride of another means nothing."""
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in sides if size != 1]


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after another, none twice, without gaps."""
    step = 1
    for stride, size in sorted(_strides(tensor)):
        if stride != step:
            return False
        step *= size
    return True


def has_own_order(parameter: torch.Tensor) -> bool:
    """Whether a parameter's error is kept in memory's order, and that is not its shape's."""
    return not parameter.is_contiguous() and fills_its_memory(parameter)


def flat_in_memory(tensor: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
    """The elements of a gradient in its parameter's own order in memory: a view.

    Raises:
        ConfigurationError: they do not lie so.
    """
    if tensor.shape != parameter.shape or _strides(tensor) != _strides(parameter):
        raise ConfigurationError(
            f"{what} is not contiguous, and its gradient not laid out in memory as it is"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def in_shape(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's error in its shape, laid out in memory as it is kept."""
    if has_own_order(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def in_memory(shaped: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse: elements in the shape's order, made flat."""
    if not has_own_order(parameter):
        return shaped
    flat = torch.empty(parameter.numel(), dtype=shaped.dtype)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(shaped.view(parameter.shape))
    return flat
