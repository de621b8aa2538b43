"""1-bit and 8-bit quantization with error feedback on GPUs: the payloads of the CPU's kernels.

wire.md says what a payload is, byte by byte, and in which order a 1-bit scale is added up. One
launch takes all segments of a bucket (`pycollective.segments`), each in programs of its own.

`encode` is one pass over gradient and residual. A program is one warp, and takes four chunks:

1. Each step loads 32 elements of each chunk, 16 bytes of fp32 a thread, and keeps them in
   registers. So each of the order's 32 sums of a chunk is one number of a thread.
2. The chunk's sum, or its largest magnitude, gives its scale.
3. From the registers come the payload's bits or bytes, and the new residual.

A chunk that is too long for the registers is read twice, and what does not fill a program.

`decode` adds up the payloads of all ranks in the contract's order and rounds once. A program takes
1,024 elements. Segments that are not compressed go through both as fp32.

Payloads may lie anywhere, so their bytes are moved one by one: by neighbouring threads, which is as
fast. What does not fill a program has one of its own, with masks. All else is moved by vectors,
where it is aligned.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import order, segments
from pycollective.errors import ConfigurationError
from pycollective.triton.finite import note_finite
from pycollective.triton.floats import divided, narrowed, widened, word_at
from pycollective.triton.formats import FORMATS, check
from pycollective.triton.headers import FIELDS, Mine, field_byte, fields_of, header_bytes
from pycollective.triton.launching import Launcher
from pycollective.triton.tables import (
    ADDRESS,
    AT,
    BAD,
    COUNT,
    DTYPE,
    HELD,
    ITEM,
    LEFT,
    NONZERO,
    K,
    Table,
    Tables,
    pointer,
    row_of_program,
)

CHUNKS = tl.constexpr(4)  # of a program that encodes
SUMS = tl.constexpr(32)  # of a chunk
ENCODE = {"num_warps": 1, "enable_fp_fusion": False}
# Elements of the longest chunks that stay in registers, of four chunks in those of 32 threads.
_KEPT = {"one_bit": 1024, "int8": 512}
_REREAD = 128  # at most, of a chunk that is read twice
_VECTOR = 16  # bytes that a thread moves at once
_FEW = 256  # rows; of more, the sums that wait need the registers of more threads
_UNROLLED = 8  # rows; of more, four at a time are added up in a loop
DECODED = tl.constexpr(1024)  # elements of a program
PIECE = tl.constexpr(128)  # at most, of what is done with a mask at once
COPIED = tl.constexpr(1024)  # elements of a program that encodes what is not compressed
_LARGEST_SCALE = tl.constexpr(8454659 * 2.0**98)  # of int8: 127 times the next is not finite
_LEAST_NORMAL = tl.constexpr(2.0**-126)
_INFINITY = tl.constexpr(0x7F800000)
_MINUS_0 = tl.constexpr(-0x80000000)
_LEAST_CHUNK, _MOST_CHUNK, _MOST_ROWS = 64, 1 << 16, 1 << 15
_ELEMENTS_OF_A_BYTE = {"one_bit": 8, "int8": 1}
# Added to a number below 2^22 in magnitude, the lowest bits are the nearest integer's, the even
# one's of two.
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _elements(
    x,
    held,
    is_held,
    magnitudes,
    first,
    left,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """c of `STEPS` steps from an element of each chunk on, with zeros behind the last element; and
    `magnitudes` with those of the gradient added, which tells whether all are zero."""
    at = first + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, SUMS)[None, :]
    are_held = tl.full(at.shape, is_held, tl.int64) != 0
    cs = ()
    for step in tl.static_range(STEPS):
        here = at + step * SUMS
        mask = here < left if MASKED else None
        other = 0 if MASKED else None
        c = widened(tl.load(x + here, mask=mask, other=other), TYPE)
        magnitudes += tl.abs(c)
        # To add -0 changes no number. Of a float Triton 3.6 would make +0.
        word = tl.load(held + here, mask=mask & are_held if MASKED else are_held, other=_MINUS_0)
        c += word.to(tl.float32, bitcast=True)
        cs = cs + (c,)
    return cs, magnitudes


@triton.jit
def _accumulated(columns, cs, CODEC: tl.constexpr):
    """The sums of magnitudes, or the largest words, of each chunk's 32 columns, with more steps."""
    for step in tl.static_range(len(cs)):
        if CODEC == "one_bit":
            columns += tl.abs(cs[step])
        else:
            # Without its sign a word is in the order of the magnitudes, with NaNs above all. It is
            # shifted out: what is masked out compiles to PTX's abs, after which a NaN may have one.
            columns = tl.maximum(columns, cs[step].to(tl.uint32, bitcast=True) << 1)
    return columns


