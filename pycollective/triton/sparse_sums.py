"""What GPUs do with entries of top-k: averages of ranks' in the contract's order.

A program has a tile of a segment, in rows of 32 places. A row may begin at any bit of a word of
marks (`index_packing.Entries`), so it is made of two of them. The marks say which rank has a place,
and the number of the word's first entry; the bits before a place do the rest. What is absent adds
nothing, so a sum needs to know.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import order, segments
from pycollective.errors import ConfigurationError
from pycollective.order import COMBINE
from pycollective.triton.floats import divided, narrowed
from pycollective.triton.formats import FORMATS
from pycollective.triton.index_packing import CAME, START, read
from pycollective.triton.launching import Launcher
from pycollective.triton.tables import (
    ADDRESS,
    AT,
    BAD,
    COUNT,
    DTYPE,
    ENTRY,
    ITEM,
    Table,
    Tables,
    pointer,
    row_of_program,
)
from pycollective.triton.top_k import FLOATS, OPTIONS, ones_of

ROWS = tl.constexpr(32)  # of a tile
TILE = 32 * ROWS.value  # places
BITS_AT = tl.constexpr(24)  # bytes of a header before its parameters' bits
MOST_RANKS = 64


@triton.jit
def _marked(marks, capacity, shift, inside):
    """(which of 32 places from a bit of a word on have an entry, the first one's number)."""
    mark = tl.load(marks, mask=inside, other=0)
    following = tl.load(marks + 1, mask=inside, other=0)
    bits = ((mark & 0xFFFFFFFF) | (following << 32)) >> shift
    before = ones_of((mark & ((1 << shift) - 1)).to(tl.int32))
    first = tl.where(mark != 0, mark, following) >> 32
    return bits.to(tl.int32), capacity - first.to(tl.int32) + before


@triton.jit
def _sum_of_ranks(
    came, parts, marks, values, words, capacity, place, item, inside, COMBINES: tl.constexpr
):
    """(whether any rank has it, the sum) for each place of a tile.

    No rank has any of an item that all of them say is zero.
    """
    shift = place & 31
    marks += (place >> 5) + tl.arange(0, ROWS)
    bit = tl.arange(0, 32)[None, :]
    below = ((tl.full((), 1, tl.int64) << bit) - 1).to(tl.int32)
    zero = tl.full((), 1, tl.int32)
    waiting = ()
    for i in tl.static_range(len(COMBINES)):
        if COMBINES[i]:
            has, x = waiting[-2]
            other_has, y = waiting[-1]
            x = tl.where(has & other_has, x + y, tl.where(has, x, y))
            waiting = waiting[:-2] + ((has | other_has, x),)
        else:
            zeros = tl.load(came + tl.load(parts + START) + BITS_AT + (item >> 3)).to(tl.int32)
            zero &= zeros >> (item & 7).to(tl.int32)
            word, first = _marked(marks, capacity, shift, inside)
            has = ((word[:, None] >> bit) & 1) != 0
            at = first[:, None] + ones_of(word[:, None] & below)
            x = tl.load(values + at, mask=has, other=0.0)
            waiting = waiting + ((has, x),)
            parts += CAME
            marks += words
            values += capacity
    has, x = waiting[0]
    return has & (zero == 0), x


@triton.jit(do_not_specialize=["words", "capacity"], do_not_specialize_on_alignment=["came"])
def _average(
    rows,
    row_of,
    came,
    parts,
    marks,
    values,
    found,
    words,
    capacity,
    divisor,
    COMBINES: tl.constexpr,
    TYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIVIDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The averages of segments whose dtype is the number `TYPE`."""
    row, number = row_of_program(rows, row_of)
    if tl.load(row + DTYPE) == TYPE:
        first = number * (32 * ROWS)
        left = tl.load(row + COUNT) - first
        message = tl.load(row + ENTRY) * ((len(COMBINES) + 1) // 2)
        has, x = _sum_of_ranks(
            *(came, parts + message * CAME, marks + message * words, values + message * capacity),
            *(words, capacity, tl.load(row + AT) + first, tl.load(row + ITEM)),
            *(32 * tl.arange(0, ROWS) < left, COMBINES),
        )
        if DIVIDED:
            x = divided(x, divisor)
        place = (32 * tl.arange(0, ROWS))[:, None] + tl.arange(0, 32)[None, :]
        word = tl.where(has & (place < left), narrowed(x, WORD, FORMAT), 0).to(WORD)
        out = pointer(row, ADDRESS, WORD, ALIGNED) + first + place
        if left >= 32 * ROWS:
            tl.store(out, word)
        else:
            tl.store(out, word, mask=place < left)
        magnitude = word.to(tl.int32) & ((1 << (WORD.primitive_bitwidth - 1)) - 1)
        if tl.max(tl.max(magnitude, axis=1), axis=0) >= FORMAT[1]:
            tl.atomic_or(found + BAD, 1, sem="relaxed")


def average(
    came: torch.Tensor,
    parts: NDArray[np.int64],
    values: torch.dtype,
    table: NDArray[np.int64],
    divisor: float,
    found: torch.Tensor,
    tables: Tables,
) -> None:
    """Write averages of what the messages of ranks say about shards, on the current stream.

    An output is the sum of the ranks' values in the contract's order, divided and rounded once. It
    is 0 where no rank has any, and of a parameter that all ranks' headers say is all zero. All
    tensors are contiguous, on one device, and overlap no other, nor the outputs.

    Args:
        came, values: as in `index_packing.read`.
        parts: as there; the last number is a message's shard. Those of shard 0 come first, and so
            on; all shards have as many, at most 64.
        table: as `segments` says, with ADDRESS, DTYPE, COUNT, ITEM; AT is the place of the first
            element in its shard, and ENTRY the shard.
        divisor: a positive number of fp32.
        found: as `segments` says. DIFFERS and BAD are set where a tail is refused; BAD, too, where
            an output is not finite.
        tables: of the device.

    Raises:
        ConfigurationError: a tensor, a number or the dtype is not as said.
    """
    if not len(parts) or not len(table):
        return

    def make() -> tuple[Table, torch.Tensor, int]:
        shards = int(parts[-1, -1]) + 1
        ranks = max(len(parts) // max(shards, 1), 1)
        if (parts[:, -1] != np.arange(len(parts)) // ranks).any():
            raise ConfigurationError("all shards must have as many messages, one after another")
        if ranks > MOST_RANKS:
            raise ConfigurationError(f"a sum is of 1 to {MOST_RANKS} ranks' messages, not {ranks}")
        sizes = parts[table[:, segments.ENTRY] * ranks, 3]
        if (table[:, segments.AT] + table[:, segments.COUNT] > sizes).any():
            raise ConfigurationError("a segment ends beyond its shard's places")
        items = int(table[:, segments.ITEM].max()) + 1
        if (parts[:, 1] - parts[:, 0] < BITS_AT.value + -(-items // 8)).any():
            raise ConfigurationError(f"a message has no header of {items} parameters")
        uploaded = tables.of(table, -(-table[:, segments.COUNT] // TILE))
        return uploaded, tables.numbers(parts), ranks

    key = "average", parts.shape, parts.dtype, parts.tobytes(), table.tobytes()
    uploaded, numbers, ranks = tables.once(key, make)
    entries = read(came, parts, values, found, tables)
    for number in uploaded.dtypes if uploaded.programs else ():
        launch = _launcher(ranks, number, uploaded.aligned, divisor != 1)
        launch(
            *(uploaded.programs, uploaded.rows, uploaded.row_of, came, numbers),
            *(*entries, found, entries.marks.shape[1], entries.values.shape[1], divisor),
        )


@functools.cache
def _launcher(ranks: int, number: int, aligned: bool, divided: bool) -> Launcher:
    dtype = FLOATS[number]
    recipe = order.recipe((0, ranks), [(i, i + 1) for i in range(ranks)])
    constexprs = {
        "COMBINES": tuple(each == COMBINE for each in recipe),
        "TYPE": number,
        "WORD": tl.int32 if dtype.itemsize == 4 else tl.int16,
        "ALIGNED": aligned,
        "DIVIDED": divided,
        "FORMAT": tuple(FORMATS[dtype]),
    }
    return Launcher(_average, {**constexprs, **OPTIONS})
