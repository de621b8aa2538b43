"""Exact packing on a GPU: the payloads that docs/wire.md describes, byte for byte the CPU's.

Packing has three kernels, each a launch:

1. `plan_blocks`: each program reads some blocks, chooses how each is written, and keeps its header;
   how many rows and bytes of tail they take together goes to `sums`.
2. `find_offsets`: one program adds these up, which gives each group's offset and the payload's
   length.
3. `write_blocks`: each program reads its blocks again and writes them to their places. Where the
   payload would be no shorter than the elements, it copies these.

Unpacking has three likewise: `measure_blocks` adds up what the headers say, `find_offsets` compares
that with the payload's length, and `read_blocks` reads each block from its place. What no encoder
makes is refused, by a flag. Until `find_offsets` has found that all rows and tails lie in the
payload none of them is read.

A program is a warp, so that its threads wait for each other alone. It has `BLOCKS` blocks at a
time. How deep the bits of a block's numbers lie is counted by atomic additions to shared memory,
of integers, whose order does not show.

A field of fixed point is no whole number of bits of a word. So a word's thread makes the fields
that the word has a part of, and an element's thread loads the two words that have its field.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pycollective.errors import ConfigurationError
from pycollective.triton.floats import word_at
from pycollective.triton.formats import check, words

BLOCK = tl.constexpr(128)  # elements
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
FIND_OFFSETS = {"num_warps": 16}  # and the rest of these
BLOCKS = 4  # of a program at a time
MOST_STEPS = tl.constexpr(16)  # of a program
PROGRAMS = 8192  # before a program has more than one step
SUMS = 4096  # that are added up at once
EXPONENT = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8}

# Modes of blocks; of an exponent window, and of fixed point, the least.
ZERO, FIXED, WINDOW, RAW = (tl.constexpr(mode) for mode in (0, 2, 32, 255))
MOST_WIDTH = tl.constexpr(27)
MORE = tl.constexpr(4)  # bits that follow of a marked number
# More bytes than a payload has, and few enough to be added up, one of each group.
REFUSED = tl.constexpr(1 << 40)
# What `find_offsets` says of the whole payload.
PACKED, WHOLE, NONE = (tl.constexpr(state) for state in (0, 1, 2))

# Bit 8 b of a word, for each b; factors that bring seven bits there, and eight from there.
ONES = tl.constexpr(0x0101010101010101)
_APART = tl.constexpr(sum(1 << 7 * bit for bit in range(7)))
_TOGETHER = tl.constexpr(0x0102040810204080)


# --- Headers, as one integer: base, mode, escaped, marked, from the lowest byte up.


@triton.jit
def _header(base, mode, escaped, marked):
    return base | (mode << 8) | (escaped << 16) | (marked << 24)


@triton.jit
def _parts(header):
    return header & 255, (header >> 8) & 255, (header >> 16) & 255, (header >> 24) & 255


@triton.jit
def _extent(header, SIZE: tl.constexpr, EXPONENT: tl.constexpr):
    """How many rows of 16 bytes a block has, and how many bytes of tail: `REFUSED` where no
    encoder makes such a header."""
    base, mode, escaped, marked = _parts(header)
    window = (mode >= WINDOW) & (mode < WINDOW + EXPONENT)
    fixed = (mode >= FIXED) & (mode <= MOST_WIDTH) & (SIZE == 4)
    plain = ((mode == ZERO) | (mode == RAW)) & (base == 0) & (escaped == 0) & (marked == 0)
    good = fixed | (window & (marked == 0) & (base < (1 << EXPONENT))) | plain
    rows = tl.where(mode == RAW, 8 * SIZE, 0)
    rows = tl.where(window, 8 * SIZE - EXPONENT + mode - WINDOW, rows)
    rows = tl.where(fixed, mode + (marked > 0).to(tl.int32), rows)
    tail = tl.where(window, escaped, 0)
    tail = tl.where(fixed, (marked + 1) // 2 + 4 * escaped, tail)
    return tl.where(good, rows, 0).to(tl.int64), tl.where(good, tail.to(tl.int64), REFUSED)


# --- Counters.


@triton.jit
def _below(value):
    """Eight counters of a byte in a word, so that all are added at once: 1 where a counter's number
    is below the value, which is 7 at most."""
    one = tl.full(value.shape, 1, tl.int64)
    return ((one << (8 * value).to(tl.int64)) - 1) & ONES


@triton.jit
def _counts(value, BLOCKS: tl.constexpr):
    """How many elements of each block have each value from 0 to 31."""
    own = value + 32 * tl.arange(0, BLOCKS)[:, None]
    found = tl.histogram(tl.reshape(own, (BLOCKS * BLOCK,)), 32 * BLOCKS)
    return tl.reshape(found, (BLOCKS, 32))


# --- Elements.


@triton.jit
def _unsigned(x, BITS: tl.constexpr):
    """The bits of words, in 32 bits without a sign."""
    return x.to(tl.uint32, bitcast=True) if BITS == 32 else x.to(tl.uint32) & 0xFFFF


@triton.jit
def _turned(bits, BITS: tl.constexpr):
    """Left by one: the exponent on top, and the sign at the mantissa's end."""
    turned = (bits << 1) | (bits >> (BITS - 1))
    return turned if BITS == 32 else turned & 0xFFFF


