"""An ordered reduction by torch's own operations, with the bits of the kernels on every device.

Not a cast to a narrow type among them: whether one keeps subnormals, saturates or is rounded twice
differs with devices and versions (docs/contract.md). Words are rounded as integers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycollective.order import TAKE
from pycollective.triton.formats import FORMATS, NARROW, Format, words

_COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{"sum": torch.add, "avg": torch.add, "prod": torch.mul},
    **{"min": torch.minimum, "max": torch.maximum},
    **{"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor},
}


def reduce(
    terms: torch.Tensor,
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
    finish: bool,
) -> None:
    """Combine the rows of `terms` into `out`; as `pycollective.triton.reduce.reduce`, of any
    number of rows."""
    rows = iter(terms)
    waiting: list[torch.Tensor] = []
    for each in recipe:
        if each == TAKE:
            waiting.append(_taken(next(rows), op))
        else:
            right = waiting.pop()
            waiting[-1] = _COMBINED[op](waiting[-1], right)
    (x,) = waiting
    if op == "avg" and finish:
        x = _divided(x, leaves)
    if dtype in FORMATS:
        if op in ("min", "max"):
            x = _flipped(x)
        elif out.dtype in NARROW:
            x = _rounded(x, words(out).dtype, FORMATS[out.dtype])
        else:
            x = words(x)
        if finish:
            x = x.masked_fill(_is_nan(x, FORMATS[out.dtype]), FORMATS[out.dtype].nan)
    words(out).copy_(x)


def _taken(row: torch.Tensor, op: str) -> torch.Tensor:
    """What is combined: floats in the accumulator's type, words for all else."""
    if row.dtype not in FORMATS:
        return words(row)
    if op in ("sum", "avg", "prod"):
        return row.to(torch.float32) if row.dtype in NARROW else row
    word = words(row)
    limits = torch.iinfo(word.dtype)
    nan = limits.min if op == "min" else limits.max
    return _flipped(word).masked_fill(_is_nan(word, FORMATS[row.dtype]), nan)


def _divided(total: torch.Tensor, leaves: int) -> torch.Tensor:
    if total.dtype.is_floating_point:
        # By a Python number torch does not divide on a GPU: it multiplies by the reciprocal.
        return total / torch.full((), leaves, dtype=total.dtype, device=total.device)
    # In a type that has `leaves`. The quotient fits the sum's.
    return torch.div(total.to(torch.int64), leaves, rounding_mode="trunc")


def _magnitude(word: torch.Tensor) -> torch.Tensor:
    return word & torch.iinfo(word.dtype).max


def _is_nan(word: torch.Tensor, of: Format) -> torch.Tensor:
    return _magnitude(word) > of.greatest


def _flipped(word: torch.Tensor) -> torch.Tensor:
    """Words whose order as integers is that of the floats, -0 below +0; twice gives the words."""
    limits = torch.iinfo(word.dtype)
    return word ^ ((word >> (limits.bits - 1)) & limits.max)


def _rounded(x: torch.Tensor, dtype: torch.dtype, to: Format) -> torch.Tensor:
    """The words, of `dtype`, that are nearest to fp32 numbers, ties to even."""
    sign = torch.iinfo(dtype).bits - 1
    bias = (1 << (sign - to.mantissa - 1)) - 1
    cut = 23 - to.mantissa
    bits = words(x)
    magnitude = _magnitude(bits)
    half = ((magnitude >> cut) & 1) + ((1 << (cut - 1)) - 1)
    word = (magnitude + half - ((127 - bias) << 23)) >> cut
    if bias < 127:
        # The last bit of this power of two is worth the format's least number, so the addition of a
        # subnormal of the format rounds it.
        power = torch.full_like(bits, (127 + 24 - bias - to.mantissa) << 23)
        small = words(magnitude.view(torch.float32) + power.view(torch.float32)) - power
        word = torch.where(magnitude < (128 - bias) << 23, small, word)
    # Without an infinity, NaN is next to the greatest number.
    overflown = to.greatest if to.greatest & ((1 << to.mantissa) - 1) == 0 else to.greatest + 1
    word = word.clamp(max=overflown).masked_fill(magnitude > 0x7F800000, to.nan)
    return (word | ((bits >> 31) << sign)).to(dtype)
