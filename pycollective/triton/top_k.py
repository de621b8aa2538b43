"""Top-k selection with error feedback on GPUs: the elements, values and residuals of the CPU's.

docs/wire.md, "Sparse payloads", says which elements are taken and what is left of them. All that is
counted is integers, so no order of threads shows.

**Chunks of up to 4,096 elements** (`top_k_chunks`) each have a program, which holds c = x + held in
registers, and writes it as the residual. It searches for the magnitude of the k-th element, by
counts. Those that are selected are a bitmap then, of a word for 32 elements. The program lists
their places by it, writes their values, and takes these off the residual. So a step reads and
writes each element once, but for those selected.

**Longer ones, and tensors**, are cut into blocks. The launches, in order:

1. `_begin` samples a segment (a chunk, or the tensor) and guesses a magnitude that a few more
   than k elements reach. A guess decides what is read, never what is chosen.
2. `_add` writes c, and of each block, apart, those that reach the guess: its *candidates*. Where
   fewer than k do, the guess is given up.
3. `_count_bins` and `_find_bin`, three times: histograms of 11, 10 and 10 bits of the magnitude
   find that of the k-th element.
4. `_count_selected` and `_place_blocks`: how many elements of each block, and where they go.
   `_write_entries` writes places and values, and takes these off the residual.

From 3 on a block's candidates are read, or its elements where no guess was made or its candidates
found no room.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pycollective.errors import ConfigurationError
from pycollective.triton.floats import rounded, widened
from pycollective.triton.formats import FORMATS, check, name_of, words

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
OPTIONS = {"enable_fp_fusion": False}
_FEW = {"TILE": 128, "num_warps": 1}  # for a block's candidates, which are a hundred or so
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPACE = 1 << 32  # places
LONGEST = 4096  # elements of a chunk that a program holds
_OF_A_WARP = 1024  # elements, so 32 of a thread

BLOCK = 4096  # elements
ROOM = 512  # candidates of a block
SAMPLE = 4096
# How many copies of a tensor's histogram there are: neighbours' additions often meet in a bin.
COPIES = 32
BINS = 2048
ROUNDS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of each

# What is known of a segment, int64 each. A launch reads none that it writes.
LENGTH = tl.constexpr(0)
LEAST = tl.constexpr(1)  # the guess; -1: there is none
REACHED = tl.constexpr(2)  # how many elements reach the guess
FIRST = tl.constexpr(3)  # where the segment's entries begin
# Before each round, and after the last: the first bits of the k-th magnitude, and how many are
# wanted of those that begin with them; in the end, of those that have it.
PREFIX = tl.constexpr(4)
WANTED = tl.constexpr(8)
KNOWN = tl.constexpr(12)


class Entries(NamedTuple):
    """Some elements of a space of up to 2^32 places, on a device; room for fewer than 2^31.

    Attributes:
        places: int32, ``(capacity,)``, the words of uint32; those in use ascend.
        values: float32, float16 or bfloat16, ``(capacity,)``.
        count: int64, ``(1,)``: how many are in use.
    """

    places: torch.Tensor
    values: torch.Tensor
    count: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, dtype: torch.dtype, device: torch.device | str) -> Entries:
        """Room for so many, of which none is in use."""
        return cls(
            torch.empty(capacity, dtype=torch.int32, device=device),
            torch.empty(capacity, dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def check(
        self,
        name: str,
        room: int,
        device: torch.device,
        dtypes: tuple[torch.dtype, ...] = FLOATS,
    ) -> None:
        """Refuse entries that a kernel would misread.

        Args:
            name: of the argument, for the error.
            room: how many they must have room for.
            device: where they must be.
            dtypes: those that the values may have.

        Raises:
            ConfigurationError: they are not as said, or have room for 2^31 or more.
        """
        capacity = self.places.numel()
        check(f"{name}.places", self.places, (torch.int32,), room, device)
        check(f"{name}.values", self.values, dtypes, capacity, device)
        check(f"{name}.count", self.count, (torch.int64,), 1, device)
        check_capacity(name, capacity)


def check_capacity(name: str, capacity: int) -> None:
    """Refuse room for 2^31 entries or more: their numbers are words of 32 bits with a sign."""
    if not 0 <= capacity < 1 << 31:
        raise ConfigurationError(
            f"{name} must have room for less than 2^31 entries, not {capacity}"
        )


def check_space(place: int, size: int) -> None:
    """Refuse places that are no words of uint32: from `place` on, `size` of them."""
    if not (place >= 0 and 0 <= size <= SPACE - place):
        raise ConfigurationError(f"{size} places from {place} on are not below 2^32")


@triton.jit
def _sum_of(x, held, mask, HELD: tl.constexpr, TYPE: tl.constexpr):
    """x + held, as fp32."""
    c = widened(tl.load(x, mask=mask), TYPE)
    if HELD:
        c += tl.load(held, mask=mask)
    return c


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
def tell(bad, key):
    """Say so if an element is not finite."""
    if tl.max(key, axis=0) >= INFINITE:
        tl.atomic_or(bad, 1, sem="relaxed")


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
    x,
    held,
    left,
    places,
    values,
    bits,
    bad,
    count,
    k,
    place,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    MASKED: tl.constexpr,
    HELD: tl.constexpr,
    TYPE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The chunk of `count` elements from these pointers on, the first of which has that place."""
    at = tl.arange(0, WIDE)
    inside = at < (count if MASKED else SIZE)
    mask = inside if MASKED or SIZE != WIDE else None
    c = _sum_of(x + at, held + at, mask, HELD, TYPE)
    tl.store(left + at, c, mask=mask)
    key = key_of(c)
    if MASKED or SIZE != WIDE:
        key = tl.where(inside, key, -1)
    most = tl.max(key, axis=0)
    if most >= INFINITE:
        tl.atomic_or(bad, 1, sem="relaxed")
    OF_EACH: tl.constexpr = WIDE // LANES
    least, ties = _threshold(key, most, count, k, LANES if OF_EACH >= 8 else 1, OF_EACH)
    word = _shared(bits, _words_of(key > least, WIDE), WIDE)
    if ties > 0:
        equal = _words_of(key == least, WIDE)
        tl.debug_barrier()
        word |= _first_ones(_shared(bits, equal, WIDE), ties)
    _list_ones(places, word, place.to(tl.int32), k, WIDE)
    for first in range(0, k, LANES):
        entry = first + tl.arange(0, LANES)
        taken = entry < k
        # Of a chunk the differences of places are less than its size, whatever wraps around.
        index = tl.load(places + entry, mask=taken, other=0) - place.to(tl.int32)
        element = tl.load(left + index, mask=taken, other=0.0)
        _take_off(element, left + index, values + entry, taken, VALUE, FORMAT)