@triton.jit
def _exponent(bits):
    """Of fp32, as it is stored."""
    return ((bits >> 23) & 255).to(tl.int32)


@triton.jit
def _deepness(bits):
    """How far an element's lowest 1 lies below its highest."""
    mantissa = (bits.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x800000
    lowest = (mantissa & -mantissa).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return 23 + 127 - lowest


@triton.jit
def _fixed(bits, base, width, two_parts):
    """(field, four more bits, whether marked, whether escaped) of an element of a block whose
    header has these; `two_parts`: some are marked."""
    exponent = _exponent(bits)
    usable = (exponent > 0) & (exponent < 255) & (exponent <= base)
    by = base + 33 - MORE - width - exponent
    left = (bits << 8) | 0x80000000
    magnitude = left >> (by & 31).to(tl.uint32)
    more = (magnitude & 15).to(tl.int32)
    exact = (by < 32) & ((magnitude << (by & 31).to(tl.uint32)) == left)
    fits = usable & exact & (two_parts | (more == 0))
    escaped = (bits != 0) & ~fits
    field = ((magnitude >> MORE) << 1) | (bits >> 31)
    field = tl.where(fits, field, escaped.to(tl.uint32))
    return field, more, fits & (more != 0), escaped


# --- Which mode.


@triton.jit
def _window_of(exponents, nonzero, EXPONENT: tl.constexpr):
    """(base, planes, escaped, whether all is zero) of each block; as many planes as an exponent has
    bits where no window is shorter than the elements."""
    top = tl.max(exponents, 1)
    beside = (top[:, None] - exponents + 1).to(tl.float32).to(tl.int32, bitcast=True)
    # Of `planes` planes those are escaped whose logarithm is as great, or greater.
    logarithm = tl.minimum((beside >> 23) - 127, EXPONENT - 1)
    counts = tl.sum(_below(logarithm) | (nonzero.to(tl.int64) << 56), 1)
    best = tl.full(top.shape, EXPONENT, tl.int32)
    fewest = tl.full(top.shape, 16 * EXPONENT, tl.int32)
    outside = tl.full(top.shape, 0, tl.int32)
    alone = (counts & 255) == 0
    best, fewest = tl.where(alone, 0, best), tl.where(alone, 0, fewest)
    for planes in tl.static_range(1, EXPONENT):
        escaped = ((counts >> (8 * (planes - 1))) & 255).to(tl.int32)
        better = 16 * planes + escaped < fewest
        best = tl.where(better, planes, best)
        outside = tl.where(better, escaped, outside)
        fewest = tl.where(better, 16 * planes + escaped, fewest)
    return top, best, outside, ((counts >> 56) & 255) == 0


@triton.jit
def _fixed_of(bits):
    """(base, width, escaped, marked) of each block."""
    exponent = _exponent(bits)
    usable = (exponent > 0) & (exponent < 255)
    top = tl.max(tl.where(usable, exponent, 0), 1)
    drop = top[:, None] - exponent
    depth = tl.where(usable, drop + _deepness(bits), tl.where(bits == 0, 0, 255))
    # How many of each, of all blocks in one: 31 is what is more, or never fits.
    BLOCKS: tl.constexpr = bits.shape[0]
    number = tl.arange(0, 32)[None, :]
    depths = _counts(tl.minimum(depth, 31), BLOCKS)
    drops = _counts(tl.minimum(tl.where(usable, drop, 31), 31), BLOCKS)
    # The bits, then which way, then the depth in one number.
    beyond = BLOCK - tl.cumsum(depths, 1)
    escaped = tl.gather(beyond, tl.minimum(number + MORE, 31).broadcast_to(BLOCKS, 32), 1)
    one = 128 * number + 32 * beyond
    two = 128 * (number + 1) + 32 * escaped + MORE * (beyond - escaped)
    key = tl.minimum((one << 6) | number, (two << 6) | 32 | number)
    best = tl.min(tl.where(number <= MOST_WIDTH - 2, key, 1 << 30), 1)
    depth = best & 31
    # What is won, then the drop: of equal ones the lower.
    won = 128 * number - 32 * (tl.cumsum(drops, 1) - drops)
    allowed = (number <= depth[:, None]) & (number < top[:, None])
    won = tl.where(number == 0, 0, tl.where(allowed, won, -1))
    drop = 31 - (tl.max((won << 5) | (31 - number), 1) & 31)
    base, width = top - drop, depth - drop + 2
    marks = _fixed(bits, base[:, None], width[:, None], ((best & 32) != 0)[:, None])
    counts = tl.sum(marks[2].to(tl.int32) | (marks[3].to(tl.int32) << 16), 1)
    return base, width, counts >> 16, counts & 0xFFFF


@triton.jit(do_not_specialize=["n", "groups", "steps"])
def plan_blocks(
    x,
    headers,
    sums,
    n,
    groups,
    steps,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Choose headers for blocks of the `n` words of `x`, and what each program's take together."""
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    SIZE: tl.constexpr = BITS // 8
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    all_rows = tl.full((), 0, tl.int64)
    all_tails = tl.full((), 0, tl.int64)
    for step in range(0, steps):
        first = (program * steps + step) * BLOCKS
        there = block < n // BLOCK - first
        bits = _unsigned(tl.load(x + first * BLOCK + at, mask=there[:, None], other=0), BITS)
        header = _chosen(bits, BITS, EXPONENT)
        rows, tail = _extent(header, SIZE, EXPONENT)
        tl.store(headers + first + block, header, mask=there)
        all_rows += tl.sum(rows, 0)
        all_tails += tl.sum(tail, 0)
    tl.store(sums + program, all_rows)
    tl.store(sums + groups + program, all_tails)


@triton.jit
def _chosen(bits, BITS: tl.constexpr, EXPONENT: tl.constexpr):
    """The header of each block."""
    exponents = (_turned(bits, BITS) >> (BITS - EXPONENT)).to(tl.int32)
    base, planes, escaped, zero = _window_of(exponents, bits != 0, EXPONENT)
    header = _header(base, WINDOW + planes, escaped, 0)
    header = tl.where(planes == EXPONENT, RAW << 8, header)
    if BITS == 32:
        taken = tl.where(planes == EXPONENT, 512, 384 + 16 * planes + escaped)
        base, width, escaped, marked = _fixed_of(bits)
        fixed = 16 * (width + (marked > 0).to(tl.int32)) + (marked + 1) // 2 + 4 * escaped
        better = (fixed <= taken) & (fixed < 512)
        header = tl.where(better, _header(base, width, escaped, marked), header)
    return tl.where(zero, 0, header)


@triton.jit(do_not_specialize=["n", "groups", "steps"])
def measure_blocks(
    payload,
    length,
    sums,
    n,
    groups,
    steps,
    SIZE: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What the headers of each group of blocks say that they take, of a payload that has them."""
    given = tl.load(length)
    if (given < n.to(tl.int64) * SIZE) & (given >= _least(n, SIZE)):
        program = tl.program_id(0).to(tl.int64)
        block = tl.arange(0, MOST_STEPS * BLOCKS)
        first = program * steps * BLOCKS
        there = (block < steps * BLOCKS) & (block < n // BLOCK - first)
        header = _header_at(payload, first + block, there, SIZE)
        rows, tail = _extent(header, SIZE, EXPONENT)
        tl.store(sums + program, tl.sum(rows, 0))
        tl.store(sums + groups + program, tl.minimum(tl.sum(tail, 0), REFUSED))


@triton.jit
def _least(n, SIZE: tl.constexpr):
    """The bytes of all headers and of the elements after the last block."""
    HEADER: tl.constexpr = 4 if SIZE == 4 else 3
    return (n // BLOCK).to(tl.int64) * HEADER + n % BLOCK * SIZE


@triton.jit
def _header_at(payload, block, there, SIZE: tl.constexpr):
    if SIZE == 4:
        return tl.load(payload.to(tl.pointer_type(tl.int32)) + block, mask=there, other=0)
    else:
        return word_at(payload + block * 3, there, 3)


@triton.jit(do_not_specialize=["n", "groups"])
def find_offsets(
    sums,
    offsets,
    length,
    refused,
    n,
    groups,
    SIZE: tl.constexpr,
    PACK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Add up the groups' sums, of rows and then of tails: for each group, those of all before it.

    Behind these come the number of all rows, and what the payload is. Gives the payload's length,
    or, unless `PACK`, compares it.
    """
    least, raw = _least(n, SIZE), n.to(tl.int64) * SIZE
    given = raw
    known = groups
    if not PACK:
        given = tl.load(length)
        known = tl.where((given < raw) & (given >= least), groups, 0)
    rows = tl.full((), 0, tl.int64)
    tails = tl.full((), 0, tl.int64)
    for first in range(0, known, SUMS):
        at = first + tl.arange(0, SUMS)
        there = at < known
        row = tl.load(sums + at, mask=there, other=0)
        tail = tl.load(sums + groups + at, mask=there, other=0)
        tl.store(offsets + at, tl.cumsum(row, 0) - row + rows, mask=there)
        tl.store(offsets + groups + at, tl.cumsum(tail, 0) - tail + tails, mask=there)
        rows += tl.sum(row, 0)
        tails += tl.sum(tail, 0)
    taken = least + 16 * rows + tails
    if PACK:
        tl.store(length, tl.minimum(taken, raw))
        state = tl.where(taken < raw, PACKED, WHOLE)
    else:
        state = tl.where(
            given == raw, WHOLE, tl.where((given < raw) & (given == taken), PACKED, NONE)
        )
        tl.atomic_or(refused, 1, mask=state == NONE, sem="relaxed")
    tl.store(offsets + 2 * groups, rows)
    tl.store(offsets + 2 * groups + 1, state.to(tl.int64))


@triton.jit
def _copied(of, to, left, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    if left >= COUNT:
        tl.store(to + at, tl.load(of + at))
    else:
        tl.store(to + at, tl.load(of + at, mask=at < left), mask=at < left)


@triton.jit
def _last_two(a, b):
    """Of a string of halves of bytes: (how many escaped, how many, the last two)."""
    shift = tl.minimum((b >> 8) & 255, 2) * 4
    return (a & ~255) + (b & ~255) + ((((a & 255) << shift) | b) & 255)


@triton.jit(do_not_specialize=["n", "groups", "steps"])
def write_blocks(
    x,
    payload,
    headers,
    offsets,
    length,
    n,
    groups,
    steps,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write the payload; `ALIGNED`: rows begin at multiples of 16 bytes."""
    WORD: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = WORD.primitive_bitwidth // 8
    program = tl.program_id(0).to(tl.int64)
    blocks = n // BLOCK
    first = program * steps * BLOCKS
    if tl.load(offsets + 2 * groups + 1) == WHOLE:
        to = payload.to(tl.pointer_type(WORD))
        for step in range(0, steps):
            at = (first + step * BLOCKS) * BLOCK
            _copied(x + at, to + at, n - at, BLOCKS * BLOCK)
    else:
        rows = _first_row(n, SIZE) + 16 * tl.load(offsets + program)
        end = payload + (tl.load(length) - tl.load(offsets + groups + program))
        block = tl.arange(0, BLOCKS)
        for step in range(0, steps):
            at = first + step * BLOCKS
            there = block < blocks - at
            header = tl.load(headers + at + block, mask=there, other=0)
            _put_headers(payload, at + block, header, there, SIZE)
            own, tail = _extent(header, SIZE, EXPONENT)
            begin = rows + 16 * (tl.cumsum(own, 0) - own)
            if ALIGNED:  # is seen where a value is made, not where a function gets it
                begin = tl.multiple_of(begin, [16])
            _put_blocks(
                *(x + at * BLOCK, payload, begin, end - tl.cumsum(tail, 0), header, there),
                *(EXPONENT, BLOCKS),
            )
            rows += 16 * tl.sum(own, 0)
            end -= tl.sum(tail, 0)
        if first + steps * BLOCKS >= tl.cdiv(n.to(tl.int64), BLOCK):
            to = payload + _first_row(n, SIZE) + 16 * tl.load(offsets + 2 * groups)
            _put_rest(x + blocks.to(tl.int64) * BLOCK, to, n % BLOCK, SIZE)


@triton.jit
def _put_word(to, word, mask, BYTES: tl.constexpr):
    """Store the lowest bytes of words, which may lie anywhere."""
    for byte in tl.static_range(BYTES):
        tl.store(to + byte, (word >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def _first_row(n, SIZE: tl.constexpr):
    """Where the headers end."""
    return (n // BLOCK).to(tl.int64) * (4 if SIZE == 4 else 3)


@triton.jit
def _put_headers(payload, block, header, there, SIZE: tl.constexpr):
    if SIZE == 4:
        tl.store(payload.to(tl.pointer_type(tl.int32)) + block, header, mask=there)
    else:
        _put_word(payload + block * 3, header, there, 3)


@triton.jit
def _put_blocks(
    x,
    payload,
    rows,
    tail,
    header,
    there,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store the rows of some blocks, and their tails."""
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    SIZE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS - EXPONENT
    block, i = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    tail = tail[:, None]
    base, mode, _, some = _parts(header)
    is_window = (mode >= WINDOW) & (mode != RAW)
    window = is_window[:, None]
    bits = _unsigned(tl.load(x + block * BLOCK + i, mask=there[:, None], other=0), BITS)
    turned = _turned(bits, BITS)
    exponents = (turned >> REST).to(tl.int32)
    if _any(is_window):
        for byte in tl.static_range(REST // 8):
            at = payload + (rows[:, None] + (BLOCK * byte + i))
            tl.store(at, (turned >> (8 * byte)).to(tl.uint8), mask=window)
    # Planes: the codes', above the bits of the rest, or the marks'.
    planes = tl.where(window, mode[:, None] - WINDOW, 0)
    outside = (1 << planes) - 1
    distance = base[:, None] - exponents
    planed = tl.minimum(distance, outside) << (REST % 8)
    if REST % 8 != 0:
        planed |= ((turned >> (REST // 8 * 8)) & ((1 << (REST % 8)) - 1)).to(tl.int32)
    escaped = window & (planes > 0) & (distance >= outside)
    count = tl.where(window, REST % 8 + planes, 0)
    plane = rows + REST // 8 * BLOCK
    if SIZE == 4:
        is_fixed = (mode >= FIXED) & (mode <= MOST_WIDTH)
        fixed = is_fixed[:, None]
        parts = _fixed(bits, base[:, None], mode[:, None], (some > 0)[:, None])
        marked = fixed & parts[2]
        planed = tl.where(fixed, marked.to(tl.int32), planed)
        count = tl.where(fixed, (some > 0)[:, None].to(tl.int32), count)
        plane = tl.where(is_fixed, rows + 16 * mode, plane)
        if _any(is_fixed | (mode == RAW)):
            _put_words(x, payload, rows, base, mode, some, 0, BLOCKS)
            if _any((is_fixed & (mode > 16)) | (mode == RAW)):
                _put_words(x, payload, rows, base, mode, some, 16, BLOCKS)
            whole = fixed & parts[3]
            told = (marked.to(tl.int32) << 8) | (whole.to(tl.int32) << 16)
            told = tl.associative_scan(told | tl.where(marked, parts[1], 0), 1, _last_two)
            # Of two marked ones the second stores both.
            mark = ((told >> 8) & 255) - 1
            paired = (mark & 1) == 1
            alone = (mark & 1 == 0) & (mark + 1 == some[:, None])
            both = tl.where(paired, ((told >> 4) & 15) | ((told & 15) << 4), told & 15)
            tl.store(tail + mark // 2, both.to(tl.uint8), mask=marked & (paired | alone))
            behind = tail + (some[:, None] + 1) // 2 + 4 * ((told >> 16) - 1)
            _put_word(behind, bits, whole, 4)
    else:
        if _any(mode == RAW):
            _put_word(payload + (rows[:, None] + 2 * i), bits, (mode == RAW)[:, None], 2)
    if _any(is_window | (some > 0)):
        _put_planes(payload, plane, planed, count, BLOCKS)
    if _any(is_window):
        number = tl.cumsum(escaped.to(tl.int32), 1) - 1
        tl.store(tail + number, exponents.to(tl.uint8), mask=escaped)


@triton.jit
def _any(of_blocks):
    return tl.max(of_blocks.to(tl.int32), 0) != 0


@triton.jit
def _put_rest(x, to, left, SIZE: tl.constexpr):
    """The elements after the last block, as they are."""
    i = tl.arange(0, BLOCK)
    rest = _unsigned(tl.load(x + i, mask=i < left), 8 * SIZE)
    _put_word(to + SIZE * i, rest, i < left, SIZE)


@triton.jit
def _put_words(x, payload, rows, base, mode, some, FIRST: tl.constexpr, BLOCKS: tl.constexpr):
    """Store the words of raw blocks and of those of fixed point, of 16 rows."""
    fixed = ((mode >= FIXED) & (mode <= MOST_WIDTH))[:, None]
    width = tl.where(fixed, mode[:, None], 32)
    i = 4 * FIRST + tl.arange(0, 64)[None, :]
    x += tl.arange(0, BLOCKS)[:, None] * BLOCK
    bit = i // 4 * 32  # of its lane
    field = bit // width
    needed = (fixed & (i // 4 < mode[:, None])) | (mode == RAW)[:, None]
    word = tl.zeros((BLOCKS, 64), tl.uint32)
    for _ in range(0, tl.max(31 // width + 2)):
        by = field * width - bit
        part = needed & (field < 32) & (by < 32)
        bits = _unsigned(tl.load(x + field * 4 + i % 4, mask=part, other=0), 32)
        parts = _fixed(bits, base[:, None], mode[:, None], (some > 0)[:, None])
        value = tl.where(fixed, parts[0], bits)
        up = value << tl.maximum(by, 0).to(tl.uint32)
        word |= tl.where(part, tl.where(by < 0, value >> tl.maximum(-by, 0).to(tl.uint32), up), 0)
        field += 1
    at = payload.to(tl.pointer_type(tl.int32)) + (rows // 4)[:, None] + i
    tl.store(at, word.to(tl.int32, bitcast=True), mask=needed)


@triton.jit
def _put_planes(payload, plane, planed, count, BLOCKS: tl.constexpr):
    """Store `count` bits of each element of a block, the lowest first, a plane each."""
    spread = (planed.to(tl.int64) * _APART) & ONES
    spread = tl.reshape(spread, (BLOCKS, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :]
    bytes_ = tl.sum(spread, 2)
    number = tl.arange(0, 8)[None, :, None]
    at = plane[:, None, None] + 16 * number + tl.arange(0, BLOCK // 8)[None, None, :]
    stored = bytes_[:, None, :] >> (8 * number).to(tl.int64)
    tl.store(payload + at, stored.to(tl.uint8), mask=number < count[:, :, None])


@triton.jit(do_not_specialize=["n", "groups", "steps"])
def read_blocks(
    payload,
    out,
    offsets,
    length,
    refused,
    n,
    groups,
    steps,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Read the payload; `ALIGNED`: rows begin at multiples of 16 bytes."""
    WORD: tl.constexpr = out.dtype.element_ty
    SIZE: tl.constexpr = WORD.primitive_bitwidth // 8
    program = tl.program_id(0).to(tl.int64)
    blocks = n // BLOCK
    first = program * steps * BLOCKS
    state = tl.load(offsets + 2 * groups + 1)
    if state == WHOLE:
        of = payload.to(tl.pointer_type(WORD))
        for step in range(0, steps):
            at = (first + step * BLOCKS) * BLOCK
            _copied(of + at, out + at, n - at, BLOCKS * BLOCK)
    elif state == PACKED:
        rows = _first_row(n, SIZE) + 16 * tl.load(offsets + program)
        end = payload + (tl.load(length) - tl.load(offsets + groups + program))
        block = tl.arange(0, BLOCKS)
        wrong = tl.full((), 0, tl.int32)
        for step in range(0, steps):
            at = first + step * BLOCKS
            there = block < blocks - at
            header = _header_at(payload, at + block, there, SIZE)
            own, tail = _extent(header, SIZE, EXPONENT)
            begin = rows + 16 * (tl.cumsum(own, 0) - own)
            if ALIGNED:  # is seen where a value is made, not where a function gets it
                begin = tl.multiple_of(begin, [16])
            wrong |= _read_blocks(
                *(payload, out + at * BLOCK, begin, end - tl.cumsum(tail, 0), header, there),
                *(EXPONENT, BLOCKS),
            )
            rows += 16 * tl.sum(own, 0)
            end -= tl.sum(tail, 0)
        tl.atomic_or(refused, 1, mask=wrong != 0, sem="relaxed")
        if first + steps * BLOCKS >= tl.cdiv(n.to(tl.int64), BLOCK):
            of = payload + _first_row(n, SIZE) + 16 * tl.load(offsets + 2 * groups)
            _read_rest(of, out + blocks.to(tl.int64) * BLOCK, n % BLOCK, SIZE)


@triton.jit
def _read_blocks(
    payload,
    out,
    rows,
    tail,
    header,
    there,
    EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store the elements of some blocks; 1 if one has not as many escaped, or marked, as its header
    says, or an exponent that the type has not."""
    WORD: tl.constexpr = out.dtype.element_ty
    BITS: tl.constexpr = WORD.primitive_bitwidth
    SIZE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS - EXPONENT
    block, i = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    tail = tail[:, None]
    base, mode, many, some = _parts(header)
    base, many, halves = base[:, None], many[:, None], (some[:, None] + 1) // 2
    is_window = (mode >= WINDOW) & (mode != RAW)
    window = is_window[:, None]
    planes = tl.where(window, mode[:, None] - WINDOW, 0)
    count = tl.where(window, REST % 8 + planes, 0)
    plane = rows + REST // 8 * BLOCK
    if SIZE == 4:
        is_fixed = (mode >= FIXED) & (mode <= MOST_WIDTH)
        fixed = is_fixed[:, None]
        count = tl.where(fixed, (some > 0)[:, None].to(tl.int32), count)
        plane = tl.where(is_fixed, rows + 16 * mode, plane)
    planed = _planes_at(payload, plane, count, BLOCKS)
    code = planed >> (REST % 8)
    exponents = (base - code) & ((1 << EXPONENT) - 1)
    escaped = window & (planes > 0) & (code == (1 << planes) - 1)
    bits = (planed & ((1 << (REST % 8)) - 1)) << (REST // 8 * 8)
    if _any(is_window):
        for byte in tl.static_range(REST // 8):
            at = payload + (rows[:, None] + (BLOCK * byte + i))
            bits |= tl.load(at, mask=window, other=0).to(tl.int32) << (8 * byte)
    apart = escaped.to(tl.int32)
    if SIZE == 4:
        marked = fixed & (planed == 1)
        field = tl.zeros((BLOCKS, BLOCK), tl.uint32)
        if _any(is_fixed | (mode == RAW)):
            field = _fields_at(payload, rows, mode)
        whole = fixed & (field == 1) & ~marked
        apart = (whole | escaped).to(tl.int32) | (marked.to(tl.int32) << 16)
    told = tl.cumsum(apart, 1)
    number = (told & 0xFFFF) - 1
    known = tl.sum(apart, 1) == (((header >> 16) & 255) | (((header >> 24) & 255) << 16))
    exponent = tl.load(tail + number, mask=escaped & (number < many), other=0).to(tl.int32)
    exponents = tl.where(escaped, exponent, exponents)
    beyond = tl.max(exponents >> EXPONENT, 1) != 0
    turned = ((exponents << REST) | bits).to(tl.uint32, bitcast=True)
    turned = turned if BITS == 32 else turned & 0xFFFF
    found = (turned >> 1) | (turned << (BITS - 1))
    if SIZE == 4:
        if _any(is_fixed):
            mark = (told >> 16) - 1
            more = tl.load(tail + mark // 2, mask=marked & (mark < some[:, None]), other=0)
            more = tl.where(marked, (more.to(tl.int32) >> ((mark & 1) * 4)) & 15, 0)
            magnitude = ((field >> 1) << MORE).to(tl.int32, bitcast=True) | more
            value = magnitude.to(tl.float32).to(tl.int32, bitcast=True)
            value += (base + 2 - MORE - mode[:, None] - 127) << 23
            value = tl.where(magnitude == 0, 0, value).to(tl.uint32, bitcast=True) | (field << 31)
            behind = tail + halves + 4 * number
            escape = whole & (number < many)
            word = word_at(behind, escape, 4).to(tl.uint32, bitcast=True)
            found = tl.where(fixed, tl.where(whole, word, value), found)
        found = tl.where((mode == RAW)[:, None], field, found)
    else:
        if _any(mode == RAW):
            raw = (mode == RAW)[:, None]
            at = payload + (rows[:, None] + 2 * i)
            found = tl.where(raw, word_at(at, raw, 2).to(tl.uint32, bitcast=True), found)
    found = tl.where((mode == ZERO)[:, None], 0, found)
    word = found.to(tl.int32, bitcast=True).to(WORD)
    tl.store(out + block * BLOCK + i, word, mask=there[:, None])
    return tl.max((there & (beyond | (~known & (mode != RAW)))).to(tl.int32), 0)


@triton.jit
def _read_rest(of, out, left, SIZE: tl.constexpr):
    """The elements after the last block, as they are."""
    i = tl.arange(0, BLOCK)
    word = word_at(of + SIZE * i, i < left, SIZE)
    tl.store(out + i, word.to(out.dtype.element_ty), mask=i < left)


@triton.jit
def _planes_at(payload, plane, count, BLOCKS: tl.constexpr):
    """The bits of each element of a block, of as many planes as `count` says."""
    number = tl.arange(0, 8)[None, :, None]
    at = plane[:, None, None] + 16 * number + tl.arange(0, BLOCK // 8)[None, None, :]
    loaded = tl.load(payload + at, mask=number < count[:, :, None], other=0)
    bytes_ = tl.sum(loaded.to(tl.int64) << (8 * number).to(tl.int64), 1)
    own = (bytes_[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.int64)) & ONES
    together = ((own * _TOGETHER) >> 56) & 255
    return tl.reshape(together, (BLOCKS, BLOCK)).to(tl.int32)


@triton.jit
def _fields_at(payload, rows, mode):
    """The fields of blocks of fixed point, and the words of raw ones."""
    fixed = ((mode >= FIXED) & (mode <= MOST_WIDTH))[:, None]
    raw = (mode == RAW)[:, None]
    width = tl.where(fixed, mode[:, None], 32)
    i = tl.arange(0, BLOCK)[None, :]
    bit = i // 4 * width
    by = (bit & 31).to(tl.uint32)
    at = payload.to(tl.pointer_type(tl.int32)) + (rows // 4)[:, None] + bit // 32 * 4 + i % 4
    low = tl.load(at, mask=fixed | raw, other=0).to(tl.uint32, bitcast=True)
    more = fixed & ((bit & 31) + width > 32)
    high = tl.load(at + 4, mask=more, other=0).to(tl.uint32, bitcast=True)
    field = (low >> by) | ((high << (31 - by)) << 1)
    mask = (tl.full(width.shape, 1, tl.uint32) << (width & 31).to(tl.uint32)) - 1
    return tl.where(raw, low, field & mask)


def pack(x: torch.Tensor, payload: torch.Tensor, length: torch.Tensor) -> None:
    """Pack floats into the payload of docs/wire.md, on their device's current stream.

    The host reads nothing, so that a CUDA graph may have the calls, after one call of the same
    dtype, alignment, and n below or above 2^31. Tensors are one device's, and do not overlap.

    Args:
        x: ``(n,)``, contiguous, of float16, bfloat16 or float32; leaves or nodes.
        payload: ``(n * x.element_size(),)`` at least, contiguous, uint8, from a multiple of 16
            bytes on. All of these may be written.
        length: ``(1,)``, int64: gets the payload's bytes.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    groups, steps, sums, offsets = _room("x", x, payload, length)
    n, size, exponent = x.numel(), x.element_size(), EXPONENT[x.dtype]
    headers = torch.empty(n // BLOCK.value, dtype=torch.int32, device=x.device)
    with torch.accelerator.device_index(x.device.index):
        if groups:
            plan_blocks[groups,](
                *(words(x), headers, sums, n, groups, steps, exponent, BLOCKS), **OPTIONS
            )
        find_offsets[1,](
            sums, offsets, length, offsets, n, groups, size, True, SUMS, **OPTIONS | FIND_OFFSETS
        )
        if groups:
            write_blocks[groups,](
                *(words(x), payload, headers, offsets, length, n, groups, steps),
                *(exponent, BLOCKS, aligned(n, size)),
                **OPTIONS,
            )


def unpack(
    payload: torch.Tensor, length: torch.Tensor, out: torch.Tensor, refused: torch.Tensor
) -> None:
    """Unpack a payload of docs/wire.md, on its device's current stream.

    The host reads nothing, so that a CUDA graph may have the calls, after one call of the same
    dtype, alignment, and n below or above 2^31. Tensors are one device's, and do not overlap.
    Whatever the payload and its length are, nothing else is read or written.

    Args:
        payload: at least as many bytes as `out` has, contiguous, uint8, from a multiple of 16 bytes
            on.
        length: ``(1,)``, int64: how many of these bytes are the payload.
        out: ``(n,)``, contiguous, of float16, bfloat16 or float32.
        refused: ``(1,)``, int32. Bit 0 is set where no encoder makes such a payload of so many
            elements; nothing is cleared. Then `out` holds anything.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    groups, steps, sums, offsets = _room("out", out, payload, length)
    check("refused", refused, (torch.int32,), 1, out.device)
    n, size, exponent = out.numel(), out.element_size(), EXPONENT[out.dtype]
    with torch.accelerator.device_index(out.device.index):
        if groups:
            measure_blocks[groups,](
                *(payload, length, sums, n, groups, steps, size, exponent, BLOCKS), **OPTIONS
            )
        find_offsets[1,](
            sums, offsets, length, refused, n, groups, size, False, SUMS, **OPTIONS | FIND_OFFSETS
        )
        if groups:
            read_blocks[groups,](
                *(payload, words(out), offsets, length, refused, n, groups, steps),
                *(exponent, BLOCKS, aligned(n, size)),
                **OPTIONS,
            )


def programs(n: int) -> tuple[int, int]:
    """Return how many programs `n` elements have, and how many steps each of them."""
    size = BLOCKS * BLOCK.value
    steps = min(max(triton.cdiv(n, size * PROGRAMS), 1), MOST_STEPS.value)
    return triton.cdiv(n, size * steps), steps


def aligned(n: int, size: int) -> bool:
    """Return whether, of `n` elements of `size` bytes, rows begin at multiples of 16 bytes."""
    return n // BLOCK.value * (4 if size == 4 else 3) % 16 == 0


def _room(
    name: str, elements: torch.Tensor, payload: torch.Tensor, length: torch.Tensor
) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """How many groups of blocks there are, of how many steps, and memory for their sums
    and offsets."""
    size = elements.numel() * elements.element_size()
    check(name, elements, EXPONENT, 0, elements.device)
    check("payload", payload, (torch.uint8,), size, elements.device)
    if payload.data_ptr() % 16:
        raise ConfigurationError("payload must begin at a multiple of 16 bytes")
    check("length", length, (torch.int64,), 1, elements.device)
    groups, steps = programs(elements.numel())
    both = torch.empty(4 * groups + 2, dtype=torch.int64, device=elements.device)
    return groups, steps, both[: 2 * groups], both[2 * groups :]
