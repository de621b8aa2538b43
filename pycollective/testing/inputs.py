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

# Exponents of the numbers that cancel, least and end ... (here and in `portable_inputs.py`)
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
