"""The contract in NumPy: every kernel, algorithm and transport must give the same bits.

As short as it can be, and independent of the native code. ``contract.md`` says it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective.order import split

_ACCUMULATOR = dict.fromkeys(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), np.float32)
_NAN = {
    **{"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E, "float16": 0x7E00, "bfloat16": 0x7FC0},
    **{"float32": 0x7FC00000, "float64": 0x7FF8 << 48},
}
_FLOATS = frozenset(_NAN)


def tree(leaves: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """The root of the order over ``leaves``, with ``combine`` at each inner node."""

    def node(lo: int, hi: int) -> Any:
        if hi - lo == 1:
            return leaves[lo]
        middle = split(lo, hi)
        return combine(node(lo, middle), node(middle, hi))

    return node(0, len(leaves))


def reduce(
    inputs: Sequence[np.ndarray],
    op: str = "sum",
    divisor: float | None = None,
    dtype: Any = None,
) -> np.ndarray:
    """Reduce leaves, all of one shape, to an array of that shape; bits as promised.

    Args:
        inputs: the leaves, in order: one of each rank, or the micro-batches of all ranks.
        op: how they are combined.
        divisor: what "avg" divides by, in place of the number of leaves.
        dtype: the result's, a float's if it is not the leaves' own; that of the first if omitted.

    Raises:
        ValueError: ``op`` has no meaning for the dtype.
    """
    with np.errstate(all="ignore"):
        return _reduce(inputs, op, divisor, np.dtype(dtype or inputs[0].dtype))


def is_defined(dtype: np.dtype[Any], op: str) -> bool:
    """Whether ``op`` has a meaning for ``dtype``."""
    try:
        reduce([np.zeros(1, dtype)], op)
    except ValueError:
        return False
    return True


def _reduce(
    inputs: Sequence[np.ndarray], op: str, divisor: float | None, dtype: np.dtype[Any]
) -> np.ndarray:
    name = dtype.name
    if op in ("min", "max"):
        result = tree(inputs, _minimum if op == "min" else _maximum)
    elif op in ("band", "bor", "bxor") and name not in _FLOATS:
        functions = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
        result = tree(inputs, functions[op])
    elif op in ("sum", "prod", "avg") and name != "bool":
        wide = [x.astype(_ACCUMULATOR.get(x.dtype.name, x.dtype)) for x in inputs]
        result = tree(wide, np.multiply if op == "prod" else np.add)
        if op == "avg":
            result = _divided(result, divisor or len(inputs))
        result = result.astype(dtype)
    else:
        raise ValueError(f"{op} has no meaning for {name}")
    if name in _FLOATS:
        words = result.view(f"u{dtype.itemsize}").copy()
        words[np.isnan(result)] = _NAN[name]
        result = words.view(dtype)
    return result


def _divided(total: np.ndarray, n: float) -> np.ndarray:
    """In fp64, rounded to the accumulator; of integers the quotient, cut towards zero."""
    if total.dtype.kind not in "iu":
        return (total.astype(np.float64) / n).astype(total.dtype)
    wide = total.astype(np.int64)  # which has the numbers of all types, and `n`
    return (wide - np.fmod(wide, n)) // n


def _minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IEEE-754-2019 minimum: a NaN wins, and -0 is below +0."""
    below = (a < b) | (np.isnan(a)) | ((a == b) & _negative(a))
    return np.where(below, a, b)


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    above = (a > b) | (np.isnan(a)) | ((a == b) & ~_negative(a))
    return np.where(above, a, b)


def _negative(a: np.ndarray) -> np.ndarray:
    return np.signbit(a) if a.dtype.name in _FLOATS else np.zeros(a.shape, bool)


def shards(count: int, ranks: int) -> list[slice]:
    """The equal shards of ``count`` elements, a multiple of ``ranks``, in rank order."""
    each = count // ranks
    return [slice(r * each, (r + 1) * each) for r in range(ranks)]


def all_reduce(inputs: Sequence[np.ndarray], op: str = "sum") -> list[np.ndarray]:
    """What each rank ends with."""
    return [reduce(inputs, op)] * len(inputs)


def reduce_scatter(inputs: Sequence[np.ndarray], op: str = "sum") -> list[np.ndarray]:
    """What each rank ends with: its equal shard of the reduction of flat inputs."""
    whole = reduce(inputs, op)
    return [whole[shard] for shard in shards(len(whole), len(inputs))]


def all_gather(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What each rank ends with: every rank's flat input in rank order, byte for byte."""
    return [np.concatenate(inputs)] * len(inputs)


def all_to_all(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What each rank ends with: its shard of every rank's flat input, in rank order."""
    parts = shards(len(inputs[0]), len(inputs))
    return [np.concatenate([x[part] for x in inputs]) for part in parts]


def squares(array: np.ndarray | None) -> float:
    """The sum of an array's squares, in float64: 8 lanes a row of dimension 0, then over rows."""
    if array is None or array.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        rows = array.astype(np.float64).reshape(array.shape[0] if array.ndim else 1, -1)
        lanes = np.zeros((len(rows), 8))
        for element in range(rows.shape[1]):
            lanes[:, element % 8] += rows[:, element] * rows[:, element]
        return float(tree(tree(lanes.T, np.add), np.add))


def norm(arrays: Sequence[np.ndarray | None]) -> float:
    """The L2 norm of all arrays together, of which None is +0."""
    return float(np.sqrt(tree([squares(each) for each in arrays], np.add)))
