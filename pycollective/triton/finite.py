"""Whether a bucket's gradients are finite, and NaNs in their place, on GPUs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import segments
from pycollective.triton.floats import is_not_finite
from pycollective.triton.formats import FORMATS, check
from pycollective.triton.launching import Launcher
from pycollective.triton.tables import (
    ADDRESS,
    BAD,
    COUNT,
    DTYPE,
    Table,
    Tables,
    pointer,
    row_of_program,
)

_SIZE = tl.constexpr(4096)  # elements of a program
OPTIONS = {"num_warps": 4}


@triton.jit
def note_finite(word, found, FORMAT: tl.constexpr):
    """Set ``BAD`` if any of these words is not finite."""
    if tl.max(is_not_finite(word, FORMAT).to(tl.int32)) != 0:
        tl.atomic_or(found + BAD, 1, sem="relaxed")


@triton.jit
def fill(
    rows,
    row_of,
    found,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NUMBER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """See `fill_nan`. `NUMBER` is the dtype's number in tables, `FORMAT` its format."""
    if tl.load(found + BAD) != 0:
        row, program = row_of_program(rows, row_of)
        if tl.load(row + DTYPE) == NUMBER:
            at = program * _SIZE + tl.arange(0, _SIZE)
            nan = tl.full((_SIZE,), FORMAT[2], TYPE)
            tl.store(pointer(row, ADDRESS, TYPE, ALIGNED) + at, nan, mask=at < tl.load(row + COUNT))


@triton.jit
def look(
    rows,
    row_of,
    found,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NUMBER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """See `check_finite`, and `fill` for the constants."""
    row, program = row_of_program(rows, row_of)
    if tl.load(row + DTYPE) == NUMBER:
        x = pointer(row, ADDRESS, TYPE, ALIGNED) + program * _SIZE
        count = tl.load(row + COUNT) - program * _SIZE
        at = tl.arange(0, _SIZE)
        # A mask would make loads of 16 bytes depend on the number of elements.
        if count >= _SIZE:
            note_finite(tl.load(x + at), found, FORMAT)
        else:
            note_finite(tl.load(x + at, mask=at < count, other=0), found, FORMAT)


def fill_nan(table: NDArray[np.int64], found: torch.Tensor, tables: Tables) -> None:
    """Make all elements NaN if ``BAD`` is set, on the device's current stream.

    Args:
        table: ``(segments, COLUMNS)``, see `pycollective.segments`.
        found: int32, ``(words,)``.
        tables: the device's.
    """
    _launch(fill, table, found, tables)


def check_finite(table: NDArray[np.int64], found: torch.Tensor, tables: Tables) -> None:
    """Set ``BAD`` if an element is not finite; see `fill_nan` for the arguments."""
    _launch(look, table, found, tables)


def _launch(kernel: Any, table: NDArray[np.int64], found: torch.Tensor, tables: Tables) -> None:
    check("found", found, (torch.int32,), segments.NONZERO, found.device)

    def make() -> Table:
        return tables.of(table, -(-table[:, segments.COUNT] // _SIZE.value))

    made = tables.once(("finite", table.tobytes()), make)
    for number in made.dtypes:
        launch = _launcher(kernel, number, made.aligned)
        launch(made.programs, made.rows, made.row_of, found)


@functools.cache
def _launcher(kernel: Any, number: int, aligned: bool) -> Launcher:
    dtype = getattr(torch, segments.DTYPES[number])
    word = tl.int32 if dtype.itemsize == 4 else tl.int16
    constexprs = {"TYPE": word, "FORMAT": tuple(FORMATS[dtype])}
    return Launcher(kernel, {**constexprs, "NUMBER": number, "ALIGNED": aligned, **OPTIONS})
