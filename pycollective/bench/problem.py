"""Order-sensitive inputs and the oracle's answer, where every library's ranks can read them.

With ordinary random inputs almost no sum depends on the order of the additions, and counting wrong
bits would prove nothing. Here each element meets cancellation: one leaf holds a large number,
another its negation, the rest small ones, so that the order decides which low bits survive. (Two
leaves have only one order; from three on the count is telling.)
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import reference
from pycollective.bench.operations import Operation
from pycollective.bench.ranks.case import Case
from pycollective.errors import ConfigurationError

# Longer messages repeat the first PERIOD elements. A prime, so that no power-of-two piece of a
# message equals another, and a piece put in the wrong place is still seen.
PERIOD = 1_048_573

DTYPES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
# nccl-tests' names for some of them.
ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
REDUCE_OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")

# Exponents of the large numbers that cancel: far above the small ones, and no overflow.
_CANCELLING_EXPONENTS = {
    "float16": (8, 15),
    "bfloat16": (8, 24),
    "float32": (8, 24),
    "float64": (4, 50),
}


def numpy_type(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of `DTYPES`.

    Raises:
        ConfigurationError: bfloat16 without ml_dtypes, or an unknown name.
    """
    if name not in DTYPES:
        raise ConfigurationError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigurationError(
            "bfloat16 needs ml_dtypes in NumPy: pip install ml_dtypes"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def leaves(dtype: str, reduce_op: str, ranks: int, count: int, seed: int) -> list[NDArray[Any]]:
    """One array of `count` elements a rank, such that the order of a reduction shows."""
    rng = np.random.default_rng([seed, ranks])
    element = numpy_type(dtype)
    if element.kind == "b":
        return [rng.integers(0, 2, count).astype(element) for _ in range(ranks)]
    if element.kind in "iu":
        limits = np.iinfo(element)
        return [
            rng.integers(limits.min, limits.max, count, element, endpoint=True)
            for _ in range(ranks)
        ]
    # Wide-ranging small numbers: some have bits below what a large one leaves room for.
    values = np.ldexp(rng.standard_normal((ranks, count)), -rng.integers(0, 9, (ranks, count)))
    if reduce_op == "prod":
        values = np.copysign(np.exp2(values), values)  # products stay in range
    elif ranks > 1:
        exponents = rng.integers(*_CANCELLING_EXPONENTS[dtype], count)
        large = np.ldexp(1 + rng.random(count) / 2, exponents)
        columns = np.arange(count)
        first = rng.integers(0, ranks, count)
        second = (first + rng.integers(1, ranks, count)) % ranks
        values[first, columns] += large
        values[second, columns] -= large
    return [row.astype(element) for row in values]


class Problem:
    """The buffers of one `Case`: each rank's initial one, and the answer, in anonymous memory.

    Ranks read it as the file `path`, rows of `case.size` bytes: the initial buffer of each rank, in
    rank order, then the oracle's answer. Where a rank has no input, its buffer starts as garbage.
    The memory goes back with `close`, or with this process.
    """

    def __init__(self, operation: Operation, case: Case, ranks: int, seed: int) -> None:
        self._descriptor = os.memfd_create("pycollective-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, (ranks + 1) * case.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        with mmap.mmap(self._descriptor, (ranks + 1) * case.size) as shared:
            rows = np.frombuffer(shared, np.uint8).reshape(ranks + 1, case.size)
            _fill(rows, operation, case, ranks, seed)
            del rows  # a map with a view of it cannot be closed

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)


def _fill(rows: NDArray[Any], operation: Operation, case: Case, ranks: int, seed: int) -> None:
    garbage = 0xA5
    period = min(PERIOD, case.size // case.item_size)
    inputs = leaves(case.dtype, case.reduce_op, ranks, period, seed)
    answer = rows[ranks]
    if operation.reduces:
        for rank, leaf in enumerate(inputs):
            _tile(rows[rank], leaf)
        _tile(answer, reference.reduce(inputs, case.reduce_op))
        return
    rows[:ranks] = garbage
    if operation.sharded:
        for rank, leaf in enumerate(inputs):
            own = case.shard(rank, ranks)
            _tile(rows[rank][own], leaf)
            _tile(answer[own], leaf)
        return
    _tile(rows[case.root], inputs[case.root])
    _tile(answer, inputs[case.root])


def _tile(target: NDArray[np.uint8], values: NDArray[Any]) -> None:
    """Fill `target` with the bytes of `values`, again and again."""
    source = np.ascontiguousarray(values).view(np.uint8)
    for start in range(0, len(target), len(source)):
        piece = target[start : start + len(source)]
        piece[:] = source[: len(piece)]
