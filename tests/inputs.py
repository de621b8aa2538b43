"""Inputs that can tell orders of addition apart."""

from __future__ import annotations

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


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def order_sensitive(dtype: str, ranks: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """One leaf a rank: magnitudes over a wide range, which cancel between neighbouring ranks.

    With three ranks or more, about half of all fp32 sums and a quarter of bf16 sums change with
    the order of the additions. Integers take all values.
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
    spread = 4 if dtype == "float16" else 12
    base = random.standard_normal((ranks, count)) * np.exp2(
        random.integers(-spread, spread + 1, (ranks, count))
    )
    # A quarter of the elements nearly cancel against another rank's.
    for r in range(1, ranks):
        cancel = random.random(count) < 0.25
        base[r, cancel] = -base[r - 1, cancel] * (1 + 2.0**-9 * random.standard_normal())
    return [row.astype(kind) for row in base]


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
