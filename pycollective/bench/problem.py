"""Order-sensitive inputs and the oracle's answer, where every library's ranks can read them.

With ordinary random inputs almost no sum depends on the order of the additions, and counting wrong
bits would prove nothing. Here each element meets cancellation: one leaf holds a large number,
another its negation, the rest small ones, so that the order decides which low bits survive. (Two
leaves have only one order, and would leave nothing.) The tests use these inputs too.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core, reference
from pycollective.bench.operations import Operation
from pycollective.bench.ranks.case import Case
from pycollective.errors import ConfigurationError

# Longer messages repeat the first PERIOD elements. A prime, so that no power-of-two piece of a
# message equals another, and a piece put in the wrong place is still seen.
PERIOD = 1_048_573

TRAITS: dict[str, _core.Dtype] = {each.name: each for each in _core.dtypes()}
DTYPES = {name: each.size for name, each in TRAITS.items()}
# nccl-tests' names for some of them.
ALIASES = {each.alias: name for name, each in TRAITS.items() if each.alias}
REDUCE_OPS = tuple(_core.reduce_ops())

# For inputs that tell orders of addition apart, here and in `verify/inputs.py`: exponents of
# the numbers that cancel, least and end ...
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


def numpy_type(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of `DTYPES`.

    Raises:
        ConfigurationError: a type of ml_dtypes' without that, or an unknown name.
    """
    if name not in DTYPES:
        raise ConfigurationError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    if TRAITS[name].in_numpy:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigurationError(
            f"{name} needs ml_dtypes in NumPy: pip install ml_dtypes"
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def exponent_bias(dtype: str) -> int:
    """Of a float whose exponent takes all bits but the mantissa's and the sign."""
    return (1 << (8 * TRAITS[dtype].size - TRAITS[dtype].mantissa - 2)) - 1


def exponents_of(dtype: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """A float's rows of `LARGE` and `BELOW`; where there is none, all of a narrow one's range."""
    bias = exponent_bias(dtype)
    below = 1, bias + TRAITS[dtype].mantissa
    return LARGE.get(dtype, (bias // 2, bias)), BELOW.get(dtype, below)


def leaves(dtype: str, reduce_op: str, ranks: int, count: int, seed: int) -> list[NDArray[Any]]:
    """One array of `count` elements a rank, such that the order of a reduction shows.

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
