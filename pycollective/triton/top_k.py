"""Top-k selection with error feedback on GPUs: the elements, values and residuals of the CPU's.

wire.md, "Sparse payloads", says which elements are taken and what is left of them. All that is
counted is integers, so no order of threads shows. A call takes a table of segments, whatever their
lengths; those with K 0 are copied, in the first launch that reads gradients.

**Chunks of up to 4,096 elements** each have a program, which holds c = x + held in registers, and
writes it as the residual. It searches for the magnitude of the k-th element, by counts. Those that
are selected are a bitmap then, of a word for 32 elements. The program lists their places by it,
writes their values, and takes these off the residual. So a step reads and writes each element once,
but for those selected.

**Longer ones, and tensors**, are rows of a table, cut into blocks, which have a program each. The
last program of a row to finish does what needs the others. The launches, in order:

1. `_begin` samples a row and guesses a magnitude that a few more than k elements reach. A guess
   decides what is read, never what is chosen.
2. `_add` writes c, and of each block, apart, those that reach the guess: its *candidates*. Where
   fewer than k do, the guess is given up.
3. `_count_bins`, three times: histograms of 11, 10 and 10 bits of the magnitude, and the bin in
   which the k-th element's is.
4. `_count_selected`: how many elements of each block are selected, and where they go.
   `_write_entries` writes places and values, and takes these off the residual.

From 3 on a block's candidates are read, or its elements where no guess was made or its candidates
found no room.

**Ranks of a host** that have pieces of the same tensors take the steps themselves: `sparse_add`;
three times `sparse_histogram`, `merge`, and `take`, with an exchange before and a gather behind
`merge`; then `sparse_select`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import segments
from pycollective.errors import ConfigurationError
from pycollective.triton.floats import rounded, widened
from pycollective.triton.formats import FORMATS, check, name_of, words
from pycollective.triton.launching import launcher
from pycollective.triton.tables import (
    ADDRESS,
    AT,
    BAD,
    COLUMNS,
    COUNT,
    DTYPE,
    ENTRY,
    FIRST,
    HELD,
    ITEM,
    LEFT,
    NONZERO,
    K,
    Table,
    Tables,
    is_last,
    pointer,
    row_of_program,
)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
OPTIONS = {"enable_fp_fusion": False}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPACE = 1 << 32  # places
LONGEST = 4096  # elements of a chunk that a program holds
_OF_A_WARP = 1024  # elements, so 32 of a thread

BLOCK = 4096  # elements
ROOM = 512  # candidates of a block
SAMPLE = 4096
# A block's candidates are a hundred or so; two warps add up bins.
_FEW = {"TILE": 128, "num_warps": 2}
# A row has a copy of its histogram for 64 blocks, up to 32 copies: neighbours' additions often meet
# in a bin.
BLOCKS_OF_A_COPY = tl.constexpr(64)
COPIES = tl.constexpr(32)
BINS = tl.constexpr(2048)
ROUNDS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of each

# What is known of a row, int64 each. A launch reads none that it writes.
LEAST = tl.constexpr(0)  # the guess; -1: there is none
REACHED = tl.constexpr(1)  # how many elements reach the guess
# Before each round, and after the last: the first bits of the k-th magnitude, and how many are
# wanted of those that begin with them; in the end, of those that have it.
PREFIX = tl.constexpr(2)
WANTED = tl.constexpr(6)
KNOWN = tl.constexpr(10)


@triton.jit
def key_of(c):
    """The bits of the magnitude: the order of elements goes by them."""
    return c.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def nearest_finite(c, WORD: tl.constexpr, FORMAT: tl.constexpr):
    """The words of the finite numbers of a format that are nearest to finite fp32 numbers."""
    if WORD.primitive_bitwidth == 32:
        return c.to(tl.int32, bitcast=True)
    else:
        word = rounded(c, WORD, FORMAT).to(tl.int32)
        SIGN: tl.constexpr = -(1 << (WORD.primitive_bitwidth - 1))
        GREATEST: tl.constexpr = FORMAT[1] - 1  # below infinity
        return ((word & SIGN) | tl.minimum(word & ~SIGN, GREATEST)).to(WORD)


@triton.jit
def _sum_at(row, first, at, mask, HOLDS: tl.constexpr, ALIGNED: tl.constexpr, TYPE: tl.constexpr):
    """(the greatest magnitude of x, as bits; x + held) of a row's elements `first + at`."""
    WORD: tl.constexpr = tl.int32 if TYPE == "float32" else tl.int16
    MOST: tl.constexpr = (1 << (WORD.primitive_bitwidth - 1)) - 1
    other = None if mask is None else 0
    word = tl.load(pointer(row, ADDRESS, WORD, ALIGNED) + first + at, mask=mask, other=other)
    c = widened(word, TYPE)
    if HOLDS:
        holds = tl.full(at.shape, tl.load(row + HELD), tl.int64) != 0
        held = pointer(row, HELD, tl.int32, ALIGNED) + first + at
        # The word is -0.0, with which a sum is the number itself.
        more = tl.load(held, mask=holds if mask is None else mask & holds, other=-0x80000000)
        c += more.to(tl.float32, bitcast=True)
    return tl.max((word & MOST).to(tl.int32), axis=0), c


@triton.jit
def _tell_nonzero(found, row, greatest):
    """Say so if a gradient's greatest magnitude is not 0."""
    if greatest > 0:
        tl.atomic_or(found + NONZERO + tl.load(row + ITEM), 1, sem="relaxed")


@triton.jit
def _tell_bad(found, most):
    """Say so if the greatest magnitude is not finite."""
    if most >= INFINITE:
        tl.atomic_or(found + BAD, 1, sem="relaxed")


