"""One ordered reduction of the rows of a matrix, on a GPU: each element is read and written once.

The kernel is `reduce_rows`, or `reduce_and_check`, which also compares headers. What a program does
with its elements:

1. The recipe, postfix, is unrolled. Each `TAKE` loads a row and widens it, each `COMBINE` makes one
   of the last two values. So as many values wait in registers as the order's tree is deep.
2. The root is divided, where the operation is an average.
3. It is rounded once, and each NaN becomes the contract's.
4. Where headers differ all floats become NaN. Every program compares them, so that none waits for
   another; it loads them before its elements, and needs the answer behind these. The first one
   tells the host.

All loads and stores are of integers. Floats are made of these words, and rounded to words, by
operations that give the same bits on every target and in Triton's interpreter (contract.md).

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
from pycollective.triton.floats import (
    divided,
    divided_in_fp64,
    is_nan,
    narrowed,
    rounded,
    widened,
    with_one_nan,
)
from pycollective.triton.formats import FORMATS, name_of, word_of
from pycollective.triton.header_check import FITS, WORDS, Check
from pycollective.triton.launching import Launcher

THREADS = tl.constexpr(128)  # of a program
# Triton 3.6 fuses a product and a sum unless it is told not to.
OPTIONS = {"num_warps": THREADS.value // 32, "enable_fp_fusion": False}
_VECTOR = 16  # bytes that a thread loads at once
# The compiler issues the loads of many rows before it adds the first: more words would spill.
_WORDS_OF_A_THREAD = 256
_HEADER, _FITS = tl.constexpr(WORDS), tl.constexpr(FITS)


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
def _divided(total, LEAVES: tl.constexpr, TYPE: tl.constexpr, divisor):
    """By `LEAVES`, or floats by `divisor`, unless it is None."""
    if divisor is not None:
        tl.static_assert(TYPE != "integer")
        if TYPE == "float64":
            return total / tl.full(total.shape, divisor, tl.float64)
        else:
            return divided_in_fp64(total, divisor)
    elif TYPE == "integer":  # cut towards zero, in a type that has all leaves' numbers
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
    divisor,
    differs,
):
    """The `SIZE` elements from these pointers on, or those that are left. Floats become NaN if
    `differs`, unless it is None, is true anywhere."""
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
        x = _divided(x, LEAVES, TYPE, divisor)
    if TYPE != "integer":
        WORD: tl.constexpr = out.dtype.element_ty
        if OP == "min" or OP == "max":
            x = with_one_nan(_flipped(x), FORMAT) if FINISH else _flipped(x)
        else:
            x = narrowed(x, WORD, FORMAT) if FINISH else rounded(x, WORD, FORMAT)
        if differs is not None:
            x = tl.where(_any(differs), FORMAT[2], x).to(WORD)
    tl.store(out, x, mask=mask)


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), axis=0) != 0


@triton.jit
def _reduce(
    terms,
    out,
    m,
    step,
    divisor,
    VECTOR: tl.constexpr,
    COMBINES: tl.constexpr,
    OP: tl.constexpr,
    TYPE: tl.constexpr,
    LEAVES: tl.constexpr,
    FINISH: tl.constexpr,
    FORMAT: tl.constexpr,
    differs,
):
    """What a program reduces; see `reduce_rows`, and `_program` for `differs`."""
    if divisor is not None:
        divisor = tl.load(divisor)
    SIZE: tl.constexpr = THREADS * VECTOR
    stride = step.to(tl.int64) * VECTOR
    program = tl.program_id(0).to(tl.int64)
    full = m // SIZE
    first = program * SIZE
    if program < full:
        _program(
            *(terms + first, out + first, stride, SIZE, SIZE, False),
            *(COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT, divisor, differs),
        )
    else:
        first = full * SIZE + (program - full) * THREADS
        _program(
            *(terms + first, out + first, stride, m - first, THREADS, True),
            *(COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT, divisor, differs),
        )


@triton.jit
def _headers(headers, stride, ranks, HEADERS: tl.constexpr):
    """The words of all headers, their places in these, and which of `HEADERS` are some."""
    at = tl.arange(0, HEADERS * _HEADER)
    mask = at < ranks * _HEADER
    row = (at // _HEADER).to(tl.int64)
    return tl.load(headers + row * stride + at % _HEADER, mask=mask, other=0), at, mask


@triton.jit
def _differs(headers, stride, ranks, own, HEADERS: tl.constexpr):
    """Of each word: whether it is another than this rank's, or its leaves are not as promised."""
    word, at, mask = _headers(headers, stride, ranks, HEADERS)
    mine = tl.load(own + at % _HEADER)
    return mask & tl.where(at % _HEADER == _FITS, word == 0, word != mine)


