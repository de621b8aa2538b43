"""Tables of segments (`pycollective.segments`) of arrays and tensors that a test has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import segments


def _dtype_of(array: Any) -> int:
    """Its number in a table; NumPy alone has no bfloat16, so an int16 is one's bits."""
    name = str(array.dtype).removeprefix("torch.")
    return segments.DTYPES.index("bfloat16" if name == "int16" else name)


def _address(array: Any) -> int:
    if array is None:
        return 0
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])


def table_of(rows: Sequence[dict[str, Any]]) -> NDArray[np.int64]:
    """A table with a row for each segment. The caller keeps the arrays.

    A segment has, as arrays of NumPy or tensors that are contiguous:

        x            the gradient, or what becomes its average
        held, left   the old and the new residual; None or not there: the address is 0

    and the numbers at, k, item (without one: the row's number) and entry.
    """
    table = np.zeros((len(rows), segments.COLUMNS), np.int64)
    for number, (row, given) in enumerate(zip(table, rows, strict=True)):
        x = given["x"]
        row[segments.ADDRESS], row[segments.DTYPE] = _address(x), _dtype_of(x)
        row[segments.COUNT] = x.numel() if hasattr(x, "numel") else x.size
        row[segments.HELD], row[segments.LEFT] = map(_address, map(given.get, ("held", "left")))
        row[segments.ITEM] = given.get("item", number)
        row[segments.AT], row[segments.K] = given.get("at", 0), given.get("k", 0)
        row[segments.ENTRY] = given.get("entry", 0)
    return table


def found_for(items: int) -> NDArray[np.int32]:
    """What a call of so many parameters has found before its first kernel: nothing."""
    return np.zeros(segments.heads_at(items) // 4, np.int32)