@triton.jit
def _copy(
    row, first, messages, found, SIZE: tl.constexpr, ALIGNED: tl.constexpr, TYPE: tl.constexpr
):
    """Up to `SIZE` elements of a row that is not compressed, from `first` on, in fp32."""
    to = messages + tl.load(row + AT) + 4 * first
    many = tl.minimum(tl.load(row + COUNT) - first, SIZE).to(tl.int32)
    most = tl.full((), 0, tl.int32)
    for begin in range(0, many, 256):
        at = begin + tl.arange(0, 256)
        inside = at < many
        greatest, c = _sum_at(row, first, at, inside, False, ALIGNED, TYPE)
        most = tl.maximum(most, greatest)
        word = c.to(tl.int32, bitcast=True)
        if to.to(tl.int64) % 4 == 0:
            tl.store(to.to(tl.pointer_type(tl.int32)) + at, word, mask=inside)
        else:
            for byte in tl.static_range(4):
                tl.store(to + 4 * at + byte, (word >> (8 * byte)).to(tl.uint8), mask=inside)
    _tell_nonzero(found, row, most)


@triton.jit
def _searched(key, k, slack, low, reach, high, EVEN: tl.constexpr):
    """(a magnitude, n): more than it have k - n elements, or k to k + slack where n is 0.

    `reach`, at least k, have `low` or more, and none has more than `high`.
    """
    above = tl.full((), 0, tl.int32)  # how many have more than `high`
    turn = tl.full((), 0, tl.int32)
    low += turn
    reach += turn
    if reach <= k + slack:
        high = low - 1
        low = high
        above = k
    while low < high:
        step = (high - low) // 2
        if EVEN:
            if turn == 0:  # by turns in the middle, and where the k-th is if they lie evenly
                part = tl.div_rn((k - above).to(tl.float32), (reach - above).to(tl.float32))
                step = tl.minimum(((high - low).to(tl.float32) * part).to(tl.int32), high - low - 1)
            turn = 1 - turn
        middle = high - step
        found = tl.sum((key >= middle).to(tl.int32), axis=0)
        if found > k + slack:
            low = middle
            reach = found
        else:
            above = tl.minimum(found, k)
            high = middle - 1
            if found >= k:
                low = high
    return low, k - above


