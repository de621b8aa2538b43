"""One ordered reduction of the rows of a matrix, on a GPU: each element is read and written once.

The kernel is `reduce_rows`. What a program does with its elements:

1. The recipe, postfix, is unrolled. Each `TAKE` loads a row and widens it, each `COMBINE` makes one
   of the last two values. So as many values wait in registers as the order's tree is deep.
2. The root is divided, where the operation is an average.
3. It is rounded once, and each NaN becomes the contract's.

All loads and stores are of integers. Floats are made of these words, and rounded to words, by
operations that give the same bits on every target and in Triton's interpreter (docs/contract.md).

Elements that do not fill a program have programs of their own, with a mask and one element a
thread. A mask in every program would make loads of 16 bytes depend on the number of elements.

`constants` gives the constexprs of a launch; the other arguments are the words of the terms and of
the result, `m`, and the rows' stride over ``VECTOR``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pycollective.order import COMBINE
from pycollective.triton.floats import divided, is_nan, narrowed, rounded, widened, with_one_nan
from pycollective.triton.formats import FORMATS, name_of
from pycollective.triton.launching import Launcher

THREADS = tl.constexpr(128)  # of a program
# Triton 3.6 fuses a product and a sum unless it is told not to.
OPTIONS = {"num_warps": THREADS.value // 32, "enable_fp_fusion": False}
_VECTOR = 16  # bytes that a thread loads at once
# The compiler issues the loads of many rows before it adds the first: more words would spill.
_WORDS_OF_A_THREAD = 256


@triton.jit
def _flipped(word):
    """Words whose order as integers is that of the floats, -0 below +0; twice gives the words."""
    BITS: tl.constexpr = word.dtype.primitive_bitwidth
    return word ^ ((word >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _taken(word, OP: tl.constexpr, TYPE: tl.constexpr, FORMAT: tl.constexpr):
    """The value that `_combined` takes."""
    if TYPE == "integer":
        return word
    elif OP == "min":  # of all words the least is a NaN's
        LEAST: tl.constexpr = -(1 << (word.dtype.primitive_bitwidth - 1))
        return tl.where(is_nan(word, FORMAT), LEAST, _flipped(word)).to(word.dtype)
    elif OP == "max":
        MOST: tl.constexpr = (1 << (word.dtype.primitive_bitwidth - 1)) - 1
        return tl.where(is_nan(word, FORMAT), MOST, _flipped(word)).to(word.dtype)
    else:
        return widened(word, TYPE)


@triton.jit
def _combined(a, b, OP: tl.constexpr):
    if OP == "min":
        return tl.minimum(a, b)
    elif OP == "max":
        return tl.maximum(a, b)
    elif OP == "band":
        return a & b
    elif OP == "bor":
        return a | b
    elif OP == "bxor":
        return a ^ b
    elif OP == "prod":
        return tl.mul(a, b, sanitize_overflow=False)
    else:
        return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def _divided(total, LEAVES: tl.constexpr, TYPE: tl.constexpr):
    if TYPE == "integer":  # cut towards zero, in a type that has all leaves' numbers
        if total.dtype.primitive_bitwidth < 32:
            return (total.to(tl.int32) // LEAVES).to(total.dtype)
        else:
            return (total.to(tl.int64) // LEAVES).to(total.dtype)
    elif LEAVES & (LEAVES - 1) == 0:
        return total * (1.0 / LEAVES)
    elif TYPE == "float64":
        return total / tl.full(total.shape, LEAVES, tl.float64)
    else:
        return divided(total, LEAVES)


@triton.jit
def _program(
    rows,
    out,
    stride,
    left,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    COMBINES: tl.constexpr,
    OP: tl.constexpr,
    TYPE: tl.constexpr,
    LEAVES: tl.constexpr,
    FINISH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The `SIZE` elements from these pointers on, or those that are left."""
    at = tl.arange(0, SIZE)
    mask = at < left if MASKED else None
    rows, out = rows + at, out + at
    waiting = ()
    for i in tl.static_range(len(COMBINES)):
        if COMBINES[i]:
            waiting = waiting[:-2] + (_combined(waiting[-2], waiting[-1], OP),)
        else:
            waiting = waiting + (_taken(tl.load(rows, mask=mask), OP, TYPE, FORMAT),)
            rows += stride
    x = waiting[0]
    if OP == "avg" and FINISH:
        x = _divided(x, LEAVES, TYPE)
    if TYPE != "integer":
        WORD: tl.constexpr = out.dtype.element_ty
        if OP == "min" or OP == "max":
            x = with_one_nan(_flipped(x), FORMAT) if FINISH else _flipped(x)
        else:
            x = narrowed(x, WORD, FORMAT) if FINISH else rounded(x, WORD, FORMAT)
    tl.store(out, x, mask=mask)


