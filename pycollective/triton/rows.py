"""The messages of ordered reductions, and leaves of a narrow type for them, on GPUs.

`write_rows` writes all messages at once: a program copies `_BYTES` of a row, and the first program
of each row writes its header. `cast` makes narrow words of fp32 numbers, widens them again, and
says where these are others.

Full programs have no mask, so that their loads have 16 bytes where addresses allow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pycollective.triton.floats import is_nan, rounded, widened
from pycollective.triton.formats import FORMATS, name_of, word_of
from pycollective.triton.header_check import BYTES, FITS, WORDS
from pycollective.triton.launching import Launcher

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_BYTES = 8192  # of a program of `write_rows`
_VECTOR = 16  # bytes that a thread copies at once
_LINE = tl.constexpr(BYTES)
_SIZE = tl.constexpr(1024)  # elements of a program of `cast`
_HEADER, _FITS = tl.constexpr(WORDS), tl.constexpr(FITS)
_FLOAT32 = tl.constexpr(tuple(FORMATS[torch.float32]))


@triton.jit(
    do_not_specialize=[
        *("count", "step", "size", "lines", "programs"),
        *("magic", "kind", "dtype", "op", "elements", "narrow", "promised"),
    ],
    do_not_specialize_on_alignment=["number", "own", "fits"],
)
def write_rows(
    leaves,
    messages,
    number,
    own,
    fits,
    count,
    step,
    size,
    lines,
    programs,
    magic,
    kind,
    dtype,
    op,
    elements,
    narrow,
    promised,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_FITS: tl.constexpr,
):
    """Write headers, and words of `count` leaves behind them; see `lay_out`.

    `messages` are words of leaves; a row has ``64 * lines`` bytes. Its leaves are ``step * VECTOR``
    words behind those of the row before. It has `programs` programs, of `SIZE` words each.
    """
    LINE: tl.constexpr = _LINE * 8 // leaves.dtype.element_ty.primitive_bitwidth  # words
    row = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs
    first = block.to(tl.int64) * SIZE
    begin = row * step * VECTOR
    left = tl.minimum(size, count - begin) - first
    messages += row * lines * LINE
    at = tl.arange(0, SIZE)
    leaf, out = leaves + begin + first + at, messages + LINE + first + at
    if left >= SIZE:
        tl.store(out, tl.load(leaf))
    else:
        tl.store(out, tl.load(leaf, mask=at < left), mask=at < left)
    if block == 0:
        word = tl.arange(0, _HEADER)
        value = tl.where(word == 0, magic.to(tl.int64), tl.load(number) + 1)
        value = tl.where(word == 2, kind.to(tl.int64), value)
        value = tl.where(word == 3, dtype.to(tl.int64), value)
        value = tl.where(word == 4, op.to(tl.int64), value)
        value = tl.where(word == 5, elements.to(tl.int64), value)
        value = tl.where(word == 6, narrow.to(tl.int64), value)
        last = tl.load(fits) if HAS_FITS else promised.to(tl.int64)
        value = tl.where(word == _FITS, last, value)
        tl.store(messages.to(tl.pointer_type(tl.int64)) + word, value)
        if row == 0:
            tl.store(own + word, value)


@triton.jit
def _cast(at, out, mask, TYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Cast words of fp32. Returns of each whether it is another number."""
    WORD: tl.constexpr = out.dtype.element_ty
    bits = tl.load(at, mask=mask, other=None if mask is None else 0)
    nan = is_nan(bits, _FLOAT32)
    word = rounded(bits.to(tl.float32, bitcast=True), WORD, FORMAT)
    word = tl.where(nan, FORMAT[2], word).to(WORD)
    tl.store(out, word, mask=mask)
    return (widened(word, TYPE).to(tl.int32, bitcast=True) != bits) & (nan == 0)


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["fits"])
def cast(leaves, out, fits, m, TYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Cast `m` words of fp32 to words of `TYPE`; where numbers differ `fits` becomes 0."""
    first = tl.program_id(0).to(tl.int64) * _SIZE
    at = tl.arange(0, _SIZE)
    leaves, out = leaves + first + at, out + first + at
    if m - first >= _SIZE:
        differs = _cast(leaves, out, None, TYPE, FORMAT)
    else:
        differs = _cast(leaves, out, at < m - first, TYPE, FORMAT)
    if tl.max(differs.to(tl.int32), axis=0) != 0:
        tl.atomic_and(fits, 0, sem="relaxed")


def lay_out(
    leaves: torch.Tensor,
    step: int,
    size: int,
    rows: torch.Tensor,
    header: Sequence[int],
    number: torch.Tensor,
    own: torch.Tensor,
    fits: torch.Tensor | None = None,
) -> None:
    """Write a message for each of some ranks: a header of 64 bytes, and a part of the leaves; on
    their device's current stream.

    Args:
        leaves: flat and contiguous.
        step: row i has the leaves from element ``i * step`` on;
        size: so many, or those that are left.
        rows: uint8, ``(n, bytes)``, contiguous, of a multiple of 64 bytes each; they begin at
            multiples of 8 bytes.
        header: its 8 words, of 64 bits. The second is not used: ``number + 1`` is written.
        number: int64, ``(1,)``: how many calls have ended.
        own: int64, ``(8,)``: becomes the header.
        fits: int64, ``(1,)``: the header's last word. None: that of `header`.
    """
    block = _BYTES // leaves.itemsize
    programs = max(-(-size // block), 1)
    starts = leaves.data_ptr() | rows.data_ptr() | step * leaves.itemsize
    vector = _VECTOR // leaves.itemsize if starts % _VECTOR == 0 else 1
    count, stride = rows.shape
    launch = _writer(leaves.dtype, block, vector, fits is not None)
    launch(
        *(count * programs, leaves, rows, number, own, number if fits is None else fits),
        *(leaves.numel(), step // vector, size, stride // BYTES, programs),
        *(header[0], *header[2:]),
    )


@functools.cache
def _writer(dtype: torch.dtype, size: int, vector: int, has_fits: bool) -> Launcher:
    constexprs = {"SIZE": size, "VECTOR": vector, "HAS_FITS": has_fits}
    views = dict.fromkeys(("leaves", "messages"), word_of(dtype))
    return Launcher(write_rows, {**constexprs, **OPTIONS}, views)


def narrowed(leaves: torch.Tensor, out: torch.Tensor, fits: torch.Tensor) -> None:
    """Cast fp32 leaves to a narrow type, and see whether they are the same numbers; on their
    device's current stream.

    Args:
        leaves: flat and contiguous.
        out: as long, of float16, bfloat16 or a float of 8 bits. Numbers are rounded to nearest,
            ties to even; a NaN becomes the contract's.
        fits: int64, ``(1,)``, becomes 1 if each leaf has exactly a value of `out`'s type, with its
            sign, or is a NaN; else 0.
    """
    fits.fill_(1)
    count = leaves.numel()
    if count:
        _caster(out.dtype)(-(-count // _SIZE.value), leaves, out, fits, count)


@functools.cache
def _caster(dtype: torch.dtype) -> Launcher:
    constexprs = {"TYPE": name_of(dtype), "FORMAT": tuple(FORMATS[dtype])}
    views = {"leaves": word_of(torch.float32), "out": word_of(dtype)}
    return Launcher(cast, {**constexprs, **OPTIONS}, views)