@triton.jit
def _folded(columns, CODEC: tl.constexpr):
    """Of each chunk: column j + 16 goes to j, then j + 8, and so on with 4, 2 and 1."""
    for half in tl.static_range(4, -1, -1):
        pairs = tl.reshape(columns, (CHUNKS, 2, 1 << half))
        columns = tl.sum(pairs, axis=1) if CODEC == "one_bit" else tl.max(pairs, axis=1)
    return tl.reshape(columns, (CHUNKS,))


@triton.jit
def _store_scale(record, scale, mask):
    """To four bytes, which may lie anywhere."""
    byte = tl.arange(0, 4)[None, :]
    bits = scale.to(tl.int32, bitcast=True)[:, None] >> (8 * byte)
    tl.store(record[:, None] + byte, bits.to(tl.uint8), mask=mask)


@triton.jit
def _store_one_bit(cs, scale, left, data, first, count, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    """The bits, and what is left, of steps from element `first` of each chunk on."""
    STEPS: tl.constexpr = len(cs)
    WORDS: tl.constexpr = triton.next_power_of_2(STEPS)
    chunk = tl.arange(0, CHUNKS)[:, None] * CHUNK
    column = tl.arange(0, SUMS)[None, :]
    number = tl.arange(0, WORDS)[None, :]
    bits = tl.zeros((CHUNKS, WORDS), tl.int32)
    for step in tl.static_range(STEPS):
        c = cs[step]
        below = c < 0
        word = tl.sum(below.to(tl.int32) << column, axis=1)
        bits = tl.where(number == step, word[:, None], bits)
        at = chunk + first + step * SUMS + column
        error = c - tl.where(below, -scale[:, None], scale[:, None])
        tl.store(left + at, error, mask=at < count if MASKED else None)
    shifts = 8 * tl.arange(0, 4)[None, None, :]
    data_bytes = tl.reshape((bits[:, :, None] >> shifts).to(tl.uint8), (CHUNKS, 4 * WORDS))
    byte = tl.arange(0, 4 * WORDS)[None, :]
    mask = byte < 4 * STEPS if WORDS > STEPS else None
    if MASKED:
        mask = (byte < 4 * STEPS) & (chunk + first + 8 * byte < count)
    tl.store(data[:, None] + first // 8 + byte, data_bytes, mask=mask)


@triton.jit
def _store_int8(
    cs, scale, times, left, data, first, count, CHUNK: tl.constexpr, MASKED: tl.constexpr
):
    """The bytes, and what is left, of steps from element `first` of each chunk on."""
    chunk = tl.arange(0, CHUNKS)[:, None] * CHUNK
    column = tl.arange(0, SUMS)[None, :]
    for step in tl.static_range(len(cs)):
        c = cs[step]
        within = first + step * SUMS + column
        mask = chunk + within < count if MASKED else None
        shifted = c * times[:, None] + _TO_INTEGER
        error = c - (shifted - _TO_INTEGER) * scale[:, None]
        tl.store(left + chunk + within, error, mask=mask)
        # Of Triton 3.6's code ptxas (12.8 to 13.0) makes a conversion, where the lowest byte of a
        # sum's register is stored. So the word, which is positive, meets an operation of integers.
        word = tl.maximum(shifted.to(tl.int32, bitcast=True), 0)
        tl.store(data[:, None] + within, word.to(tl.uint8), mask=mask)


@triton.jit
def _encoded(
    x,
    held,
    is_held,
    left,
    payload,
    found,
    count,
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    TYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The chunks from these pointers on, of which `count` elements are left. Returns whether any
    element of the gradient is not zero."""
    STEPS: tl.constexpr = KEPT // SUMS
    ONE_BIT: tl.constexpr = CODEC == "one_bit"
    RECORD: tl.constexpr = 4 + (CHUNK // 8 if ONE_BIT else CHUNK)
    columns = tl.zeros((CHUNKS, SUMS), tl.float32 if ONE_BIT else tl.uint32)
    # Of a sum no terms wait for others, as those of a bitwise or do, in registers.
    magnitudes = tl.zeros((CHUNKS, SUMS), tl.float32)
    if KEPT == CHUNK:
        cs, magnitudes = _elements(
            x, held, is_held, magnitudes, 0, count, STEPS, CHUNK, TYPE, MASKED
        )
        columns = _accumulated(columns, cs, CODEC)
    else:
        for first in range(0, CHUNK, KEPT):
            cs, magnitudes = _elements(
                x, held, is_held, magnitudes, first, count, STEPS, CHUNK, TYPE, MASKED
            )
            columns = _accumulated(columns, cs, CODEC)
    folded = _folded(columns, CODEC)
    chunk = tl.arange(0, CHUNKS)
    size = tl.full((CHUNKS,), CHUNK, tl.int32)
    if MASKED:
        size = tl.minimum(tl.maximum(count - chunk * CHUNK, 1), CHUNK).to(tl.int32)
    if ONE_BIT:
        scale = tl.div_rn(folded, size.to(tl.float32))
        word = folded.to(tl.int32, bitcast=True)
    else:
        word = (folded >> 1).to(tl.int32)
        most = word.to(tl.float32, bitcast=True)
        largest_byte = tl.full((CHUNKS,), 127, tl.float32)
        scale = tl.div_rn(most, largest_byte)
        scale = tl.where(scale > _LARGEST_SCALE, _LARGEST_SCALE, scale)
        is_normal = scale >= _LEAST_NORMAL
        scale = tl.where(is_normal, scale, 0.0)
        times = tl.where(is_normal, tl.div_rn(largest_byte, most), 0.0)
    if tl.max(word, axis=0) >= _INFINITY:
        tl.atomic_or(found + BAD, 1, sem="relaxed")
    records = payload + chunk * RECORD
    _store_scale(records, scale, (chunk * CHUNK < count)[:, None] if MASKED else None)
    data = records + 4
    if KEPT == CHUNK:
        if ONE_BIT:
            _store_one_bit(cs, scale, left, data, 0, count, CHUNK, MASKED)
        else:
            _store_int8(cs, scale, times, left, data, 0, count, CHUNK, MASKED)
    else:
        for first in range(0, CHUNK, KEPT):
            cs, _ = _elements(
                x, held, is_held, magnitudes, first, count, STEPS, CHUNK, TYPE, MASKED
            )
            if ONE_BIT:
                _store_one_bit(cs, scale, left, data, first, count, CHUNK, MASKED)
            else:
                _store_int8(cs, scale, times, left, data, first, count, CHUNK, MASKED)
    return _any(magnitudes)


@triton.jit
def _any(magnitudes):
    """Whether any is not zero; a NaN is not."""
    return tl.max((magnitudes != 0).to(tl.int32)) != 0


@triton.jit
def _copied(x, out, count, TYPE: tl.constexpr):
    """At most `COPIED` elements to fp32 numbers that lie anywhere. Returns as `_encoded`."""
    if (count >= COPIED) & (out.to(tl.int64) % 4 == 0):
        at = tl.arange(0, COPIED)
        wide = widened(tl.load(x + at), TYPE)
        tl.store(out.to(tl.pointer_type(tl.float32)) + at, wide)
        is_any = _any(wide)
    else:
        byte = tl.arange(0, 4)[None, :]
        magnitudes = tl.zeros((PIECE,), tl.float32)
        for first in range(0, tl.minimum(count, COPIED).to(tl.int32), PIECE):
            here = first + tl.arange(0, PIECE)
            mask = here < count
            number = widened(tl.load(x + here, mask=mask, other=0), TYPE)
            magnitudes += tl.abs(number)
            word = number.to(tl.int32, bitcast=True)
            shifted = (word[:, None] >> 8 * byte).to(tl.uint8)
            tl.store(out + 4 * here[:, None] + byte, shifted, mask=mask[:, None])
        is_any = _any(magnitudes)
    return is_any


@triton.jit(
    do_not_specialize=["zero_at", "programs", "stride", "low", "high", "scale", "items"],
    do_not_specialize_on_alignment=["messages", "found"],
)
def encode(
    rows,
    row_of,
    messages,
    found,
    zero_at,
    programs,
    stride,
    low,
    high,
    scale,
    items,
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    REREAD: tl.constexpr,
    TYPE: tl.constexpr,
    NUMBER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Quantize segments of one dtype; see `quantize`.

    `KEPT` elements of a chunk are in registers at once, `REREAD` in a segment's last program.
    `TYPE` is the gradient's dtype, `NUMBER` its number in tables. Each program behind the table's
    `programs` writes the header of one message, and these are `stride` bytes apart.
    """
    SIZE: tl.constexpr = CHUNKS * CHUNK
    RECORDS: tl.constexpr = CHUNKS * (4 + (CHUNK // 8 if CODEC == "one_bit" else CHUNK))
    WORD: tl.constexpr = tl.int32 if TYPE == "float32" else tl.int16
    if tl.program_id(0) < programs:
        row, program = row_of_program(rows, row_of)
        item = tl.load(row + ITEM)
        is_skipped = zero_at != 0
        if is_skipped:
            is_skipped = tl.load(found + zero_at + item) != 0
        if (tl.load(row + DTYPE) == NUMBER) & (not is_skipped):
            count = tl.load(row + COUNT)
            x = pointer(row, ADDRESS, WORD, ALIGNED)
            message = messages + tl.load(row + AT)
            if tl.load(row + K) == 0:
                first = program * COPIED
                is_any = _copied(x + first, message + 4 * first, count - first, TYPE)
            else:
                first = program * SIZE
                x += first
                held = pointer(row, HELD, tl.int32, ALIGNED) + first
                left = pointer(row, LEFT, tl.float32, ALIGNED) + first
                is_held = tl.load(row + HELD)  # 0: nothing
                message += program * RECORDS
                if program < count // SIZE:
                    is_any = _encoded(
                        *(x, held, is_held, left, message, found, SIZE),
                        *(CODEC, CHUNK, KEPT, TYPE, False),
                    )
                else:
                    is_any = _encoded(
                        *(x, held, is_held, left, message, found, (count - first).to(tl.int32)),
                        *(CODEC, CHUNK, REREAD, TYPE, True),
                    )
            if is_any & (zero_at == 0):
                tl.atomic_or(found + NONZERO + item, 1, sem="relaxed")
    else:
        message = messages + (tl.program_id(0) - programs).to(tl.int64) * stride
        for first in range(0, header_bytes(items), PIECE):
            at = first + tl.arange(0, PIECE)
            byte = field_byte(at, low, high, scale, 0, items)
            tl.store(message + at, byte, mask=at < header_bytes(items))


@triton.jit
def _leaf(payload, records, data, is_there, mask, CODEC: tl.constexpr, ALIGNED: tl.constexpr):
    """What one payload decodes to, in a row for each of `records`: (row, element)."""
    ROWS: tl.constexpr = data.shape[0]
    FOURS: tl.constexpr = data.shape[1]
    place = tl.arange(0, 4)[None, None, :]
    other = None if mask is None else 0
    if CODEC == "float32":
        at = data[:, :, None] + place
        if ALIGNED >= 4:
            numbers = tl.multiple_of(payload.to(tl.pointer_type(tl.float32)), ALIGNED)
            found = tl.load(numbers + at, mask=mask, other=other)
        else:
            found = word_at(payload + 4 * at, mask, 4).to(tl.float32, bitcast=True)
    else:
        scale = word_at(payload + records, is_there, 4)[:, :, None]
        if CODEC == "one_bit":
            byte = tl.load(payload + data, mask=mask, other=other).to(tl.int32)
            four = byte >> tl.arange(0, FOURS)[None, :] % 2 * 4
            found = (((four[:, :, None] >> place) << 31) ^ scale).to(tl.float32, bitcast=True)
        else:
            byte = tl.load(payload + data[:, :, None] + place, mask=mask, other=other).to(tl.int32)
            # Behind the exponent of 2^23 a byte of 128 + b is 2^23 + 128 + b. GPUs convert more
            # slowly.
            number = (byte ^ 0x4B000080).to(tl.float32, bitcast=True) - (2.0**23 + 128)
            found = number * scale.to(tl.float32, bitcast=True)
    return tl.reshape(found, (ROWS, 4 * FOURS))


@triton.jit
def _node(
    payload,
    stride,
    records,
    data,
    is_there,
    mask,
    CODEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    COMBINES: tl.constexpr,
):
    """The sum of some payloads, by a recipe."""
    waiting = ()
    for i in tl.static_range(len(COMBINES)):
        if COMBINES[i]:
            waiting = waiting[:-2] + (waiting[-2] + waiting[-1],)
        else:
            waiting = waiting + (_leaf(payload, records, data, is_there, mask, CODEC, ALIGNED),)
            payload += stride
    return waiting[0]


@triton.jit
def _sum(
    payload,
    stride,
    records,
    data,
    is_there,
    mask,
    SHAPE: tl.constexpr,
    CODEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
):
    """The sum of four payloads, `FOURS` times, and of those that `REST` combines."""
    SIZES: tl.constexpr = FOURS.bit_length()
    # Two nodes of a size are one of the next: of each size at most one waits.
    waiting = ()
    for _ in tl.static_range(SIZES):
        waiting = waiting + (tl.zeros(SHAPE, tl.float32),)
    for i in range(FOURS):
        node = _node(payload, stride, records, data, is_there, mask, CODEC, ALIGNED, FOUR)
        payload += 4 * stride
        after = ()
        for size in tl.static_range(SIZES):
            comes = (i & ((1 << size) - 1)) == (1 << size) - 1
            waits = ((i >> size) & 1) == 1
            after = after + (tl.where(comes & (not waits), node, waiting[size]),)
            node = tl.where(comes & waits, waiting[size] + node, node)
        waiting = after
    # The right edge.
    EDGE: tl.constexpr = len(REST) > 0
    if EDGE:
        edge = _node(payload, stride, records, data, is_there, mask, CODEC, ALIGNED, REST)
    for size in tl.static_range(SIZES):
        if (FOURS >> size) & 1:
            edge = waiting[size] + edge if EDGE or FOURS & ((1 << size) - 1) else waiting[size]
    return edge


@triton.jit
def _decoded(
    payload,
    stride,
    out,
    first,
    count,
    divisor,
    is_bad,
    is_zero,
    found,
    CODEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
    DIVIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    CHECK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The `SIZE` elements from number `first` on, or `count` of them, to `out`."""
    ROWS: tl.constexpr = SIZE // BLOCK
    RECORD: tl.constexpr = 4 + (CHUNK // 8 if CODEC == "one_bit" else CHUNK)
    # A thread loads what four elements need that it stores at once: none needs another's.
    row = tl.arange(0, ROWS)[:, None] * BLOCK
    four = tl.arange(0, BLOCK // 4)[None, :]
    if CODEC == "float32":
        payload += 4 * first
        start = row
    elif SIZE % CHUNK == 0:
        payload += first // CHUNK * RECORD
        start = row
    else:
        start = first + row
    records = start // CHUNK * RECORD
    if CODEC == "float32":
        data = row + 4 * four
    elif CODEC == "one_bit":
        data = records + 4 + start % CHUNK // 8 + four // 2
    else:
        data = records + 4 + start % CHUNK + 4 * four
    is_there = row < count if MASKED else None
    mask = None
    if MASKED:
        mask = row + 4 * four < count
        if CODEC != "one_bit":
            mask = (row + 4 * four)[:, :, None] + tl.arange(0, 4)[None, None, :] < count
    x = _sum(
        payload,
        stride,
        records,
        data,
        is_there,
        mask,
        *((ROWS, BLOCK), CODEC, ALIGNED, FOURS, FOUR, REST),
    )
    if DIVIDE:
        x = divided(x, divisor)
    else:
        x *= divisor
    at = row + tl.arange(0, BLOCK)[None, :]
    word = narrowed(x, out.dtype.element_ty, FORMAT)
    word = tl.where(is_bad, FORMAT[2], tl.where(is_zero, 0, word)).to(word.dtype)
    tl.store(out + at, word, mask=at < count if MASKED else None)
    if CHECK:
        note_finite(word, found, FORMAT)


@triton.jit
def _segment(
    row,
    program,
    messages,
    stride,
    divisor,
    is_bad,
    is_zero,
    found,
    CODEC: tl.constexpr,
    FLOATS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
    DIVIDE: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    CHECK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """What one of the segment's programs decodes."""
    LEAST: tl.constexpr = min(BLOCK, PIECE)
    WORD: tl.constexpr = tl.int32 if TYPE == "float32" else tl.int16
    payload = messages + tl.load(row + AT)
    out = pointer(row, ADDRESS, WORD, ALIGNED)
    count = tl.load(row + COUNT)
    full = count // DECODED
    if program < full:
        first = program * DECODED
        _decoded(
            *(payload, stride, out + first, first, DECODED, divisor, is_bad, is_zero, found),
            *(CODEC, FLOATS, CHUNK, BLOCK, DECODED, FOURS, FOUR, REST, DIVIDE, FORMAT, CHECK),
            False,
        )
    else:
        first = full * DECODED + (program - full) * LEAST
        _decoded(
            *(payload, stride, out + first, first, count - first, divisor, is_bad, is_zero, found),
            *(CODEC, FLOATS, CHUNK, LEAST, LEAST, FOURS, FOUR, REST, DIVIDE, FORMAT, CHECK),
            True,
        )


@triton.jit
def _all_say(messages, stride, ranks, item):
    """Whether the headers of all messages have a parameter's bit."""
    byte = messages + FIELDS + item // 8
    bits = tl.full((PIECE,), 0xFF, tl.int32)
    for first in range(0, ranks, PIECE):
        rank = first + tl.arange(0, PIECE).to(tl.int64)
        bits &= tl.load(byte + rank * stride, mask=rank < ranks, other=0xFF).to(tl.int32)
    return tl.min(bits >> (item % 8).to(tl.int32) & 1) == 1


@triton.jit(
    do_not_specialize=["stride", "ranks", "zero_at"],
    do_not_specialize_on_alignment=["messages", "found"],
)
def decode(
    rows,
    row_of,
    messages,
    stride,
    ranks,
    divisor,
    found,
    zero_at,
    CODEC: tl.constexpr,
    PACKED: tl.constexpr,
    FLOATS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
    DIVIDE: tl.constexpr,
    ZEROS: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NUMBER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add up segments of messages, `stride` bytes apart, whose sums are of one dtype; see
    `dequantize`.

    There are `FOURS` times four messages and those that `REST` combines. A program's rows have
    `BLOCK` elements, each of one chunk. `PACKED`: segments may be compressed. Those that are not
    lie at multiples of `FLOATS` bytes; 0: there is none. `ZEROS`: `zero_at` is not 0.
    """
    CHECK: tl.constexpr = ZEROS or TYPE != "float32"
    stride = stride.to(tl.int64)
    row, program = row_of_program(rows, row_of)
    if tl.load(row + DTYPE) == NUMBER:
        # Other programs may set it meanwhile. Then no result counts.
        is_bad = tl.load(found + BAD, volatile=True) != 0
        is_zero = False
        if ZEROS:
            item = tl.load(row + ITEM)
            is_zero = _all_say(messages, stride, ranks, item)
            if is_zero & (not is_bad):
                tl.atomic_or(found + zero_at + item, 1, sem="relaxed")
        if PACKED:
            is_packed = tl.load(row + K) != 0
            if is_packed:
                _segment(
                    *(row, program, messages, stride, divisor, is_bad, is_zero, found, CODEC),
                    *(FLOATS, CHUNK, BLOCK, FOURS, FOUR, REST, DIVIDE, TYPE, FORMAT, CHECK),
                    ALIGNED,
                )
        if FLOATS > 0:
            is_plain = tl.load(row + K) == 0
            if is_plain:
                _segment(
                    *(row, program, messages, stride, divisor, is_bad, is_zero, found, "float32"),
                    *(FLOATS, CHUNK, BLOCK, FOURS, FOUR, REST, DIVIDE, TYPE, FORMAT, CHECK),
                    ALIGNED,
                )


def _combines(terms: int) -> tuple[bool, ...]:
    """The order over so many terms: see `pycollective.order.recipe`."""
    made = order.recipe((0, terms), [(i, i + 1) for i in range(terms)]) if terms else []
    return tuple(each == order.COMBINE for each in made)


def encode_constants(codec: str, chunk: int, number: int, aligned: bool) -> dict[str, Any]:
    """Return the constexprs of `encode` for gradients of the dtype of this number."""
    reread = math.gcd(chunk, _REREAD)
    return {
        "CODEC": codec,
        "CHUNK": chunk,
        "KEPT": chunk if chunk <= _KEPT[codec] else reread,
        "REREAD": reread,
        "TYPE": segments.DTYPES[number],
        "NUMBER": number,
        "ALIGNED": aligned,
    }


def decode_constants(
    codec: str,
    chunk: int,
    rows: int,
    divisor: float,
    packed: bool,
    floats: int,
    zeros: bool,
    number: int,
    aligned: bool,
) -> dict[str, Any]:
    """Return the constexprs of `decode` for results of the dtype of this number."""
    fours, rest = divmod(rows, 4) if rows > _UNROLLED else (0, rows)
    return {
        "CODEC": codec,
        "PACKED": packed,
        "CHUNK": chunk,
        "BLOCK": math.gcd(chunk, DECODED.value),
        "FOURS": fours,
        "FOUR": _combines(4),
        "REST": _combines(rest),
        "DIVIDE": math.frexp(divisor)[0] != 0.5 or not 1 / divisor >= 2.0**-126,
        "FLOATS": floats,
        "ZEROS": zeros,
        "TYPE": segments.DTYPES[number],
        "FORMAT": tuple(FORMATS[getattr(torch, segments.DTYPES[number])]),
        "NUMBER": number,
        "ALIGNED": aligned,
    }


def decode_options(rows: int) -> dict[str, Any]:
    """Return the options of `decode`: the sums of very many ranks need more registers."""
    return {"num_warps": 2 if rows <= _FEW else 4, "enable_fp_fusion": False}


def quantize(
    codec: str,
    chunk: int,
    table: NDArray[np.int64],
    messages: torch.Tensor,
    found: torch.Tensor,
    zero_at: int,
    tables: Tables,
    header: tuple[Mine, int] | None = None,
) -> None:
    """Quantize gradients and what is held of them, as ``_core.quantize`` does on a CPU.

    All is done on the device's current stream. What the table's addresses point to is contiguous,
    on that device, and the caller's; nothing that is written overlaps anything else. Where a number
    is not finite, residuals and payloads hold anything.

    Args:
        codec: ``one_bit`` or ``int8``.
        chunk: elements to a scale, a multiple of 64 up to 65,536.
        table: ``(segments, COLUMNS)``, see `pycollective.segments`.
        messages: uint8, flat and contiguous, gets payloads (wire.md), and fp32 numbers where
            ``K`` is 0.
        found: int32, ``(words,)``. ``BAD`` is set if a number is not finite; with `zero_at` 0
            ``NONZERO`` of each parameter whose gradient is not all zero. Nothing is cleared.
        zero_at: not 0: segments of a parameter whose word from there on is set are skipped.
        tables: the device's.
        header: what headers say, and of how many messages of equal length `messages` consists: each
            gets a header without flags and bits.

    Raises:
        ConfigurationError: a codec, chunk or table that is none of these, a tensor that is not as
            said, or a segment that lies outside of `messages`.
    """

    def make() -> Table:
        _check(codec, chunk, table, size)
        count, is_packed = table[:, segments.COUNT], table[:, segments.K] != 0
        block = np.where(is_packed, CHUNKS.value * chunk, COPIED.value)
        return tables.of(table, -(-count // block))

    size = messages.numel()
    made = tables.once(("quantize", codec, chunk, size, table.tobytes()), make)
    _check_tensors(messages, found)
    mine, heads = header or ((0, 0.0, 0), 0)
    stride = size // max(heads, 1)
    for number in made.dtypes:
        launch = _encoder(codec, chunk, number, made.aligned)
        launch(
            *(made.programs + heads, made.rows, made.row_of, messages, found, zero_at),
            *(made.programs, stride, *fields_of(mine)),
        )
        heads = 0


@functools.cache
def _encoder(codec: str, chunk: int, number: int, aligned: bool) -> Launcher:
    return Launcher(encode, {**encode_constants(codec, chunk, number, aligned), **ENCODE})


def dequantize(
    codec: str,
    chunk: int,
    table: NDArray[np.int64],
    messages: torch.Tensor,
    divisor: float,
    found: torch.Tensor,
    zero_at: int,
    tables: Tables,
) -> None:
    """Add up payloads, divide and round once, as ``_core.dequantize`` does on a CPU.

    The order is the contract's. All is done on the device's current stream. Nothing outside of the
    payloads is read, whatever they hold. Where ``BAD`` of `found` is set, all results are NaN.

    Args:
        codec: ``one_bit`` or ``int8``.
        chunk: elements to a scale, a multiple of 64 up to 65,536.
        table: ``(segments, COLUMNS)``, see `pycollective.segments`.
        messages: ``(rows, bytes)`` of uint8, contiguous: a message of each rank, 1 to 32,768.
            Where ``K`` is 0 they have fp32 numbers.
        divisor: an fp32 number above 0; 1: do not divide.
        found: int32, ``(words,)``. ``BAD`` is set if a result is not finite, where its dtype is not
            fp32 or `zero_at` is not 0; others may become NaN then. Nothing is cleared.
        zero_at: not 0: messages begin with headers. Where those of all ranks say that a parameter
            is all zero, so is the result, and the parameter's word from there on is set.
        tables: the device's.

    Raises:
        ConfigurationError: a codec, chunk or table that is none of these, a tensor that is not as
            said, or a segment that lies outside of a message.
    """
    ranks, stride = messages.shape
    if not 1 <= ranks <= _MOST_ROWS:
        raise ConfigurationError(f"messages must be of 1 to {_MOST_ROWS} ranks, not {ranks}")

    def make() -> tuple[Table, bool, int]:
        _check(codec, chunk, table, stride)
        is_packed = table[:, segments.K] != 0
        needed = programs(table[:, segments.COUNT], math.gcd(chunk, DECODED.value))
        # A segment without elements may be a parameter's only one.
        made = tables.of(table, np.maximum(needed, 1) if zero_at else needed)
        floats = 0
        if not is_packed.all():
            places = begin + table[:, segments.AT][~is_packed]
            floats = int(np.gcd.reduce(np.append(places, (stride, _VECTOR))))
        return made, bool(is_packed.any()), floats

    begin = messages.data_ptr() % _VECTOR
    made, is_any, floats = tables.once(
        ("dequantize", codec, chunk, stride, begin, zero_at != 0, table.tobytes()), make
    )
    _check_tensors(messages, found)
    for number in made.dtypes:
        launch, divides = _decoder(
            codec, chunk, ranks, divisor, is_any, floats, zero_at != 0, number, made.aligned
        )
        factor = divisor if divides else 1 / divisor
        launch(
            *(made.programs, made.rows, made.row_of, messages, stride, ranks, factor, found),
            zero_at,
        )


@functools.cache
def _decoder(codec: str, chunk: int, rows: int, *more: Any) -> tuple[Launcher, bool]:
    """What launches with `decode_constants`, and `DIVIDE`."""
    constants = decode_constants(codec, chunk, rows, *more)
    return Launcher(decode, {**constants, **decode_options(rows)}), constants["DIVIDE"]


def programs(count: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """How many programs decode so many elements: full ones, and those of what is left."""
    full, left = np.divmod(count, DECODED.value)
    return full - (-left // min(block, PIECE.value))


def payload_bytes(codec: str, chunk: int, count: Any) -> Any:
    """Return how many bytes the payload of `count` elements has; an array for an array."""
    return -(-count // chunk) * 4 - (-count // _ELEMENTS_OF_A_BYTE[codec])


def _check(codec: str, chunk: int, table: NDArray[np.int64], size: int) -> None:
    """Refuse what kernels would misread, where segments must lie within `size` bytes."""
    if codec not in _ELEMENTS_OF_A_BYTE:
        raise ConfigurationError(f"no codec {codec!r}; there are {list(_ELEMENTS_OF_A_BYTE)}")
    if chunk % _LEAST_CHUNK or not 0 < chunk <= _MOST_CHUNK:
        raise ConfigurationError(f"a chunk is a multiple of 64 elements up to 65536, not {chunk}")
    at, count = table[:, segments.AT], table[:, segments.COUNT]
    is_packed = table[:, segments.K] != 0
    ends = at + np.where(is_packed, payload_bytes(codec, chunk, count), 4 * count)
    if ((at < 0) | (ends > size)).any():
        raise ConfigurationError(f"a segment ends behind the {size} bytes of a message")


def _check_tensors(messages: torch.Tensor, found: torch.Tensor) -> None:
    check("messages", messages, (torch.uint8,), 0, messages.device)
    check("found", found, (torch.int32,), segments.NONZERO, messages.device)
