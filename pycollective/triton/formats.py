"""The floating-point formats that a reduction reads and rounds to, by torch's dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch


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


def words(x: torch.Tensor) -> torch.Tensor:
    """Floats and bools as the integers that have their bits; integers as they are."""
    if x.dtype is torch.bool:
        return x.view(torch.uint8)
    return x.view(_WORDS[x.element_size()]) if x.dtype in FORMATS else x