@triton.jit(do_not_specialize=["n", "k", "tail", "place"])
def chunks_in_registers(
    x,
    held,
    left,
    places,
    values,
    count,
    bits,
    bad,
    n,
    k,
    tail,
    place,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    HELD: tl.constexpr,
    TYPE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """A chunk of `SIZE` elements a program; of a last one that is shorter `tail` are taken."""
    program = tl.program_id(0).to(tl.int64)
    first = program * SIZE
    to = tl.load(count) + program * k
    bits += program * (WIDE // 32)
    if first + SIZE <= n:
        _chunk(
            *(x + first, held + first, left + first, places + to, values + to, bits, bad),
            *(SIZE, k, place + first, SIZE, WIDE, LANES, False, HELD, TYPE, VALUE, FORMAT),
        )
    else:
        _chunk(
            *(x + first, held + first, left + first, places + to, values + to, bits, bad),
            *(n - first, tail, place + first, SIZE, WIDE, LANES, True, HELD, TYPE, VALUE, FORMAT),
        )


@triton.jit(do_not_specialize=["n", "k", "length"])
def _begin(
    x,
    held,
    known,
    count,
    n,
    k,
    length,
    FEW: tl.constexpr,
    HELD: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Set out what is known of a segment of `length` elements, of which k are wanted.

    Of a last one that is shorter as many for each, rounded up.
    """
    segment = tl.program_id(0).to(tl.int64)
    known += segment * KNOWN
    at = segment * length
    here = tl.minimum(n - at, length).to(tl.int64)
    wanted = ((k * here + length - 1) // length).to(tl.int64)
    least = tl.full((), -1, tl.int32)
    guessed = (here >= 8 * FEW) & (wanted * 16 <= here) & (wanted > 0)
    if guessed:
        number = tl.arange(0, FEW)
        piece = here // FEW
        mixed = ((number + 1) * 0x1E3779B9).to(tl.uint32, bitcast=True)
        places = at + number * piece + ((mixed.to(tl.int64) * piece) >> 32)
        key = key_of(_sum_of(x + places, held + places, None, HELD, TYPE))
        # Of the sample m are expected among the first k, and sqrt(m) is a deviation, about: this
        # is four deviations more.
        mean = (wanted * FEW // here).to(tl.int32)
        least, _ = _searched(key, mean + mean // 4 + 16, 0, 0, FEW, tl.max(key, axis=0), True)
        least = tl.maximum(least, 0)
    tl.store(known + LENGTH, here)
    tl.store(known + WANTED, wanted)
    tl.store(known + LEAST, least.to(tl.int64))
    tl.store(known + REACHED, tl.full((), 0, tl.int64))
    tl.store(known + PREFIX, tl.full((), 0, tl.int64))
    tl.store(known + FIRST, tl.load(count) + segment * k)


@triton.jit
def _add_block(
    x,
    held,
    left,
    candidates,
    offsets,
    counts,
    bits,
    reached,
    bad,
    here,
    least,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    MASKED: tl.constexpr,
    HELD: tl.constexpr,
    TYPE: tl.constexpr,
):
    at = tl.arange(0, SIZE)
    mask = at < here if MASKED else None
    c = _sum_of(x + at, held + at, mask, HELD, TYPE)
    key = key_of(c)
    if MASKED:
        key = tl.where(at < here, key, -1)
    tell(bad, key)
    tl.store(left + at, c, mask=mask)
    if least >= 0:
        word = _shared(bits, _words_of(key >= least, SIZE), SIZE)
        found = _list_ones(offsets, word, 0, ROOM, SIZE)
        tl.store(counts, found)
        tl.atomic_add(reached, found.to(tl.int64), sem="relaxed")
        found = tl.minimum(found, ROOM)
        for first in range(0, found, 128):
            entry = first + tl.arange(0, 128)
            listed = entry < found
            offset = tl.load(offsets + entry, mask=listed, other=0).to(tl.int32)
            number = tl.load(left + offset, mask=listed, other=0.0)
            tl.store(candidates + entry, number, mask=listed)
    else:
        tl.store(counts, ROOM + 1)


@triton.jit(do_not_specialize=["blocks"])
def _add(
    x,
    held,
    left,
    candidates,
    offsets,
    counts,
    known,
    bits,
    bad,
    blocks,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    HELD: tl.constexpr,
    TYPE: tl.constexpr,
):
    """left = x + held, and each block's candidates; `blocks` to a segment.

    Segments begin `STRIDE` elements apart; it is 0 where there is one.
    """
    program = tl.program_id(0).to(tl.int64)
    segment = program // blocks
    known += segment * KNOWN
    start = (program - segment * blocks) * SIZE
    here = tl.load(known + LENGTH) - start
    least = tl.load(known + LEAST).to(tl.int32)
    first = segment * STRIDE + start
    candidates += program * ROOM
    offsets += program * ROOM
    counts += program
    bits += program * (SIZE // 32)
    if here >= SIZE:
        _add_block(
            *(
                x + first,
                held + first,
                left + first,
                candidates,
                offsets,
                counts,
                bits,
                known + REACHED,
                bad,
            ),
            *(SIZE, least, SIZE, ROOM, False, HELD, TYPE),
        )
    else:
        _add_block(
            *(
                x + first,
                held + first,
                left + first,
                candidates,
                offsets,
                counts,
                bits,
                known + REACHED,
                bad,
            ),
            *(here, least, SIZE, ROOM, True, HELD, TYPE),
        )


@triton.jit
def _source(
    left,
    candidates,
    counts,
    known,
    blocks,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """What of this program's block is read: (how many candidates, how many numbers, where).

    And its segment, and where it begins in that. Candidates are none where elements are read.
    """
    program = tl.program_id(0).to(tl.int64)
    segment = program // blocks
    start = (program - segment * blocks) * SIZE
    known += segment * KNOWN
    many = tl.minimum(tl.load(known + LENGTH) - start, SIZE).to(tl.int32)
    numbers = left + segment * STRIDE + start
    listed = tl.full((), 0, tl.int32)
    if tl.load(known + REACHED) >= tl.load(known + WANTED):
        found = tl.load(counts + program)
        if found <= ROOM:
            listed = found
            many = found
            numbers = candidates + program * ROOM
    return listed, many, numbers, segment, start


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


@triton.jit(do_not_specialize=["blocks"])
def _count_bins(
    left,
    candidates,
    counts,
    known,
    bins,
    blocks,
    ROUND: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A round of histograms: those of a segment have `COPIES` copies of int32."""
    _, many, numbers, segment, start = _source(
        left, candidates, counts, known, blocks, STRIDE, SIZE, ROOM
    )
    bins += (segment * COPIES + (start // SIZE) % COPIES) * BINS
    prefix = tl.load(known + segment * KNOWN + PREFIX + ROUND).to(tl.int32)
    _count_in(bins, numbers, many, prefix, SHIFT, BITS, TILE)


@triton.jit
def _find_bin(
    known,
    bins,
    ROUND: tl.constexpr,
    BITS: tl.constexpr,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
):
    """The bin in which the wanted elements end; bins are 0 then."""
    segment = tl.program_id(0).to(tl.int64)
    known += segment * KNOWN
    bin = tl.arange(0, 1 << BITS)
    bins += segment * (COPIES * BINS) + bin
    total = tl.zeros((1 << BITS,), tl.int64)
    for copy in range(COPIES):
        # What a bin of 32 bits counts is not negative.
        total += tl.load(bins + copy * BINS).to(tl.uint32, bitcast=True).to(tl.int64)
    for copy in range(COPIES):
        tl.store(bins + copy * BINS, tl.zeros((1 << BITS,), tl.int32))
    wanted = tl.load(known + WANTED + ROUND)
    above = tl.cumsum(total, axis=0, reverse=True) - total
    # Of the bins above which too few lie the lowest: all that are higher have as few above them.
    place = (1 << BITS) - tl.sum((above < wanted).to(tl.int32), axis=0)
    place = tl.minimum(place, (1 << BITS) - 1)
    left = wanted - tl.sum(tl.where(bin == place, above, 0), axis=0)
    tl.store(known + WANTED + ROUND + 1, left)
    tl.store(known + PREFIX + ROUND + 1, (tl.load(known + PREFIX + ROUND) << BITS) | place)


@triton.jit(do_not_specialize=["blocks"])
def _count_selected(
    left,
    candidates,
    counts,
    known,
    above,
    ties,
    blocks,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many elements of each block have a larger magnitude than the k-th, and how many its."""
    _, many, numbers, segment, _ = _source(
        left, candidates, counts, known, blocks, STRIDE, SIZE, ROOM
    )
    least = tl.load(known + segment * KNOWN + PREFIX + 3).to(tl.int32)
    more = tl.zeros((TILE,), tl.int32)
    equal = tl.zeros((TILE,), tl.int32)
    for first in range(0, many, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < many
        key = key_of(tl.load(numbers + at, mask=inside, other=0.0))
        more += (inside & (key > least)).to(tl.int32)
        equal += (inside & (key == least)).to(tl.int32)
    program = tl.program_id(0)
    tl.store(above + program, tl.sum(more, axis=0).to(tl.int64))
    tl.store(ties + program, tl.sum(equal, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["blocks", "room"])
def _place_blocks(above, ties, known, count, blocks, room, TILE: tl.constexpr, GROWS: tl.constexpr):
    """Make of each block's counts where its entries go, and how many ties lie before it.

    `GROWS`: the only segment's entries are the last, and counted, if there is room for them.
    """
    segment = tl.program_id(0).to(tl.int64)
    known += segment * KNOWN
    first = tl.load(known + FIRST)
    wanted = tl.load(known + WANTED + 3)
    more = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for begin in range(0, blocks, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < blocks
        at += segment * blocks
        mine = tl.load(above + at, mask=inside, other=0)
        own_ties = tl.load(ties + at, mask=inside, other=0)
        # One scan of both counts, which are less than 2^32 in a tile: of ties in the upper half.
        both = mine | (own_ties << 32)
        through = tl.cumsum(both, axis=0)
        before = equal + (through >> 32) - own_ties
        to = first + more + (through & 0xFFFFFFFF) - mine + tl.minimum(before, wanted)
        tl.store(above + at, to, mask=inside)
        tl.store(ties + at, before, mask=inside)
        total = tl.sum(both, axis=0)
        more += total & 0xFFFFFFFF
        equal += total >> 32
    if GROWS:
        tl.store(count, tl.minimum(first + more + tl.minimum(equal, wanted), room))


@triton.jit(do_not_specialize=["blocks", "place", "room"])
def _write_entries(
    left,
    candidates,
    offsets,
    counts,
    known,
    above,
    ties,
    places,
    values,
    blocks,
    place,
    room,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write each block's entries, where there is room for them, and take them off `left`."""
    listed, many, numbers, segment, start = _source(
        left, candidates, counts, known, blocks, STRIDE, SIZE, ROOM
    )
    program = tl.program_id(0).to(tl.int64)
    known += segment * KNOWN
    least = tl.load(known + PREFIX + 3).to(tl.int32)
    wanted = tl.load(known + WANTED + 3)
    to = tl.load(above + program)
    ties_before = tl.load(ties + program)
    place += segment * STRIDE + start
    left += segment * STRIDE + start
    for first in range(0, many, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < many
        c = tl.load(numbers + at, mask=inside, other=0.0)
        tl.debug_barrier()  # other threads may store to what these have loaded
        key = key_of(c)
        equal = inside & (key == least)
        before = ties_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal
        taken = (inside & (key > least)) | (equal & (before < wanted))
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


@triton.jit(do_not_specialize=["n"])
def _add_all(x, held, left, bad, n, SIZE: tl.constexpr, HELD: tl.constexpr, TYPE: tl.constexpr):
    """left = x + held."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE)
    if first + SIZE <= n:
        c = _sum_of(x + first + at, held + first + at, None, HELD, TYPE)
        tl.store(left + first + at, c)
        tell(bad, key_of(c))
    else:
        inside = at < n - first
        c = _sum_of(x + first + at, held + first + at, inside, HELD, TYPE)
        tl.store(left + first + at, c, mask=inside)
        tell(bad, tl.where(inside, key_of(c), 0))


@triton.jit(do_not_specialize=["n"])
def _count_all(
    left,
    bins,
    prefix,
    n,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Histograms of `left`: `COPIES` copies of int32."""
    program = tl.program_id(0).to(tl.int64)
    first = program * SIZE
    many = tl.minimum(n - first, SIZE).to(tl.int32)
    bins += (program % COPIES) << BITS
    _count_in(bins, left + first, many, tl.load(prefix).to(tl.int32), SHIFT, BITS, SIZE)


def _registers(most: int) -> dict[str, int]:
    """An option: how many registers a thread has at most. AMD's compiler knows none."""
    return {} if torch.version.hip else {"maxnreg": most}


def _sources(
    x: torch.Tensor, held: torch.Tensor | None, left: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """The pointers and constexprs of a sum."""
    of = {"HELD": held is not None, "TYPE": name_of(x.dtype)}
    return (words(x), left if held is None else held, left), of


def _formats(entries: Entries) -> dict[str, Any]:
    dtype = entries.values.dtype
    return {"VALUE": name_of(dtype), "FORMAT": tuple(FORMATS[dtype])}


def selected_of(count: int, k: int, chunk: int) -> int:
    """Return how many are taken of a last chunk of `count` elements, if k are of each whole one."""
    return -(-k * count // chunk)


def _check_sum(
    x: torch.Tensor, held: torch.Tensor | None, left: torch.Tensor, bad: torch.Tensor
) -> None:
    check("x", x, FLOATS, 0, x.device)
    check("held", left if held is None else held, (torch.float32,), x.numel(), x.device)
    check("left", left, (torch.float32,), x.numel(), x.device)
    check("bad", bad, (torch.int32,), 1, x.device)


def add(x: torch.Tensor, held: torch.Tensor | None, left: torch.Tensor, bad: torch.Tensor) -> None:
    """Write left = x + held, as the first step of a selection over several ranks' shards.

    Args:
        x, held, left, bad: as in `top_k_chunks`; nothing is taken off `left`.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    n = x.numel()
    _check_sum(x, held, left, bad)
    pointers, of = _sources(x, held, left)
    if n:
        with torch.accelerator.device_index(x.device.index):
            _add_all[triton.cdiv(n, BLOCK),](*pointers, bad, n, SIZE=BLOCK, **of, **OPTIONS)


def histogram(
    left: torch.Tensor, shift: int, bits: int, prefix: torch.Tensor, bins: torch.Tensor
) -> None:
    """Count the elements whose magnitude's bits begin with `prefix` by the bits that follow.

    Args:
        left: float32, contiguous.
        shift: how many bits lie below those that are counted.
        bits: how many are counted, at most 11.
        prefix: int64, ``(1,)``, of its device: the bits above.
        bins: int64, ``(2**bits,)``, of its device; what is counted is added.

    Raises:
        ConfigurationError: a tensor or a number is not as said.
    """
    n = left.numel()
    if not (1 <= bits <= 11 and 0 <= shift <= 31 - bits):
        raise ConfigurationError(f"there are no {bits} bits of a magnitude above {shift}")
    check("left", left, (torch.float32,), 0, left.device)
    check("prefix", prefix, (torch.int64,), 1, left.device)
    check("bins", bins, (torch.int64,), 1 << bits, left.device)
    if n == 0:
        return
    found = torch.zeros(COPIES, 1 << bits, dtype=torch.int32, device=left.device)
    with torch.accelerator.device_index(left.device.index):
        _count_all[triton.cdiv(n, BLOCK),](
            left, found, prefix, n, SHIFT=shift, BITS=bits, SIZE=BLOCK, COPIES=COPIES, **OPTIONS
        )
    bins += (found.to(torch.int64) & 0xFFFFFFFF).sum(0)


class _Blocks:
    """The blocks of segments, and what is kept of them from launch to launch."""

    def __init__(self, left: torch.Tensor, length: int, segments: int, known: torch.Tensor) -> None:
        self.left, self.known, self.segments = left, known, segments
        self.blocks = triton.cdiv(length, BLOCK)
        self.shape = {"STRIDE": length if segments > 1 else 0, "SIZE": BLOCK, "ROOM": ROOM}
        self.programs = segments * self.blocks

        def room(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=left.device)

        self.counts = room(self.programs, torch.int32)
        self.above, self.ties = (room(self.programs, torch.int64) for _ in range(2))
        # A selection that is given its key has none; `add` makes room.
        self.candidates, self.offsets = room(0, torch.float32), room(0, torch.int16)

    def add(
        self,
        pointers: tuple[torch.Tensor, ...],
        of: dict[str, Any],
        bad: torch.Tensor,
    ) -> None:
        """The sum, and the candidates."""
        room = self.programs * ROOM
        self.candidates = torch.empty(room, dtype=torch.float32, device=self.left.device)
        self.offsets = torch.empty(room, dtype=torch.int16, device=self.left.device)
        bits = torch.empty(self.programs * BLOCK // 32, dtype=torch.int32, device=self.left.device)
        _add[self.programs,](
            *(*pointers, self.candidates, self.offsets, self.counts, self.known, bits, bad),
            self.blocks,
            **{"num_warps": 8, **_registers(64), **self.shape, **of, **OPTIONS},
        )

    def find(self) -> None:
        """The k-th magnitude."""
        copies = min(COPIES, triton.next_power_of_2(triton.cdiv(self.blocks, 64)))
        bins = torch.zeros(
            self.segments * copies * BINS, dtype=torch.int32, device=self.left.device
        )
        for number, (shift, bits) in enumerate(ROUNDS):
            _count_bins[self.programs,](
                *(self.left, self.candidates, self.counts, self.known, bins),
                self.blocks,
                **{"ROUND": number, "SHIFT": shift, "BITS": bits, "COPIES": copies, "BINS": BINS},
                **{**self.shape, **_FEW, **OPTIONS},
            )
            _find_bin[self.segments,](
                *(self.known, bins),
                **{"ROUND": number, "BITS": bits, "COPIES": copies, "BINS": BINS},
                **{"num_warps": 16 if number else 8, **OPTIONS},
            )

    def write(self, entries: Entries, place: int, most: int) -> None:
        """The entries: as many, at most where there is one segment."""
        room = entries.places.numel()
        _count_selected[self.programs,](
            *(self.left, self.candidates, self.counts, self.known, self.above, self.ties),
            self.blocks,
            **{**self.shape, **_FEW, **OPTIONS},
        )
        _place_blocks[self.segments,](
            *(self.above, self.ties, self.known, entries.count, self.blocks, room),
            **{"TILE": 2048, "GROWS": self.segments == 1, "num_warps": 16, **OPTIONS},
        )
        _write_entries[self.programs,](
            *(self.left, self.candidates, self.offsets, self.counts, self.known),
            *(self.above, self.ties, entries.places, words(entries.values)),
            *(self.blocks, place, room),
            **{**self.shape, **_formats(entries), **_FEW, **OPTIONS},
        )
        if self.segments > 1:
            entries.count.add_(most)


def select(
    left: torch.Tensor, key: torch.Tensor, ties: torch.Tensor, entries: Entries, place: int = 0
) -> None:
    """Take all elements with magnitude bits above `key`, and the first `ties` that have these.

    All tensors are contiguous, on one device, and overlap no other.

    Args:
        left: float32, ``(n,)``; what their values leave is left of them.
        key, ties: int64, ``(1,)``. Whatever they are, no more elements are taken than `entries`
            have room for.
        entries: get them, behind those that they have.
        place: of the first element; places are counted from it.

    Raises:
        ConfigurationError: a tensor is not as said, or a place is not below 2^32.
    """
    n = left.numel()
    check("left", left, (torch.float32,), 0, left.device)
    check("key", key, (torch.int64,), 1, left.device)
    check("ties", ties, (torch.int64,), 1, left.device)
    entries.check("entries", 0, left.device)
    check_space(place, n)
    if n == 0:
        return
    none = torch.zeros(3, dtype=torch.int64, device=left.device)
    length = torch.full((1,), n, dtype=torch.int64, device=left.device)
    known = torch.cat([length, none[:2] - 1, entries.count, none, key, none, ties.clamp(min=0)])
    with torch.accelerator.device_index(left.device.index):
        _Blocks(left, n, 1, known).write(entries, place, n)


def top_k(
    x: torch.Tensor,
    held: torch.Tensor | None,
    left: torch.Tensor,
    k: int,
    entries: Entries,
    bad: torch.Tensor,
    place: int = 0,
) -> None:
    """Take the k elements of x + held that come first, on the current stream.

    All tensors are contiguous, and on the device of x.

    Args:
        x, held, left, bad, place: as in `top_k_chunks`.
        k: how many; at most n.
        entries: as in `top_k_chunks`.

    Raises:
        ConfigurationError: a tensor or k is not as said, or a place is not below 2^32.
    """
    n = x.numel()
    _check_sum(x, held, left, bad)
    check_space(place, n)
    if not 0 <= k <= n:
        raise ConfigurationError(f"{k} of {n} elements cannot be taken")
    entries.check("entries", k, x.device)
    if n == 0:
        return
    if n <= LONGEST:
        size = triton.next_power_of_2(max(n, 64))
        _in_registers(x, held, left, (size, k, k), k, entries, bad, place)
    else:
        _by_blocks(x, held, left, (n, k, k), entries, bad, place)


def top_k_chunks(
    x: torch.Tensor,
    held: torch.Tensor | None,
    left: torch.Tensor,
    k: int,
    chunk: int,
    entries: Entries,
    bad: torch.Tensor,
    place: int = 0,
) -> None:
    """Take the k elements of x + held that come first of each chunk, on the current stream.

    Of a last chunk of m elements ``selected_of(m, k, chunk)`` are taken. All tensors are
    contiguous, and on the device of x.

    Args:
        x: float32, float16 or bfloat16, ``(n,)``.
        held: float32, ``(n,)``; None: nothing is held.
        left: float32, ``(n,)``: what is left of each. It may be x itself, and overlaps
            nothing else.
        k: at least one, at most the chunk.
        chunk: elements, a multiple of 64 up to 65,536.
        entries: get places and values, behind those that they have; with room for both.
        bad: int32, ``(1,)``: bit 0 is set if an element of x + held is not finite; nothing is
            cleared. All other outputs then hold anything, and `entries` as many as otherwise.
        place: of the first element; places are counted from it.

    Raises:
        ConfigurationError: a tensor, k or the chunk is not as said, or a place is not below 2^32.
    """
    n = x.numel()
    if chunk % 64 or not 0 < chunk <= 65_536:
        raise ConfigurationError(f"a chunk is a multiple of 64 elements up to 65536, not {chunk}")
    if not 1 <= k <= chunk:
        raise ConfigurationError(f"{k} of each {chunk} elements cannot be taken")
    tail = selected_of(n % chunk, k, chunk)
    most = n // chunk * k + tail
    _check_sum(x, held, left, bad)
    check_space(place, n)
    entries.check("entries", most, x.device)
    if n == 0:
        return
    if chunk <= LONGEST:
        _in_registers(x, held, left, (chunk, k, tail), most, entries, bad, place)
    else:
        _by_blocks(x, held, left, (chunk, k, most), entries, bad, place)


def _in_registers(x, held, left, of_each, most, entries, bad, place) -> None:
    size, k, tail = of_each
    n, wide = x.numel(), triton.next_power_of_2(size)
    warps = max(1, wide // _OF_A_WARP)
    bits = torch.empty(triton.cdiv(n, size) * wide // 32, dtype=torch.int32, device=x.device)
    pointers, of = _sources(x, held, left)
    with torch.accelerator.device_index(x.device.index):
        chunks_in_registers[triton.cdiv(n, size),](
            *(*pointers, entries.places, words(entries.values), entries.count, bits, bad),
            *(n, k, tail, place),
            **{"SIZE": size, "WIDE": wide, "LANES": 32 * warps},
            **{"num_warps": warps, **_registers(96)},
            **{**of, **_formats(entries), **OPTIONS},
        )
    entries.count.add_(most)


def _by_blocks(x, held, left, of_each, entries, bad, place) -> None:
    length, k, most = of_each
    n = x.numel()
    segments = triton.cdiv(n, length)
    known = torch.empty(segments * KNOWN.value, dtype=torch.int64, device=x.device)
    pointers, of = _sources(x, held, left)
    with torch.accelerator.device_index(x.device.index):
        _begin[segments,](
            *(*pointers[:2], known, entries.count, n, k, length),
            **{"FEW": SAMPLE, **of, **OPTIONS},
        )
        blocks = _Blocks(left, length, segments, known)
        blocks.add(pointers, of, bad)
        blocks.find()
        blocks.write(entries, place, most)
