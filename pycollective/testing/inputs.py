"""Inputs whose reduction depends on the order of the additions.

With ordinary random inputs almost no sum depends on the order, and a count of wrong bits would
prove nothing. Here each element meets cancellation: one leaf holds a large number, another its
negation, the rest small ones, so the order decides which low bits survive. (Two leaves have only
one order, and would leave nothing.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.dtypes import TRAITS, numpy_type

# Exponents of the numbers that cancel, least and end ...
LARGE = {
    **{"float8_e5m2": (13, 15), "float16": (9, 15), "bfloat16": (-20, 20)},
    **{"float32": (-20, 20), "float64": (-20, 20)},
}
# ... and how many powers of two below them the small ones lie: by so many, a sum loses some of the
# small ones' bits, or all, where a large one is added before it is cancelled.
# (Sums of e4m3fn lose nothing: all its multiples are fewer than fp32 has.)
BELOW = {
    **{"float8_e5m2": (23, 29), "float16": (14, 25), "bfloat16": (17, 29)},
    **{"float32": (1, 25), "float64": (1, 54)},
}


def exponent_bias(dtype: str) -> int:
    """Return the bias of a float's exponent: all bits but the mantissa's and the sign are its."""
    return (1 << (8 * TRAITS[dtype].size - TRAITS[dtype].mantissa - 2)) - 1


def exponents_of(dtype: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a float's rows of `LARGE` and `BELOW`; without one, all of a narrow one's range."""
    bias = exponent_bias(dtype)
    below = 1, bias + TRAITS[dtype].mantissa
    return LARGE.get(dtype, (bias // 2, bias)), BELOW.get(dtype, below)


def leaves(dtype: str, reduce_op: str, ranks: int, count: int, seed: int) -> list[NDArray[Any]]:
    """Return one array of `count` elements a rank, such that the order of a reduction shows.

    With three ranks or more, over half of all sums of floats change when the leaves are rotated by
    one (tests/test_reference.py counts them), but none of float8_e4m3fn, which are exact. Products
    show it in 32 and 64 bits alone: those of narrower types are nearly exact in fp32. Integers take
    all values.
    """
    random = np.random.default_rng([seed, ranks, count])
    element = numpy_type(dtype)
    if element.kind == "b":
        return [random.integers(0, 2, count).astype(element) for _ in range(ranks)]
    if element.kind in "iu":
        limits = np.iinfo(element)
        return [
            random.integers(limits.min, limits.max, count, element, endpoint=True)
            for _ in range(ranks)
        ]
    signs = random.choice([-1, 1], (ranks, count))
    if reduce_op == "prod":  # near 1, so that products stay in range
        return list((signs * np.exp2(random.uniform(-1, 1, (ranks, count)))).astype(element))
    above, under = exponents_of(dtype)
    exponents = random.integers(*above, count)
    below = random.integers(*under, (ranks, count))
    values = signs * np.ldexp(1 + random.random((ranks, count)), exponents - below)
    if ranks > 2:  # in each element two ranks, any two, hold a large number and its negation
        large = np.ldexp(1 + random.random(count), exponents) * random.choice([-1, 1], count)
        first = random.integers(0, ranks, count)
        second = (first + random.integers(1, ranks, count)) % ranks
        columns = np.arange(count)
        values[first, columns] = large
        values[second, columns] = -large
    return list(values.astype(element))


# From here on: inputs that are the same bits on every machine, for the digest of `pycollective
# verify`. NumPy's are not: the streams of its `Generator` may change with its version, and its
# transcendental functions differ in the last bit from one instruction set to another. All numbers
# are made of integers by a generator of four lines: splitmix64 (Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014, figure 17). Besides, a quarter of the
# elements are special: any bits at all on every rank (NaNs with payloads, infinities, subnormals),
# or zeros of both signs.
_Words = NDArray[np.uint64]

_ANY_BITS, _ZEROS = 0.2, 0.05  # share of the elements that are special so


def portable_leaves(dtype: str, reduce_op: str, ranks: int, count: int) -> list[NDArray[Any]]:
    """Return one array of `count` elements a rank, such that the order of a reduction shows.

    Element `i` is the same for every `count`. For ``prod`` floats are near 1, so that products stay
    in range; all other operations have the same inputs.
    """
    element = numpy_type(dtype)
    bits = 8 * element.itemsize
    raw = [_words(1 + rank, count) for rank in range(ranks)]
    if element.kind in "biu":
        used = 1 if element.kind == "b" else bits
        words = [each >> np.uint64(64 - used) for each in raw]
    else:
        words = _floats(dtype, bits, reduce_op == "prod", raw, _words(0, count))
    unsigned = np.dtype(f"u{element.itemsize}")
    return [each.astype(unsigned).view(element) for each in words]


def _floats(
    dtype: str, bits: int, product: bool, raw: list[_Words], column: _Words
) -> list[_Words]:
    """Return the words of floats: sign, exponent and mantissa out of random bits."""
    ranks, mantissa = len(raw), TRAITS[dtype].mantissa
    bias = exponent_bias(dtype)
    above, below = exponents_of(dtype)
    sign = np.uint64(1 << (bits - 1))

    def number(word: _Words, exponent: NDArray[np.int64]) -> _Words:
        biased = np.maximum(exponent + bias, 0).astype(np.uint64) << np.uint64(mantissa)
        return (word >> np.uint64(63)) * sign | biased | word & np.uint64((1 << mantissa) - 1)

    if product:
        words = [number(word, _pick(word, 52, 11, -1, 1)) for word in raw]
    else:
        exponent = _pick(column, 0, 16, *above)
        words = [number(word, exponent - _pick(word, 52, 11, *below)) for word in raw]
        if ranks > 2:
            large = number(_mixed(column), exponent)
            first = _pick(column, 16, 16, 0, ranks)
            second = (first + _pick(column, 32, 16, 1, ranks)) % ranks
            for rank, word in enumerate(words):
                np.copyto(word, large, where=first == rank)
                np.copyto(word, large ^ sign, where=second == rank)
    special = column >> np.uint64(48)
    any_bits = special < int(_ANY_BITS * 2**16)
    zeros = ~any_bits & (special < int((_ANY_BITS + _ZEROS) * 2**16))
    for word, random in zip(words, raw, strict=True):
        np.copyto(word, random >> np.uint64(64 - bits), where=any_bits)
        np.copyto(word, (random >> np.uint64(63)) * sign, where=zeros)
    return words


def _pick(word: _Words, shift: int, bits: int, least: int, end: int) -> NDArray[np.int64]:
    """Return an integer from `least` to ``end - 1`` out of some bits of each word."""
    part = (word >> np.uint64(shift) & np.uint64((1 << bits) - 1)).astype(np.int64)
    return least + (part * (end - least) >> bits)


def _words(stream: int, count: int) -> _Words:
    """Return the first words of one of 2**32 streams."""
    start = stream << 32
    return _mixed(np.arange(start, start + count, dtype=np.uint64))


def _mixed(numbers: _Words) -> _Words:
    """Return splitmix64's words at these places of its sequence."""
    word = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)