@triton.jit
def _threshold(key, most, count, k, GROUPS: tl.constexpr, OF_EACH: tl.constexpr):
    """(a magnitude, n): the first k of `count` are those with more, and the first n with as much.

    The largest of each of some groups tell first what a few more than k reach: k groups have one.
    `most` is the largest of all.
    """
    low = tl.full((), 0, tl.int32)
    reach = (low + count).to(tl.int32)
    if GROUPS > 1 and 2 * k <= GROUPS:
        # A thread's elements are such a group, where they lie as they are read.
        rows = tl.max(tl.reshape(key, (OF_EACH // 4, 4 * GROUPS)), axis=0)
        greatest = tl.max(tl.reshape(rows, (GROUPS, 4)), axis=1)
        low, _ = _searched(greatest, k, k // 8 + 1, low, GROUPS, most, False)
        low = tl.maximum(low, 0)
        reach = tl.sum((key >= low).to(tl.int32), axis=0)
    return _searched(key, k, 0, low, reach, most, True)


@triton.jit
def _words_of(chosen, WIDE: tl.constexpr):
    """Bits of 32 elements each."""
    bit = tl.arange(0, 32)[None, :]
    return tl.sum(tl.reshape(chosen.to(tl.int32), (WIDE // 32, 32)) << bit, axis=1)


@triton.jit
def ones_of(word):
    """How many bits of words are 1."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit
def _first_ones(word, many):
    """The first `many` bits that are 1, counted over all words."""
    count = ones_of(word)
    wanted = many - (tl.cumsum(count, axis=0) - count)
    kept = tl.where(wanted >= count, word, 0)
    rest = tl.where(wanted < count, word, 0)
    while tl.max(wanted, axis=0) > 0:
        lowest = tl.where(wanted > 0, rest & -rest, 0)
        kept |= lowest
        rest ^= lowest
        wanted = tl.where(rest != 0, wanted - 1, 0)
    return kept


@triton.jit
def _shared(to, word, WIDE: tl.constexpr):
    """Write words for all threads, and read them: each has then few."""
    at = to + tl.arange(0, WIDE // 32)
    tl.store(at, word)
    tl.debug_barrier()
    return tl.load(at)


@triton.jit
def _list_ones(to, word, first, room, WIDE: tl.constexpr):
    """Write first + i to `to`, for each bit i that is 1, in order, up to `room`; return how many.

    All threads may read what is written.
    """
    count = ones_of(word)
    through = tl.cumsum(count, axis=0)
    entry = through - count
    at = first + 32 * tl.arange(0, WIDE // 32)
    for _ in range(tl.max(count, axis=0)):
        lowest = word & -word
        bit = ones_of(lowest - 1)
        tl.store(to + entry, (at + bit).to(to.dtype.element_ty), mask=(word != 0) & (entry < room))
        word ^= lowest
        entry += 1
    tl.debug_barrier()
    return tl.max(through, axis=0)


@triton.jit
def _take_off(c, left, values, mask, VALUE: tl.constexpr, FORMAT: tl.constexpr):
    """Write the values of elements, and what they leave of them."""
    word = nearest_finite(c, values.dtype.element_ty, FORMAT)
    tl.store(values, word, mask=mask)
    tl.store(left, c - widened(word, VALUE), mask=mask)


@triton.jit
def _chunk(
    row,
    first,
    places,
    values,
    bits,
    found,
    count,
    k,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    MASKED: tl.constexpr,
    HOLDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The chunk of `count` elements of a row, from `first` on, of which k are taken."""
    at = tl.arange(0, WIDE)
    inside = at < (count if MASKED else SIZE)
    mask = inside if MASKED or SIZE != WIDE else None
    greatest, c = _sum_at(row, first, at, mask, HOLDS, ALIGNED, TYPE)
    left = pointer(row, LEFT, tl.float32, ALIGNED) + first
    tl.store(left + at, c, mask=mask)
    _tell_nonzero(found, row, greatest)
    key = key_of(c)
    if MASKED or SIZE != WIDE:
        key = tl.where(inside, key, -1)
    most = tl.max(key, axis=0)
    _tell_bad(found, most)
    OF_EACH: tl.constexpr = WIDE // LANES
    least, ties = _threshold(key, most, count, k, LANES if OF_EACH >= 8 else 1, OF_EACH)
    word = _shared(bits, _words_of(key > least, WIDE), WIDE)
    if ties > 0:
        equal = _words_of(key == least, WIDE)
        tl.debug_barrier()
        word |= _first_ones(_shared(bits, equal, WIDE), ties)
    place = (tl.load(row + AT) + first).to(tl.int32)
    _list_ones(places, word, place, k, WIDE)
    for begin in range(0, k, LANES):
        entry = begin + tl.arange(0, LANES)
        taken = entry < k
        # Of a chunk the differences of places are less than its size, whatever wraps around.
        index = tl.load(places + entry, mask=taken, other=0) - place
        element = tl.load(left + index, mask=taken, other=0.0)
        _take_off(element, left + index, values + entry, taken, VALUE, FORMAT)


@triton.jit
def chunks_in_registers(
    rows,
    row_of,
    places,
    values,
    messages,
    found,
    bits,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    NUMBER: tl.constexpr,
    HOLDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """A chunk of `SIZE` elements a program, of rows of this dtype."""
    row, number = row_of_program(rows, row_of)
    if tl.load(row + DTYPE) == NUMBER:
        first = number * SIZE
        count = tl.load(row + COUNT) - first
        k = tl.load(row + K)
        to = tl.load(row + ENTRY) + number * k
        bits += tl.program_id(0).to(tl.int64) * (WIDE // 32)
        if k == 0:
            _copy(row, first, messages, found, SIZE, ALIGNED, TYPE)
        elif count >= SIZE:
            _chunk(
                *(row, first, places + to, values + to, bits, found, SIZE, k.to(tl.int32)),
                *(SIZE, WIDE, LANES, False, HOLDS, ALIGNED, TYPE, VALUE, FORMAT),
            )
        else:
            tail = (k * count + SIZE - 1) // SIZE
            _chunk(
                *(row, first, places + to, values + to, bits, found, count, tail.to(tl.int32)),
                *(SIZE, WIDE, LANES, True, HOLDS, ALIGNED, TYPE, VALUE, FORMAT),
            )


@triton.jit
def _begin(
    rows,
    known,
    FEW: tl.constexpr,
    NUMBER: tl.constexpr,
    HOLDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Set out what is known of a row of this dtype."""
    index = tl.program_id(0).to(tl.int64)
    row = rows + index * COLUMNS
    known += index * KNOWN
    if tl.load(row + DTYPE) == NUMBER:
        count = tl.load(row + COUNT)
        wanted = tl.minimum(tl.load(row + K), count)
        least = tl.full((), -1, tl.int32)
        if (count >= 8 * FEW) & (wanted * 16 <= count) & (wanted > 0):
            number = tl.arange(0, FEW)
            piece = count // FEW
            mixed = ((number + 1) * 0x1E3779B9).to(tl.uint32, bitcast=True)
            at = number * piece + ((mixed.to(tl.int64) * piece) >> 32)
            _, c = _sum_at(row, 0, at, None, HOLDS, ALIGNED, TYPE)
            key = key_of(c)
            # Of the sample m are expected among the first k, and sqrt(m) is a deviation, about:
            # this is four deviations more.
            mean = (wanted * FEW // count).to(tl.int32)
            least, _ = _searched(key, mean + mean // 4 + 16, 0, 0, FEW, tl.max(key, axis=0), True)
            least = tl.maximum(least, 0)
        tl.store(known + LEAST, least.to(tl.int64))
        tl.store(known + REACHED, tl.full((), 0, tl.int64))
        tl.store(known + PREFIX, tl.full((), 0, tl.int64))
        tl.store(known + WANTED, wanted)


@triton.jit
def _add_block(
    row,
    first,
    candidates,
    offsets,
    counts,
    known,
    bits,
    found,
    LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    MASKED: tl.constexpr,
    HOLDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
):
    at = tl.arange(0, SIZE)
    inside = at < tl.load(row + COUNT) - first
    mask = inside if MASKED else None
    greatest, c = _sum_at(row, first, at, mask, HOLDS, ALIGNED, TYPE)
    left = pointer(row, LEFT, tl.float32, ALIGNED) + first
    tl.store(left + at, c, mask=mask)
    _tell_nonzero(found, row, greatest)
    key = key_of(c)
    if MASKED:
        key = tl.where(inside, key, -1)
    _tell_bad(found, tl.max(key, axis=0))
    if LISTS:
        least = tl.load(known + LEAST).to(tl.int32)
        if least >= 0:
            listed = _shared(bits, _words_of(key >= least, SIZE), SIZE)
            many = _list_ones(offsets, listed, 0, ROOM, SIZE)
            tl.store(counts, many)
            tl.atomic_add(known + REACHED, many.to(tl.int64), sem="relaxed")
            many = tl.minimum(many, ROOM)
            for begin in range(0, many, 128):
                entry = begin + tl.arange(0, 128)
                mine = entry < many
                offset = tl.load(offsets + entry, mask=mine, other=0).to(tl.int32)
                number = tl.load(left + offset, mask=mine, other=0.0)
                tl.store(candidates + entry, number, mask=mine)
        else:
            tl.store(counts, ROOM + 1)


@triton.jit
def _add(
    rows,
    row_of,
    candidates,
    offsets,
    counts,
    known,
    bits,
    messages,
    found,
    LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    NUMBER: tl.constexpr,
    HOLDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
):
    """left = x + held of rows of this dtype, and with `LISTS` each block's candidates."""
    row, number = row_of_program(rows, row_of)
    if tl.load(row + DTYPE) == NUMBER:
        program = tl.program_id(0).to(tl.int64)
        first = number * SIZE
        known += tl.load(row_of + program).to(tl.int64) * KNOWN
        candidates += program * ROOM
        offsets += program * ROOM
        counts += program
        bits += program * (SIZE // 32)
        if tl.load(row + K) == 0:
            _copy(row, first, messages, found, SIZE, ALIGNED, TYPE)
        elif first + SIZE <= tl.load(row + COUNT):
            _add_block(
                *(row, first, candidates, offsets, counts, known, bits, found),
                *(LISTS, SIZE, ROOM, False, HOLDS, ALIGNED, TYPE),
            )
        else:
            _add_block(
                *(row, first, candidates, offsets, counts, known, bits, found),
                *(LISTS, SIZE, ROOM, True, HOLDS, ALIGNED, TYPE),
            )


@triton.jit
def _source(
    row,
    number,
    candidates,
    counts,
    known,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """What of this program's block is read: (how many candidates, how many numbers, where).

    Candidates are none where elements are read.
    """
    start = number * SIZE
    many = tl.minimum(tl.load(row + COUNT) - start, SIZE).to(tl.int32)
    numbers = pointer(row, LEFT, tl.float32, ALIGNED) + start
    listed = tl.full((), 0, tl.int32)
    if LISTED:
        program = tl.program_id(0).to(tl.int64)
        reached = tl.load(known + REACHED) >= tl.load(known + WANTED)
        found = tl.load(counts + program)
        if reached & (found <= ROOM):
            listed = found
            many = found
            numbers = candidates + program * ROOM
    return listed, many, numbers


@triton.jit
def _count_in(
    bins, numbers, many, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Count numbers whose magnitude begins with `prefix` by the bits that follow."""
    for first in range(0, many, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < many
        key = key_of(tl.load(numbers + at, mask=inside, other=0.0))
        # In two steps: a shift by all of a word's bits is undefined.
        inside &= ((key >> SHIFT) >> BITS) == prefix
        bin = (key >> SHIFT) & ((1 << BITS) - 1)
        lowest = tl.min(tl.where(inside, bin, 1 << BITS), axis=0)
        highest = tl.max(tl.where(inside, bin, -1), axis=0)
        if lowest == highest:  # one addition, where each would wait for the others
            tl.atomic_add(bins + highest, tl.sum(inside.to(tl.int32), axis=0), sem="relaxed")
        else:
            tl.atomic_add(bins + bin, 1, mask=inside, sem="relaxed")


@triton.jit
def _counts_of(words):
    """What is counted in bins of 32 bits, which is not negative."""
    return tl.load(words).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _own_bins(bins, row, number, index, SIZE: tl.constexpr):
    """(the first of a row's copies of bins, how many copies, the row's blocks)."""
    blocks = (tl.load(row + COUNT) + SIZE - 1) // SIZE
    # Rounded up it is one more for each row before, at most.
    copy = tl.load(row + FIRST) // BLOCKS_OF_A_COPY + index
    copies = tl.minimum((blocks + BLOCKS_OF_A_COPY - 1) // BLOCKS_OF_A_COPY, COPIES)
    return bins + copy * BINS, copies, blocks


@triton.jit
def _collected(bins, copies, BITS: tl.constexpr):
    """The sum of copies of bins, which are 0 then."""
    bins += tl.arange(0, 1 << BITS)
    total = tl.zeros((1 << BITS,), tl.int64)
    for copy in range(copies):
        total += _counts_of(bins + copy * BINS)
        tl.store(bins + copy * BINS, tl.zeros((1 << BITS,), tl.int32))
    return total


@triton.jit
def _end_of(total, wanted, BITS: tl.constexpr):
    """(the bin in which the wanted elements end, how many are wanted of it)."""
    above = tl.cumsum(total, axis=0, reverse=True) - total
    # Of the bins above which too few lie the lowest: all that are higher have as few above them.
    place = (1 << BITS) - tl.sum((above < wanted).to(tl.int32), axis=0)
    place = tl.minimum(place, (1 << BITS) - 1)
    bin = tl.arange(0, 1 << BITS)
    return place, wanted - tl.sum(tl.where(bin == place, above, 0), axis=0)


@triton.jit
def _count_bins(
    rows,
    row_of,
    candidates,
    counts,
    known,
    bins,
    counters,
    ROUND: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """A round of histograms, and the bin in which the wanted elements of each row end."""
    row, number = row_of_program(rows, row_of)
    if tl.load(row + K) != 0:
        index = tl.load(row_of + tl.program_id(0)).to(tl.int64)
        known += index * KNOWN
        bins, copies, blocks = _own_bins(bins, row, number, index, SIZE)
        _, many, numbers = _source(
            row, number, candidates, counts, known, True, SIZE, ROOM, ALIGNED
        )
        prefix = tl.load(known + PREFIX + ROUND)
        mine = bins + number % copies * BINS
        _count_in(mine, numbers, many, prefix.to(tl.int32), SHIFT, BITS, TILE)
        if is_last(counters + index, blocks.to(tl.int32)):
            total = _collected(bins, copies, BITS)
            place, left = _end_of(total, tl.load(known + WANTED + ROUND), BITS)
            tl.store(known + WANTED + ROUND + 1, left)
            tl.store(known + PREFIX + ROUND + 1, (prefix << BITS) | place)


@triton.jit
def _count_all(
    rows,
    row_of,
    prefixes,
    bins,
    out,
    counters,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add the histogram of each row to its bins in `out`."""
    row, number = row_of_program(rows, row_of)
    index = tl.load(row_of + tl.program_id(0)).to(tl.int64)
    bins, copies, blocks = _own_bins(bins, row, number, index, SIZE)
    _, many, numbers = _source(row, number, bins, bins, bins, False, SIZE, 0, ALIGNED)
    prefix = tl.load(prefixes + index).to(tl.int32)
    _count_in(bins + number % copies * BINS, numbers, many, prefix, SHIFT, BITS, SIZE)
    if is_last(counters + index, blocks.to(tl.int32)):
        to = out + (index << BITS) + tl.arange(0, 1 << BITS)
        total = tl.load(to) + _collected(bins, copies, BITS).to(tl.int32)
        tl.store(to, total)


@triton.jit
def _place_blocks(above, ties, blocks, wanted, TILE: tl.constexpr):
    """Make of a row's blocks' counts where their entries go in the row's, and how many ties lie
    before each; return how many entries the row has."""
    more = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for begin in range(0, blocks, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < blocks
        mine = tl.load(above + at, mask=inside, other=0)
        own_ties = tl.load(ties + at, mask=inside, other=0)
        # One scan of both counts, which are less than 2^32 in a tile: of ties in the upper half.
        both = mine | (own_ties << 32)
        through = tl.cumsum(both, axis=0)
        before = equal + (through >> 32) - own_ties
        to = more + (through & 0xFFFFFFFF) - mine + tl.minimum(before, wanted)
        tl.store(above + at, to, mask=inside)
        tl.store(ties + at, before, mask=inside)
        total = tl.sum(both, axis=0)
        more += total & 0xFFFFFFFF
        equal += total >> 32
    return more + tl.minimum(equal, wanted)


@triton.jit
def _most(row):
    """How many entries a row has at most."""
    return tl.minimum(tl.load(row + K), tl.load(row + COUNT))


@triton.jit
def _place_rows(rows, totals, count, in_all, TILE: tl.constexpr):
    """Make of rows' numbers of entries where they begin, one behind another; and write how many
    there are in all."""
    entries = tl.full((), 0, tl.int64)
    for begin in range(0, in_all, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < in_all
        row = rows + at.to(tl.int64) * COLUMNS
        some = tl.load(row + K, mask=inside, other=0) > 0
        some &= tl.load(row + COUNT, mask=inside, other=0) > 0
        mine = tl.load(totals + at, mask=some, other=0)
        through = tl.cumsum(mine, axis=0)
        tl.store(totals + at, entries + through - mine, mask=some)
        entries += tl.sum(mine, axis=0)
    tl.store(count, entries)


@triton.jit(do_not_specialize=["in_all", "active"])
def _count_selected(
    rows,
    row_of,
    candidates,
    counts,
    known,
    keys,
    allowed,
    above,
    ties,
    totals,
    count,
    counters,
    in_all,
    active,
    STRIDE: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """How many elements of each block have a larger magnitude than its row's key, and how many that
    one; then where their entries go.

    Without `LISTED` the entries of the rows, `in_all` of which `active` have some, lie one behind
    another.
    """
    row, number = row_of_program(rows, row_of)
    if tl.load(row + K) != 0:
        program = tl.program_id(0).to(tl.int64)
        index = tl.load(row_of + program).to(tl.int64)
        _, many, numbers = _source(
            row, number, candidates, counts, known + index * KNOWN, LISTED, SIZE, ROOM, ALIGNED
        )
        least = tl.load(keys + index * STRIDE).to(tl.int32)
        more = tl.zeros((TILE,), tl.int32)
        equal = tl.zeros((TILE,), tl.int32)
        for first in range(0, many, TILE):
            at = first + tl.arange(0, TILE)
            inside = at < many
            key = key_of(tl.load(numbers + at, mask=inside, other=0.0))
            more += (inside & (key > least)).to(tl.int32)
            equal += (inside & (key == least)).to(tl.int32)
        tl.store(above + program, tl.sum(more, axis=0).to(tl.int64))
        tl.store(ties + program, tl.sum(equal, axis=0).to(tl.int64))
        blocks = ((tl.load(row + COUNT) + SIZE - 1) // SIZE).to(tl.int32)
        if is_last(counters + index, blocks):
            begin = program - number
            most_ties = tl.maximum(tl.load(allowed + index * STRIDE), 0)
            total = _place_blocks(above + begin, ties + begin, blocks, most_ties, SPAN)
            if not LISTED:
                tl.store(totals + index, tl.minimum(total, _most(row)))
                if is_last(counters + in_all, active):
                    _place_rows(rows, totals, count, in_all, SPAN)


@triton.jit
def _write_entries(
    rows,
    row_of,
    candidates,
    offsets,
    counts,
    known,
    keys,
    allowed,
    above,
    ties,
    totals,
    places,
    values,
    STRIDE: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write each block's entries, no more than its row may have, and take them off `left`."""
    row, number = row_of_program(rows, row_of)
    if tl.load(row + K) != 0:
        program = tl.program_id(0).to(tl.int64)
        index = tl.load(row_of + program).to(tl.int64)
        listed, many, numbers = _source(
            row, number, candidates, counts, known + index * KNOWN, LISTED, SIZE, ROOM, ALIGNED
        )
        least = tl.load(keys + index * STRIDE).to(tl.int32)
        most_ties = tl.load(allowed + index * STRIDE)
        to = tl.load(above + program)
        ties_before = tl.load(ties + program)
        begin = tl.load(row + ENTRY if LISTED else totals + index)
        room = _most(row)
        places += begin
        values += begin
        place = tl.load(row + AT) + number * SIZE
        left = pointer(row, LEFT, tl.float32, ALIGNED) + number * SIZE
        for first in range(0, many, TILE):
            at = first + tl.arange(0, TILE)
            inside = at < many
            c = tl.load(numbers + at, mask=inside, other=0.0)
            tl.debug_barrier()  # other threads may store to what these have loaded
            key = key_of(c)
            equal = inside & (key == least)
            before = ties_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal
            taken = (inside & (key > least)) | (equal & (before < most_ties))
            is_listed = taken & (at < listed)
            offset = tl.load(offsets + program * ROOM + at, mask=is_listed, other=0).to(tl.int32)
            offset = tl.where(listed > 0, offset, at)
            through = tl.cumsum(taken.to(tl.int32), axis=0)
            entry = to + through - 1
            taken &= entry < room
            tl.store(places + entry, (place + offset).to(tl.int32), mask=taken)
            _take_off(c, left + offset, values + entry, taken, VALUE, FORMAT)
            to += tl.max(through, axis=0)
            ties_before += tl.sum(equal.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["each", "rank", "ranks", "parameters"])
def _merge(
    came,
    wanted,
    begins,
    told,
    each,
    rank,
    ranks,
    parameters,
    BITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Of a parameter whose histograms this rank adds up: the bin, and how many of it."""
    mine = tl.program_id(0).to(tl.int64)
    number = rank * each + mine
    want = tl.load(wanted + number, mask=number < parameters, other=0)
    bins = came + (mine << BITS)
    total = tl.zeros((1 << BITS,), tl.int64)
    for other in range(ranks):
        total += _counts_of(bins + ((other * each) << BITS) + tl.arange(0, 1 << BITS))
    place, left = _end_of(total, want, BITS)
    at = tl.arange(0, RANKS)
    inside = at < ranks
    there = tl.load(bins + ((at * each) << BITS) + place, mask=inside, other=0)
    there = there.to(tl.uint32, bitcast=True).to(tl.int64)
    begin = tl.load(begins + at * (ranks * each) + number, mask=inside, other=-1)
    # Of those that are equal the first: what the pieces before one have comes off.
    before = (begin[:, None] >= 0) & (begin[:, None] < begin[None, :])
    taken = left - tl.sum(tl.where(before, there[:, None], 0), axis=0)
    tl.store(told + mine, place.to(tl.int64))
    tl.store(told + each + mine, left)
    tl.store(told + (2 + at) * each + mine, tl.maximum(taken, 0), mask=inside)


@triton.jit(do_not_specialize=["each", "rank", "ranks", "parameters"])
def _take(
    heard, prefixes, out, each, rank, ranks, parameters, BITS: tl.constexpr, SIZE: tl.constexpr
):
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = number < parameters
    at = heard + number // each * ((2 + ranks) * each) + number % each
    prefix = tl.load(prefixes + number, mask=inside, other=0) << BITS
    tl.store(out + number, prefix | tl.load(at, mask=inside, other=0), mask=inside)
    out += parameters
    tl.store(out + number, tl.load(at + each, mask=inside, other=0), mask=inside)
    out += parameters
    tied = tl.load(at + (2 + rank) * each, mask=inside, other=0)
    tl.store(out + number, tied, mask=inside)


def _registers(most: int) -> dict[str, int]:
    """An option: how many registers a thread has at most. AMD's compiler knows none."""
    return {} if torch.version.hip else {"maxnreg": most}


def _types(table: Table) -> list[dict[str, Any]]:
    """Constexprs of the launches that read gradients: one a dtype."""
    return [
        {
            **{"NUMBER": number, "TYPE": segments.DTYPES[number]},
            **{"HOLDS": table.is_held, "ALIGNED": table.aligned},
        }
        for number in table.dtypes
        if table.programs
    ]


def _formats(values: torch.Tensor) -> dict[str, Any]:
    return {"VALUE": name_of(values.dtype), "FORMAT": tuple(FORMATS[values.dtype])}


def _blocks(table: NDArray[np.int64], size: int = BLOCK) -> NDArray[np.int64]:
    """How many blocks each row has."""
    return -(-table[:, segments.COUNT] // size)


def _room(table: NDArray[np.int64]) -> tuple[int, int]:
    """Refuse what kernels would misread, as far as a look at the table tells.

    Returns:
        How many bytes of messages, and how many words of what is found, it has.
    """
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != segments.COLUMNS:
        raise ConfigurationError(
            f"a table must be int64, (rows, {segments.COLUMNS}), not {table.dtype}, {table.shape}"
        )
    number = table[:, segments.DTYPE]
    if ((number < 0) | (number >= len(segments.DTYPES))).any():
        raise ConfigurationError(f"dtypes in a table must be below {len(segments.DTYPES)}")
    copied = table[table[:, segments.K] == 0]
    ends = copied[:, segments.AT] + 4 * copied[:, segments.COUNT]
    items = table[:, segments.ITEM].max(initial=-1) + 1
    return int(ends.max(initial=0)), segments.NONZERO + int(items)


def _check_room(
    messages: torch.Tensor, found: torch.Tensor, room: tuple[int, int], device: torch.device
) -> None:
    check("messages", messages, (torch.uint8,), room[0], device)
    check("found", found, (torch.int32,), room[1], device)


def _check_entries(
    places: torch.Tensor, values: torch.Tensor, room: int, device: torch.device
) -> None:
    check("places", places, (torch.int32,), room, device)
    check("values", values, FLOATS, room, device)


def _by_chunk(table: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """A table with a row for each chunk of the compressed rows."""
    count = table[:, segments.COUNT]
    chunks = np.where(table[:, segments.K] == 0, 1, -(-count // chunk))
    number = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    table = np.repeat(table, chunks, axis=0)
    k = table[:, segments.K].copy()
    first = number * chunk
    table[:, segments.ADDRESS] += first * np.where(table[:, segments.DTYPE] == 0, 4, 2)
    table[:, segments.HELD] += np.where(table[:, segments.HELD] == 0, 0, 4 * first)
    table[:, segments.LEFT] += 4 * first
    table[:, segments.AT] += first
    table[:, segments.ENTRY] += number * k
    here = np.minimum(table[:, segments.COUNT] - first, chunk)
    table[:, segments.COUNT] = np.where(k == 0, table[:, segments.COUNT], here)
    table[:, segments.K] = -(-k * here // chunk)
    return table


def _in_registers(
    on: Table,
    chunk: int,
    places: torch.Tensor,
    values: torch.Tensor,
    messages: torch.Tensor,
    found: torch.Tensor,
    tables: Tables,
) -> None:
    wide = 1 << (chunk - 1).bit_length()
    warps = max(1, wide // _OF_A_WARP)
    bits = torch.empty(on.programs * wide // 32, dtype=torch.int32, device=tables.device)
    for types in _types(on):
        launch = launcher(
            chunks_in_registers,
            **{"SIZE": chunk, "WIDE": wide, "LANES": 32 * warps},
            **{"num_warps": warps, **_registers(96)},
            **{**types, **_formats(values), **OPTIONS},
        )
        launch(on.programs, on.rows, on.row_of, places, words(values), messages, found, bits)


def _by_blocks(
    on: Table,
    places: torch.Tensor,
    values: torch.Tensor,
    messages: torch.Tensor,
    found: torch.Tensor,
    tables: Tables,
) -> None:
    if not on.programs:
        return

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=tables.device)

    rows = len(on.rows)
    known = room(rows * KNOWN.value, torch.int64)
    candidates = room(on.programs * ROOM, torch.float32)
    offsets = room(on.programs * ROOM, torch.int16)
    counts = room(on.programs, torch.int32)
    bits = room(on.programs * BLOCK // 32, torch.int32)
    bins, counters = _workspaces(on, tables)
    for types in _types(on):
        launcher(_begin, FEW=SAMPLE, **types, **OPTIONS)(rows, on.rows, known)
        launch = launcher(
            _add,
            **{"LISTS": True, "SIZE": BLOCK, "ROOM": ROOM, "num_warps": 8},
            **{**_registers(64), **types, **OPTIONS},
        )
        launch(
            *(on.programs, on.rows, on.row_of, candidates, offsets, counts, known, bits),
            *(messages, found),
        )
    for number, (shift, width) in enumerate(ROUNDS):
        launch = launcher(
            _count_bins,
            **{"ROUND": number, "SHIFT": shift, "BITS": width, "SIZE": BLOCK, "ROOM": ROOM},
            **{"ALIGNED": on.aligned, **_FEW, **OPTIONS},
        )
        launch(on.programs, on.rows, on.row_of, candidates, counts, known, bins, counters)
    last = len(ROUNDS)
    keys, allowed = known[PREFIX.value + last :], known[WANTED.value + last :]
    constants = {"STRIDE": KNOWN.value, "LISTED": True}
    lists = candidates, offsets, counts, known
    _write(on, lists, keys, allowed, places, values, 0, constants, tables)


def _workspaces(on: Table, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Bins, and counters of programs."""
    copies = on.programs // BLOCKS_OF_A_COPY.value + len(on.rows)
    bins = tables.workspace("bins", copies * BINS.value)
    return bins, tables.workspace("counters", len(on.rows) + 1)


def _write(
    on: Table,
    lists: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    allowed: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    active: int,
    constants: dict[str, Any],
    tables: Tables,
) -> torch.Tensor:
    """The entries. Return how many there are, if those of `active` rows lie one behind another."""
    in_all = len(on.rows)
    above, ties, totals, count = (
        torch.empty(size, dtype=torch.int64, device=tables.device)
        for size in (on.programs, on.programs, in_all, 1)
    )
    candidates, offsets, counts, known = lists
    shape = {"SIZE": BLOCK, "ROOM": ROOM, "ALIGNED": on.aligned, **_FEW, **OPTIONS}
    launcher(_count_selected, **constants, **shape, SPAN=256)(
        *(on.programs, on.rows, on.row_of, candidates, counts, known, keys, allowed, above, ties),
        *(totals, count, tables.workspace("counters", in_all + 1), in_all, active),
    )
    launcher(_write_entries, **constants, **shape, **_formats(values))(
        *(on.programs, on.rows, on.row_of, candidates, offsets, counts, known, keys, allowed),
        *(above, ties, totals, places, words(values)),
    )
    return count


def sparse_add(
    table: NDArray[np.int64], messages: torch.Tensor, found: torch.Tensor, tables: Tables
) -> None:
    """Write LEFT = c, the first step of a selection over several ranks' pieces.

    Args:
        table, messages, found, tables: as in `top_k`; nothing is taken off LEFT.

    Raises:
        ConfigurationError: an argument is not as said.
    """

    def make() -> tuple[Table, tuple[int, int]]:
        room = _room(table)
        return tables.of(table, _blocks(table)), room

    on, room = tables.once(("sparse_add", table.tobytes()), make)
    _check_room(messages, found, room, tables.device)
    for types in _types(on):
        launch = launcher(_add, LISTS=False, SIZE=BLOCK, ROOM=ROOM, **types, **OPTIONS)
        launch(
            *(on.programs, on.rows, on.row_of, found, found, found, found, found, messages),
            found,
        )


def sparse_histogram(
    table: NDArray[np.int64],
    shift: int,
    bits: int,
    prefixes: torch.Tensor,
    bins: torch.Tensor,
    tables: Tables,
) -> None:
    """Count elements of LEFT whose magnitude's bits begin with a prefix by those that follow.

    Args:
        table: int64, ``(rows, COLUMNS)``: COUNT and LEFT of compressed segments.
        shift: how many bits lie below those that are counted.
        bits: how many are counted, at most 11.
        prefixes: int64, ``(rows,)``: the bits above.
        bins: int32, ``(rows, 2**bits)``, the words of uint32; what is counted is added.
        tables: of their device.

    Raises:
        ConfigurationError: a tensor or a number is not as said.
    """
    if not (1 <= bits <= 11 and 0 <= shift <= 31 - bits):
        raise ConfigurationError(f"there are no {bits} bits of a magnitude above {shift}")
    check("prefixes", prefixes, (torch.int64,), len(table), tables.device)
    check("bins", bins, (torch.int32,), len(table) << bits, tables.device)
    on = tables.once(
        ("sparse_histogram", table.tobytes()), lambda: tables.of(table, _blocks(table))
    )
    if on.programs:
        copies, counters = _workspaces(on, tables)
        launch = launcher(
            _count_all, SHIFT=shift, BITS=bits, SIZE=BLOCK, ALIGNED=on.aligned, **OPTIONS
        )
        launch(on.programs, on.rows, on.row_of, prefixes, copies, bins, counters)


def sparse_select(
    table: NDArray[np.int64],
    keys: torch.Tensor,
    ties: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
) -> torch.Tensor:
    """Take of each row all with magnitude bits above its key, and the first `ties` that have these.

    Never more than min(K, COUNT) of a row, whatever key and ties are.

    Args:
        table: int64, ``(rows, COLUMNS)``: COUNT, AT, K and LEFT of compressed segments; what values
            leave is left of LEFT.
        keys, ties: int64, ``(rows,)``.
        places: int32, the words of uint32; those of a row are AT + index, ascending. Entries of all
            rows lie one behind another from 0 on.
        values: float32, float16 or bfloat16.
        tables: of their device.

    Returns:
        How many there are in all, int64, ``(1,)``; the caller owns it.

    Raises:
        ConfigurationError: a tensor is not as said, or has no room.
    """
    check("keys", keys, (torch.int64,), len(table), tables.device)
    check("ties", ties, (torch.int64,), len(table), tables.device)

    def make() -> tuple[Table, int, int]:
        most = np.minimum(table[:, segments.K], table[:, segments.COUNT])
        on = tables.of(table, np.where(most > 0, _blocks(table), 0))
        return on, int(most.sum()), int((most > 0).sum())

    on, room, active = tables.once(("sparse_select", table.tobytes()), make)
    _check_entries(places, values, room, tables.device)
    if not on.programs:
        return torch.zeros(1, dtype=torch.int64, device=tables.device)
    constants = {"STRIDE": 1, "LISTED": False}
    return _write(on, (keys,) * 4, keys, ties, places, values, active, constants, tables)


def merge(
    came: torch.Tensor,
    wanted: torch.Tensor,
    begins: NDArray[np.int64],
    rank: int,
    tables: Tables,
) -> torch.Tensor:
    """Find where the wanted elements end in the sums of ranks' histograms.

    Args:
        came: int32, ``(ranks, each, bins)``, the words of uint32: of each rank its histograms of
            the parameters rank * each to (rank + 1) * each; those from `parameters` on are padding.
        wanted: int64, ``(parameters,)``: how many elements of each, the largest.
        begins: int64, ``(ranks, ranks * each)``: where each rank's piece of a parameter begins;
            -1: it is empty.
        rank: this one.
        tables: of their device.

    Returns:
        int64, ``(2 + ranks, each)``, the caller's: the bin in which the wanted end; how many are
        wanted of that one; and of these how many at most of each rank's. Of those of equal
        magnitude the first pieces' come first.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    ranks, each, bins = came.shape
    check("came", came, (torch.int32,), 0, tables.device)
    check("wanted", wanted, (torch.int64,), 0, tables.device)
    if begins.dtype != np.int64 or begins.shape != (ranks, ranks * each):
        raise ConfigurationError(
            f"begins must be int64, {(ranks, ranks * each)}, not {begins.dtype}, {begins.shape}"
        )
    told = torch.empty(2 + ranks, each, dtype=torch.int64, device=tables.device)
    rows = 1 << (ranks - 1).bit_length()
    launch = launcher(_merge, BITS=bins.bit_length() - 1, RANKS=rows, **OPTIONS)
    launch(each, came, wanted, tables.numbers(begins), told, each, rank, ranks, len(wanted))
    return told


def take(
    heard: torch.Tensor, bits: int, prefixes: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unpack what all ranks' `merge` has told.

    Args:
        heard: int64, ``(ranks, 2 + ranks, each)``.
        bits: how many were counted.
        prefixes: int64, ``(parameters,)``: the bits above.
        rank: this one.

    Returns:
        Of each parameter the prefix with the bin, how many elements are wanted that have it, and
        of this rank's how many at most: int64, ``(parameters,)`` each, rows of one tensor.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    ranks, _, each = heard.shape
    many = len(prefixes)
    check("heard", heard, (torch.int64,), many, prefixes.device)
    check("prefixes", prefixes, (torch.int64,), 0, prefixes.device)
    out = torch.empty(3, many, dtype=torch.int64, device=prefixes.device)
    if many:
        launch = launcher(_take, BITS=bits, SIZE=128, **OPTIONS)
        launch(-(-many // 128), heard, prefixes, out, each, rank, ranks, many)
    return out[0], out[1], out[2]


def top_k(
    table: NDArray[np.int64],
    chunk: int,
    places: torch.Tensor,
    values: torch.Tensor,
    messages: torch.Tensor,
    found: torch.Tensor,
    tables: Tables,
) -> None:
    """Take the elements of c = x + held that come first, on the current stream.

    All tensors are contiguous, and on one device. How many launches there are does not depend on
    the number of rows.

    Args:
        table: int64, ``(rows, COLUMNS)``, see `pycollective.segments`. Rows with K 0 go to
            messages[AT:] in fp32, and need no LEFT. LEFT may be HELD, and overlaps nothing else.
        chunk: 0: K of each row are taken. Else K of each chunk of so many elements, a multiple of
            64 up to 65,536, K at most; of a last one of m elements ceil(K m / chunk).
        places: int32, the words of uint32: from ENTRY on AT + index, ascending.
        values: float32, float16 or bfloat16: from ENTRY on what is taken off LEFT.
        messages: uint8, flat.
        found: int32, see `pycollective.segments`: NONZERO and BAD are set; where BAD is, all other
            outputs hold anything.
        tables: of their device.

    Raises:
        ConfigurationError: the table or a tensor is not as said, or has no room.
    """
    in_registers = 0 < chunk <= LONGEST

    def make() -> tuple[Table, tuple[int, int], int]:
        room = _room(table)
        if chunk % 64 or not 0 <= chunk <= 65_536:
            raise ConfigurationError(
                f"a chunk is a multiple of 64 elements up to 65536, not {chunk}"
            )
        rows = table[table[:, segments.K] > 0]
        count, k = rows[:, segments.COUNT], rows[:, segments.K]
        if chunk and (k > chunk).any():
            raise ConfigurationError(f"{k.max()} of each {chunk} elements cannot be taken")
        taken = count // chunk * k + -(-k * (count % chunk) // chunk) if chunk else k
        entries = int((rows[:, segments.ENTRY] + taken).max(initial=0))
        if in_registers:
            return tables.of(table, _blocks(table, chunk)), room, entries
        split = _by_chunk(table, chunk) if chunk else table
        return tables.of(split, _blocks(split)), room, entries

    on, room, entries = tables.once(("top_k", chunk, table.tobytes()), make)
    _check_room(messages, found, room, tables.device)
    _check_entries(places, values, entries, tables.device)
    if in_registers:
        _in_registers(on, chunk, places, values, messages, found, tables)
    else:
        _by_blocks(on, places, values, messages, found, tables)
