"""Ordered reductions, and what they send, by torch's own operations; with the bits of the kernels
on every device.

Not a cast to a narrow type among them: whether one keeps subnormals, saturates or is rounded twice
differs with devices and versions (contract.md). Words are rounded as integers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycollective.order import TAKE
from pycollective.triton.formats import FORMATS, NARROW, Format, words
from pycollective.triton.header_check import BYTES, FITS, NUMBER, WORDS, Check

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
    leaves: int | torch.Tensor,
    dtype: torch.dtype,
    finish: bool,
    check: Check | None = None,
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
    if check is not None:
        compare(out, check)


def compare(out: torch.Tensor, check: Check) -> None:
    """Compare headers, make `out` NaN where they differ, tell the host, and count the call.

    As the end of `pycollective.triton.reduce.reduce` does it; see `Check`.
    """
    heads = check.rows[:, :WORDS]
    differs = (heads[:, :FITS] != check.own[:FITS]).any() | (heads[:, FITS] == 0).any()
    if out.dtype in FORMATS:
        words(out).masked_fill_(differs, FORMATS[out.dtype].nan)
    said = heads.clone()
    said[check.rank] = check.own
    found = check.found.to(heads.device, non_blocking=True)
    is_first = differs & (found[0] == 0)
    # The flag behind the headers: a host that sees it sees them.
    check.found[1:].copy_(torch.where(is_first, said.flatten(), found[1:]), non_blocking=True)
    check.found[:1].copy_(found[:1] | differs, non_blocking=True)
    if check.last:
        check.number.add_(1)


def lay_out(
    leaves: torch.Tensor,
    step: int,
    size: int,
    rows: torch.Tensor,
    header: Sequence[int],
    number: torch.Tensor,
    own: torch.Tensor,
    fits: torch.Tensor | None = None,
) -> None:
    """Write messages: a header each, and a part of the leaves; as `pycollective.triton.rows`."""
    heads = rows[:, :BYTES].view(torch.int64)
    told: list[int | torch.Tensor] = list(header)
    told[NUMBER] = number + 1
    if fits is not None:
        told[FITS] = fits
    for word, value in enumerate(told):  # as an argument of its kernel a number is not uploaded
        heads[:, word] = value
    own.copy_(heads[0])
    parts = rows[:, BYTES:][:, : size * leaves.itemsize].view(leaves.dtype)
    full = 0
    if step and leaves.numel() >= size:
        full = min(len(rows), (leaves.numel() - size) // step + 1)
        parts[:full].copy_(leaves.as_strided((full, size), (step, 1), leaves.storage_offset()))
    for i in range(full, len(rows)):
        part = leaves[i * step : i * step + size]
        parts[i, : part.numel()].copy_(part)


def narrowed(leaves: torch.Tensor, out: torch.Tensor, fits: torch.Tensor) -> None:
    """Cast leaves to a narrow type; as `pycollective.triton.rows.narrowed`."""
    to = FORMATS[out.dtype]
    is_nan = leaves.isnan()
    word = _rounded(leaves, words(out).dtype, to).masked_fill_(is_nan, to.nan)
    words(out).copy_(word)
    fits.copy_(((words(out.to(torch.float32)) == words(leaves)) | is_nan).all())


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


def _divided(total: torch.Tensor, leaves: int | torch.Tensor) -> torch.Tensor:
    if isinstance(leaves, torch.Tensor):  # whether fp32 holds it the host would have to ask
        return (total.to(torch.float64) / leaves).to(total.dtype)
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