@triton.jit(do_not_specialize=["m", "step"])
def reduce_rows(
    terms,
    out,
    m,
    step,
    VECTOR: tl.constexpr,
    COMBINES: tl.constexpr,
    OP: tl.constexpr,
    TYPE: tl.constexpr,
    LEAVES: tl.constexpr,
    FINISH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Reduce rows of `m` words, ``step * VECTOR`` words apart, to `out`.

    `VECTOR` words a thread; 1 where words of a row are not together on `VECTOR` bytes. `COMBINES`
    is the recipe: of each entry, whether it is `COMBINE`. `TYPE` is the terms' dtype, or "integer".
    `FORMAT` is that of `out`. There are `programs` programs.
    """
    SIZE: tl.constexpr = THREADS * VECTOR
    stride = step.to(tl.int64) * VECTOR
    program = tl.program_id(0).to(tl.int64)
    full = m // SIZE
    first = program * SIZE
    if program < full:
        _program(
            *(terms + first, out + first, stride, SIZE, SIZE, False),
            *(COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT),
        )
    else:
        first = full * SIZE + (program - full) * THREADS
        _program(
            *(terms + first, out + first, stride, m - first, THREADS, True),
            *(COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT),
        )


def constants(
    op: str,
    recipe: Sequence[int],
    leaves: int,
    terms: torch.dtype,
    out: torch.dtype,
    finish: bool,
    aligned: bool,
) -> dict[str, Any]:
    """Return the constexprs of `reduce_rows`; `aligned`: rows begin at multiples of 16 bytes."""
    rows = triton.next_power_of_2(len(recipe) // 2 + 1)
    return {
        "VECTOR": min(_VECTOR // terms.itemsize, _WORDS_OF_A_THREAD // rows) if aligned else 1,
        "COMBINES": tuple(each == COMBINE for each in recipe),
        "OP": op,
        "TYPE": name_of(terms) if terms in FORMATS else "integer",
        "LEAVES": leaves if op == "avg" else 1,
        "FINISH": finish,
        "FORMAT": tuple(FORMATS.get(out, ())),
    }


def programs(m: int, vector: int) -> int:
    """Return how many programs reduce `m` elements: full ones, and those of what is left."""
    full, left = divmod(m, THREADS.value * vector)
    return full + triton.cdiv(left, THREADS.value)


def reduce(
    terms: torch.Tensor,
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
    finish: bool,
) -> None:
    """Combine the rows of `terms` into `out`, by a recipe, on their device's current stream.

    Args:
        terms: ``(T, m)``, at most 64 rows, of contiguous elements: leaves, of `dtype`, or nodes, of
            the accumulator's dtype.
        out: ``(m,)``, contiguous; a result, of `dtype` or the accumulator's, or a node.
        op: ``sum``, ``avg``, ``prod``, ``min``, ``max``, ``band``, ``bor`` or ``bxor``.
        recipe: how the root is made of the rows, as `pycollective.order.recipe` gives it.
        leaves: of the whole order; ``avg`` divides by it.
        dtype: the leaves'.
        finish: whether `out` is the result: divided, rounded once, with the contract's NaN. Else
            it is a node, of the accumulator's dtype.
    """
    m = out.numel()
    if m == 0:
        return
    stride = terms.stride(0) if terms.shape[0] > 1 else 0
    starts = terms.data_ptr(), stride * terms.element_size(), out.data_ptr()
    aligned = all(each % _VECTOR == 0 for each in starts)
    launch, vector = _launcher(op, tuple(recipe), leaves, terms.dtype, out.dtype, finish, aligned)
    launch(programs(m, vector), terms, out, m, stride // vector)


@functools.cache
def _launcher(op: str, recipe: tuple[int, ...], *more: Any) -> tuple[Launcher, int]:
    """What launches with `constants`, and `VECTOR`."""
    constexprs = constants(op, recipe, *more)
    launch = Launcher(reduce_rows, {**constexprs, **OPTIONS}, as_words=("terms", "out"))
    return launch, constexprs["VECTOR"]
