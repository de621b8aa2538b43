"""In which order the elements of a parameter are kept, by their places in memory or in its shape.

DDP's buckets hold a parameter that fills its memory, in whatever order of its dimensions (channels
last), in memory's order, and all others in their shape's. So do the residuals.
"""

from __future__ import annotations

import torch

from pycollective.errors import ConfigurationError


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and length of each side of several elements; the stride of another means nothing."""
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in sides if size != 1]


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after another, none twice, without gaps."""
    step = 1
    for stride, size in sorted(_strides(tensor)):
        if stride != step:
            return False
        step *= size
    return True


def has_own_order(parameter: torch.Tensor) -> bool:
    """Whether what is kept of it lies in memory's order, and that is not its shape's."""
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
    """What is kept of a parameter, in its shape, and laid out in memory as it is kept."""
    if has_own_order(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def in_memory(shaped: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse, flat, of elements in the shape's order."""
    if not has_own_order(parameter):
        return shaped
    flat = torch.empty(parameter.numel(), dtype=shaped.dtype)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(shaped.view(parameter.shape))
    return flat
