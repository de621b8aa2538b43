"""Inputs that can tell orders of addition apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pycollective import _core, reference
from pycollective.dtypes import numpy_type as dtype_of
from pycollective.testing.inputs import exponent_bias, leaves

TRAITS = {each.name: each for each in _core.dtypes()}
DTYPES = list(TRAITS)
FLOATS = [name for name, each in TRAITS.items() if each.numbers == "float"]
# Whose sums of a few ranks show the order: all multiples of the least number up to the largest are
# more than the accumulator can hold.
ORDERED = [
    name
    for name in FLOATS
    if TRAITS[name].accumulator == TRAITS[name].size
    or 2 * exponent_bias(name) + TRAITS[name].mantissa > 24
]
EIGHT_BITS = [name for name in FLOATS if TRAITS[name].size == 1]
INTEGERS = [name for name, each in TRAITS.items() if each.numbers == "integer"]
OPS = _core.reduce_ops()
PAIRS = [(d, op) for d in DTYPES for op in OPS if reference.is_defined(dtype_of(d), op)]


def read_only(array: Any) -> Any:
    """The array itself, which nothing may write to any more."""
    array.flags.writeable = False
    return array


def crossed(ranks: Sequence[int], kinds: Sequence[Any]) -> list[tuple[Any, ...]]:
    """(ranks, *kind) for each kind, a dtype or a pair; of floats of a byte, in turns, half of them.

    What these add is how they round, which the tests of kernels have in full. Averages are by 3
    ranks too: a division by 2, 4 or 8 is exact.
    """
    found = []
    for row, number in enumerate(ranks):
        for column, kind in enumerate(kinds):
            parts = (kind,) if isinstance(kind, str) else kind
            by_three = number == 3 and parts[-1] == "avg"
            if parts[0] not in EIGHT_BITS or (row + column) % 2 == 0 or by_three:
                found.append((number, *parts))
    return found


def crossed_in_turns(ranks: Sequence[int], kinds: Sequence[Any]) -> list[Any]:
    """`crossed`; the usual run has each kind with one of the numbers, in turns, and also averages
    with 3."""
    turns = {
        (ranks[column % len(ranks)], *((kind,) if isinstance(kind, str) else kind))
        for column, kind in enumerate(kinds)
    }
    return [
        pytest.param(
            *each,
            marks=() if each in turns or (each[0], each[-1]) == (3, "avg") else pytest.mark.storm,
        )
        for each in crossed(ranks, kinds)
    ]


def words(x: np.ndarray) -> np.ndarray:
    """The bits of an array, as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def from_words(bits: Sequence[int] | np.ndarray, dtype: str) -> np.ndarray:
    """The array that has these bits."""
    kind = dtype_of(dtype)
    return np.array(bits, f"u{kind.itemsize}").view(kind)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def order_sensitive(dtype: str, ranks: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """One leaf a rank, such that the order of a sum shows: see `leaves`."""
    return leaves(dtype, "sum", ranks, count, seed)


def awkward(dtype: str, ranks: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """`order_sensitive`, with any bits at all in a third of the elements: NaNs with payloads,
    infinities, subnormals, zeros of both signs."""
    inputs = order_sensitive(dtype, ranks, count, seed)
    if dtype not in FLOATS or count == 0:
        return inputs
    random = np.random.default_rng([seed, 1])
    for leaf in inputs:
        bits = words(leaf)
        special = random.random(count) < 1 / 3
        bits[special] = random.integers(
            0, np.iinfo(bits.dtype).max, special.sum(), dtype=bits.dtype, endpoint=True
        )
        zero = random.random(count) < 0.1
        bits[zero] = (bits[zero] >> (8 * bits.dtype.itemsize - 1)) << (8 * bits.dtype.itemsize - 1)
    return inputs


def subnormal(dtype: str, ranks: int, count: int) -> list[np.ndarray]:
    """One leaf a rank of floats around the least normal one, half of them below it."""
    fraction = TRAITS[dtype].mantissa
    random = np.random.default_rng([ranks, count])
    word = np.dtype(f"u{dtype_of(dtype).itemsize}")
    bits = random.integers(0, 2 << fraction, (ranks, count), dtype=word)
    bits |= random.integers(0, 2, bits.shape, dtype=word) << word.type(8 * word.itemsize - 1)
    return list(from_words(bits, dtype))
