"""The floating-point formats that kernels read, by torch's dtype, and checks of their tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import torch

from pycollective.errors import ConfigurationError


class Format(NamedTuple):
    """A float's bits are a sign, an exponent and a mantissa, from the highest bit down.

    Attributes:
        mantissa: its bits.
        greatest: the highest magnitude that is no NaN: infinity, where the format has one.
        nan: the word of the contract's one NaN.
    """

    mantissa: int
    greatest: int
    nan: int


FORMATS = {
    torch.float8_e4m3fn: Format(3, 0x7E, 0x7F),
    torch.float8_e5m2: Format(2, 0x7C, 0x7E),
    torch.float16: Format(10, 0x7C00, 0x7E00),
    torch.bfloat16: Format(7, 0x7F80, 0x7FC0),
    torch.float32: Format(23, 0x7F800000, 0x7FC00000),
    torch.float64: Format(52, 0x7FF0 << 48, 0x7FF8 << 48),
}
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
# Words are signed integers, in which a shift to the right repeats the sign.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """The contract's name of torch's dtype; others have none there."""
    return str(dtype).removeprefix("torch.")


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: Collection[torch.dtype],
    least: int,
    device: torch.device,
) -> None:
    """Refuse an argument that a kernel would misread.

    Args:
        name: of the argument, for the error.
        dtypes: those that it may have.
        least: how many elements it must have; more are no error.
        device: where it must be.

    Raises:
        ConfigurationError: it is not as said, or not contiguous.
    """
    good = tensor.dtype in dtypes and tensor.numel() >= least and tensor.device == device
    if good and tensor.is_contiguous():
        return
    kinds = " or ".join(map(name_of, dtypes))
    strided = "" if tensor.is_contiguous() else "strided "
    raise ConfigurationError(
        f"{name} must have at least {least} contiguous elements of {kinds} on {device}, "
        f"not {tensor.numel()} {strided}ones of {name_of(tensor.dtype)} on {tensor.device}"
    )


def word_of(dtype: torch.dtype) -> torch.dtype:
    """The integers that have the bits of floats and bools; of integers themselves."""
    if dtype is torch.bool:
        return torch.uint8
    return _WORDS[dtype.itemsize] if dtype in FORMATS else dtype


def words(x: torch.Tensor) -> torch.Tensor:
    """Floats and bools as the integers that have their bits; integers as they are."""
    word = word_of(x.dtype)
    return x if word is x.dtype else x.view(word)
