"""Inputs that can tell orders of addition apart."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]
OPS = ["sum", "avg", "prod", "min", "max", "band", "bor", "bxor"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def words(x: np.ndarray) -> np.ndarray:
    """The bits of an array, as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def from_words(bits: Sequence[int] | np.ndarray, dtype: str) -> np.ndarray:
    """The array that has these bits."""
    kind = dtype_of(dtype)
    return np.array(bits, f"u{kind.itemsize}").view(kind)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# How many powers of two below the numbers that cancel the small ones lie: by so many, a sum loses
# some of the small ones' bits, or all, where a large one is added before it is cancelled.
_BELOW = {"float16": (14, 24), "bfloat16": (17, 28), "float32": (1, 24), "float64": (1, 53)}
_LARGE = {"float16": (9, 15), "bfloat16": (-20, 20), "float32": (-20, 20), "float64": (-20, 20)}


def order_sensitive(dtype: str, ranks: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """One leaf a rank: magnitudes over a wide range, which cancel between two ranks.

    With three ranks or more, over half of all sums change when the leaves are rotated by one
    (tests/test_reference.py counts them). Integers take all values.
    """
    random = np.random.default_rng([seed, ranks, count])
    kind = dtype_of(dtype)
    if dtype == "bool":
        return [random.integers(0, 2, count).astype(bool) for _ in range(ranks)]
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        return [
            random.integers(info.min, info.max, count, dtype=kind, endpoint=True)
            for _ in range(ranks)
        ]
    exponents = random.integers(*_LARGE[dtype], count)
    below = random.integers(*_BELOW[dtype], (ranks, count), endpoint=True)
    leaves = np.ldexp(1 + random.random((ranks, count)), exponents - below)
    leaves *= random.choice([-1, 1], (ranks, count))
    # In each element two ranks, any two, hold a large number and its negation.
    large = np.ldexp(1 + random.random(count), exponents) * random.choice([-1, 1], count)
    first = random.integers(0, ranks, count)
    second = (first + random.integers(1, max(ranks, 2), count)) % ranks
    leaves[first, np.arange(count)] = large
    leaves[second, np.arange(count)] = -large
    return [row.astype(kind) for row in leaves]


def awkward(dtype: str, ranks: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """`order_sensitive`, with any bits at all in a third of the elements: NaNs with payloads,
    infinities, subnormals, zeros of both signs."""
    leaves = order_sensitive(dtype, ranks, count, seed)
    if dtype not in FLOATS or count == 0:
        return leaves
    random = np.random.default_rng([seed, 1])
    for leaf in leaves:
        bits = words(leaf)
        special = random.random(count) < 1 / 3
        bits[special] = random.integers(
            0, np.iinfo(bits.dtype).max, special.sum(), dtype=bits.dtype, endpoint=True
        )
        zero = random.random(count) < 0.1
        bits[zero] = (bits[zero] >> (8 * bits.dtype.itemsize - 1)) << (8 * bits.dtype.itemsize - 1)
    return leaves


def subnormal(dtype: str, ranks: int, count: int) -> list[np.ndarray]:
    """One leaf a rank of floats around the least normal one, half of them below it."""
    fraction = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    random = np.random.default_rng([ranks, count])
    word = np.dtype(f"u{dtype_of(dtype).itemsize}")
    bits = random.integers(0, 2 << fraction, (ranks, count), dtype=word)
    bits |= random.integers(0, 2, bits.shape, dtype=word) << word.type(8 * word.itemsize - 1)
    return list(from_words(bits, dtype))