@triton.jit
def _tell(headers, stride, ranks, own, rank, differs, found, HEADERS: tl.constexpr):
    """Headers that differ go to the host's memory, unless some are there. The flag is behind them:
    a host that sees it sees them."""
    if _any(differs):  # noqa: SIM102, for with `and` every call would load the host's memory
        if tl.load(found) == 0:
            word, at, mask = _headers(headers, stride, ranks, HEADERS)
            word = tl.where(at // _HEADER == rank, tl.load(own + at % _HEADER), word)
            tl.store(found + 1 + at, word, mask=mask)
            # The headers of all threads are stored. Triton 3.6 has no barrier of its own here.
            tl.debug_barrier()
            tl.atomic_add(found, 1, sem="acq_rel", scope="sys")


@triton.jit(do_not_specialize=["m", "step"], do_not_specialize_on_alignment=["divisor"])
def reduce_rows(
    terms,
    out,
    m,
    step,
    divisor,
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
    `FORMAT` is that of `out`. Averages of floats are divided by the fp64 number at `divisor`, or by
    `LEAVES` where it is None, which Triton takes for a constexpr. There are `programs` programs.
    """
    _reduce(terms, out, m, step, divisor, VECTOR, COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT, None)


@triton.jit(
    do_not_specialize=["m", "step", "stride", "ranks", "rank", "ended"],
    do_not_specialize_on_alignment=["headers", "own", "found", "number", "divisor"],
)
def reduce_and_check(
    terms,
    out,
    m,
    step,
    headers,
    stride,
    ranks,
    own,
    rank,
    found,
    number,
    ended,
    divisor,
    HEADERS: tl.constexpr,
    VECTOR: tl.constexpr,
    COMBINES: tl.constexpr,
    OP: tl.constexpr,
    TYPE: tl.constexpr,
    LEAVES: tl.constexpr,
    FINISH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Reduce as `reduce_rows`, and compare headers, of 64-bit words; see `Check`.

    There are `ranks` headers, `HEADERS` at most, `stride` words apart. `number` grows by `ended`.
    There is one program at least, also of no elements.
    """
    differs = _differs(headers, stride.to(tl.int64), ranks, own, HEADERS)
    _reduce(
        *(terms, out, m, step, divisor, VECTOR),
        *(COMBINES, OP, TYPE, LEAVES, FINISH, FORMAT, differs),
    )
    if tl.program_id(0) == 0:
        _tell(headers, stride.to(tl.int64), ranks, own, rank, differs, found, HEADERS)
        tl.atomic_add(number, ended.to(tl.int64), sem="relaxed")


def constants(
    op: str,
    recipe: Sequence[int],
    leaves: int,
    terms: torch.dtype,
    out: torch.dtype,
    finish: bool,
    aligned: bool,
) -> dict[str, Any]:
    """Return the constexprs of a reduction; `aligned`: rows begin at multiples of 16 bytes."""
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
    return full - (-left // THREADS.value)


def reduce(
    terms: torch.Tensor,
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    leaves: int | torch.Tensor,
    dtype: torch.dtype,
    finish: bool,
    check: Check | None = None,
) -> None:
    """Combine the rows of `terms` into `out`, by a recipe, on their device's current stream.

    Args:
        terms: ``(T, m)``, at most 64 rows, of contiguous elements: leaves, of `dtype`, or nodes, of
            the accumulator's dtype.
        out: ``(m,)``, contiguous; a result, of `dtype` or the accumulator's, or a node.
        op: ``sum``, ``avg``, ``prod``, ``min``, ``max``, ``band``, ``bor`` or ``bxor``.
        recipe: how the root is made of the rows, as `pycollective.order.recipe` gives it.
        leaves: of the whole order; ``avg`` divides by it. Of floats it may be a tensor there, of
            float64, ``(1,)``: any positive number, or NaN, and then all results are NaN.
        dtype: the leaves'.
        finish: whether `out` is the result: divided, rounded once, with the contract's NaN. Else
            it is a node, of the accumulator's dtype.
        check: the headers of at most 64 ranks, which are compared; None: of none.
    """
    m = out.numel()
    if m == 0 and check is None:
        return
    stride = terms.stride(0) if terms.shape[0] > 1 else 0
    starts = terms.data_ptr() | stride * terms.element_size() | out.data_ptr()
    aligned = starts % _VECTOR == 0
    ranks = check.rows.shape[0] if check is not None else 0
    divisor = leaves if isinstance(leaves, torch.Tensor) else None
    fixed = leaves if divisor is None else 1
    kind = op, tuple(recipe), fixed, terms.dtype, out.dtype, finish, aligned
    launch, vector = _launcher(ranks, *kind)
    arguments = terms, out, m, stride // vector
    if check is None:
        launch(programs(m, vector), *arguments, divisor)
    else:
        launch(
            max(programs(m, vector), 1),
            *arguments,
            *(check.rows, check.rows.stride(0), ranks, check.own, check.rank),
            *(check.found, check.number, int(check.last), divisor),
        )


@functools.cache
def _launcher(
    ranks: int,
    op: str,
    recipe: tuple[int, ...],
    leaves: int,
    terms: torch.dtype,
    out: torch.dtype,
    *more: Any,
) -> tuple[Launcher, int]:
    """What launches with `constants`, and compares headers of so many ranks; and `VECTOR`."""
    constexprs = constants(op, recipe, leaves, terms, out, *more)
    given = {**constexprs, **OPTIONS}
    if ranks:
        given["HEADERS"] = triton.next_power_of_2(ranks)
    views = {"terms": word_of(terms), "out": word_of(out)}
    launch = Launcher(reduce_and_check if ranks else reduce_rows, given, views)
    return launch, constexprs["VECTOR"]
