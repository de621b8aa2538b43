"""Words of floats, in kernels: the fp32 numbers that they are, and the nearest ones of a format.

All give the same bits on every target and in Triton's interpreter (contract.md). Words are
signed integers; a format is a row of `formats.FORMATS`, as a tuple.

GPUs of NVIDIA convert by an instruction, where they have one, which has these bits but for NaNs.
Elsewhere integers do it. Triton's interpreter rounds otherwise.
"""

from __future__ import annotations

import re
from typing import Any

import triton
import triton.language as tl


def _is_nvidia(least: Any, _semantic: Any = None) -> tl.constexpr:
    """Whether the kernel is compiled for a GPU of NVIDIA, of this compute capability at least."""
    options = _semantic.builder.options if _semantic else None
    found = re.fullmatch(r"sm(\d+)a?", getattr(options, "arch", None) or "")
    return tl.constexpr(found is not None and int(found[1]) >= getattr(least, "value", least))


# So that the compiler calls it, with what it compiles for.
_is_nvidia.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def widened(word, TYPE: tl.constexpr):
    """The fp32 or fp64 number that a word of this type is; exact, subnormals too."""
    if TYPE == "float64":
        return word.to(tl.float64, bitcast=True)
    elif TYPE == "float32":
        return word.to(tl.float32, bitcast=True)
    elif TYPE == "bfloat16":
        return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == "float16":
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == "float8_e5m2":  # the upper half of a float16
        return (word.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(TYPE == "float8_e4m3fn")
        if _is_nvidia(89):
            return word.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            # Its exponent and mantissa, in a float16, are 2**8 times too small. The bit that is
            # masked is a second copy of the sign.
            half = ((word.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
            return tl.where((word & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def word_at(at, mask, BYTES: tl.constexpr):
    """The words of so many bytes that begin there, aligned or not, in 32 bits; 0 where masked."""
    other = None if mask is None else 0
    word = tl.load(at, mask=mask, other=other).to(tl.int32)
    for byte in tl.static_range(1, BYTES):
        word |= tl.load(at + byte, mask=mask, other=other).to(tl.int32) << (8 * byte)
    return word


@triton.jit
def divided(x, divisor):
    """fp32 numbers by a number: Triton's own / is not IEEE's, and by a scalar there is no other.

    By a power of two multiply instead: by its reciprocal, which gives the same bits.
    """
    return tl.div_rn(x, tl.full(x.shape, divisor, tl.float32))


@triton.jit
def divided_in_fp64(x, divisor):
    """fp32 numbers by an fp64 number, in fp64, and the quotients rounded to fp32. Where fp32 holds
    the divisor a division in fp32 has these bits (contract.md), so only others take the time.
    """
    narrow = divisor.to(tl.float32)
    if narrow.to(tl.float64) == divisor:
        x = divided(x, narrow)
    else:  # also by a NaN
        x = (x.to(tl.float64) / tl.full(x.shape, divisor, tl.float64)).to(tl.float32)
    return x


@triton.jit
def rounded(x, WORD: tl.constexpr, FORMAT: tl.constexpr):
    """The words of a format that are nearest to fp32 numbers, ties to even; those of fp32 and fp64
    are the numbers'. A NaN becomes any one."""
    if WORD.primitive_bitwidth >= 32:
        return x.to(WORD, bitcast=True)
    elif WORD.primitive_bitwidth == 16 and _is_nvidia(80):
        FLOAT: tl.constexpr = tl.float16 if FORMAT[0] == 10 else tl.bfloat16
        return x.to(FLOAT).to(WORD, bitcast=True)
    else:
        return _nearest(x, WORD, FORMAT)


@triton.jit
def _nearest(x, WORD: tl.constexpr, FORMAT: tl.constexpr):
    MANTISSA: tl.constexpr = FORMAT[0]
    GREATEST: tl.constexpr = FORMAT[1]
    BITS: tl.constexpr = WORD.primitive_bitwidth
    BIAS: tl.constexpr = (1 << (BITS - MANTISSA - 2)) - 1
    CUT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    half = ((magnitude >> CUT) & 1) + ((1 << (CUT - 1)) - 1)
    word = (magnitude + half - ((127 - BIAS) << 23)) >> CUT
    if BIAS < 127:
        # The last bit of this power of two is worth the format's least number, so the addition of a
        # subnormal of the format rounds it.
        POWER: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
        power = tl.full(x.shape, POWER, tl.int32).to(tl.float32, bitcast=True)
        small = (magnitude.to(tl.float32, bitcast=True) + power).to(tl.int32, bitcast=True)
        word = tl.where(magnitude < ((128 - BIAS) << 23), small - POWER, word)
    # Without an infinity, NaN is next to the greatest number.
    OVERFLOWN: tl.constexpr = GREATEST if GREATEST & ((1 << MANTISSA) - 1) == 0 else GREATEST + 1
    word = tl.where(magnitude > 0x7F800000, FORMAT[2], tl.minimum(word, OVERFLOWN))
    return (word | ((bits >> 31) << (BITS - 1))).to(WORD)


@triton.jit
def is_nan(word, FORMAT: tl.constexpr):
    """Whether words of this format are NaNs."""
    return (word & ((1 << (word.dtype.primitive_bitwidth - 1)) - 1)) > FORMAT[1]


@triton.jit
def is_not_finite(word, FORMAT: tl.constexpr):
    """Whether words of this format, which has an infinity, are infinities or NaNs."""
    return (word & ((1 << (word.dtype.primitive_bitwidth - 1)) - 1)) >= FORMAT[1]


@triton.jit
def with_one_nan(word, FORMAT: tl.constexpr):
    """Words of this format; each NaN is the contract's."""
    return tl.where(is_nan(word, FORMAT), FORMAT[2], word).to(word.dtype)


@triton.jit
def narrowed(x, WORD: tl.constexpr, FORMAT: tl.constexpr):
    """Words of results: rounded once, with the contract's NaN."""
    word = rounded(x, WORD, FORMAT)
    if FORMAT[0] == 7:  # of bfloat16 fewer instructions than by its words
        return tl.where(x != x, FORMAT[2], word).to(WORD)
    else:
        return with_one_nan(word, FORMAT)
