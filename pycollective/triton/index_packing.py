"""Packed places in messages of top-k, on GPUs: the bytes of docs/wire.md, "Sparse payloads".

What a message has behind its header and its small parameters is its *tail*: the number of places
(4 bytes), the length of their stream (4 bytes), the stream, and the values. All of these lengths
are known to the device alone; buffers have room for the longest.

A block is 128 places. `write` is five launches: `_head_blocks` finds each block's width and how
long its body is, `_place_bodies` adds these up, `_write_bodies` and `_write_values` write. `read`
and `decode` are four: `_find_bodies` checks the headers and adds up, `_read_spans` checks each
block and reads how many places it spans, `_add_up` adds these up and checks the sum, `_read_blocks`
writes. So nothing is written of a tail that is refused.

In a block that is read, each bit of the unary part has a lane. Bit p, if it is the i-th 1, has the
gap ((p - i) - what the one before it has) 2^w + low bits, so its place is a sum over the lanes
before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycollective.errors import ConfigurationError
from pycollective.triton.floats import narrowed, widened
from pycollective.triton.formats import FORMATS, check, name_of, words
from pycollective.triton.top_k import FLOATS, OPTIONS, Entries, check_capacity, check_space

PER_BLOCK = tl.constexpr(128)  # places
MOST_UNARY = tl.constexpr(48)  # bytes of a block
HEAD = tl.constexpr(8)  # bytes of a tail before its stream
_ALONE = {"TILE": 2048, "num_warps": 16, **OPTIONS}  # of a program that has all blocks
VALUES = 1024  # bytes of a program


@triton.jit
def _gaps(places, at, inside):
    """How many places lie between one and that before it, which is before the first at -1."""
    here = tl.load(places + at, mask=inside, other=0)
    before = tl.load(places + at - 1, mask=inside & (at > 0), other=-1)
    return (here - before - 1).to(tl.uint32, bitcast=True)


@triton.jit
def _low_bytes(count, width):
    return (count * width + 7) // 8


@triton.jit(do_not_specialize_on_alignment=["tail"])
def _head_blocks(places, count, tail, sizes):
    """Each block's header, and how many bytes its body has."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PER_BLOCK)
    here = tl.minimum(tl.load(count) - block * PER_BLOCK, PER_BLOCK).to(tl.int32)
    if here > 0:
        gaps = _gaps(places, block * PER_BLOCK + lane, lane < here)
        gaps = tl.where(lane < here, gaps, 0)
        # Less than 2^32 all together: places are.
        span = tl.sum(gaps, axis=0).to(tl.int64)
        least = span
        width = tl.full((), 0, tl.int32)
        for wider in tl.static_range(1, 32):
            bits = tl.sum(gaps >> wider, axis=0).to(tl.int64) + here * wider
            if bits < least:
                least = bits
                width = tl.full((), wider, tl.int32)
        unary = (least - here * width + here + 7) // 8
        unary = tl.where(span == 0, 0, unary)
        header = tail + HEAD + 1 + 2 * block
        tl.store(header, width.to(tl.uint8))
        tl.store(header + 1, unary.to(tl.uint8))
        tl.store(sizes + block, unary + _low_bytes(here, width))
    else:
        tl.store(sizes + block, tl.full((), 0, tl.int64))


@triton.jit
def _put_word(to, number):
    byte = tl.arange(0, 4)
    tl.store(to + byte, ((number >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["tail"])
def _place_bodies(
    sizes, begins, count, tail, length, blocks, BYTES: tl.constexpr, TILE: tl.constexpr
):
    """Where each block's body begins in the tail, and what the tail begins with."""
    many = tl.load(count)
    begin = HEAD + 1 + 2 * ((many + PER_BLOCK - 1) // PER_BLOCK)
    for first in range(0, blocks, TILE):
        at = first + tl.arange(0, TILE)
        size = tl.load(sizes + at, mask=at < blocks, other=0)
        through = begin + tl.cumsum(size, axis=0)
        tl.store(begins + at, through - size, mask=at < blocks)
        begin += tl.sum(size, axis=0)
    _put_word(tail, many)
    _put_word(tail + 4, begin - HEAD)
    tl.store(tail + HEAD, tl.full((), 1, tl.uint8))
    tl.store(length, begin + many * BYTES)


@triton.jit
def _of_one_byte(byte, bits, earlier_byte, earlier_bits):
    """The bits of the earlier byte."""
    return earlier_byte, earlier_bits | tl.where(byte == earlier_byte, bits, 0)


@triton.jit(do_not_specialize_on_alignment=["tail"])
def _write_bodies(places, count, tail, begins):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PER_BLOCK)
    first = block * PER_BLOCK
    here = tl.minimum(tl.load(count) - first, PER_BLOCK).to(tl.int32)
    if here > 0:
        header = tail + HEAD + 1 + 2 * block
        width = tl.load(header).to(tl.int32)
        unary = tl.load(header + 1).to(tl.int32)
        body = tail + tl.load(begins + block)
        high = _gaps(places, first + lane, lane < here) >> width
        high = tl.where(lane < here, high, 0).to(tl.int32)
        bit = tl.cumsum(high, axis=0) + lane
        byte = tl.arange(0, 64)
        tl.store(body + byte, tl.zeros((64,), tl.uint8), mask=byte < unary)
        tl.debug_barrier()  # each byte with ones is written once more, by the lane of its first
        mine = tl.where(lane < here, bit >> 3, unary)
        _, ones = tl.associative_scan((mine, 1 << (bit & 7)), 0, _of_one_byte, reverse=True)
        begins_byte = (mine < unary) & (((bit - high - 1) >> 3) != mine)
        tl.store(body + mine, ones.to(tl.uint8), mask=begins_byte)
        low_bytes = _low_bytes(here, width)
        for begin in range(0, low_bytes, PER_BLOCK):
            low_byte = begin + lane
            inside = low_byte < low_bytes
            gap = low_byte * 8 // width
            begun = low_byte * 8 - gap * width  # bits of that one's, in the bytes before
            mask = (tl.full((), 1, tl.uint32) << width) - 1
            found = (_gaps(places, first + gap, inside) & mask) >> begun
            for more in range(1, 7 // width + 2):
                by = more * width - begun
                also = inside & (by < 8) & (gap + more < here)
                low = _gaps(places, first + gap + more, also) & mask
                found |= tl.where(also, low << tl.where(also, by, 0), 0)
            tl.store(body + unary + low_byte, found.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["values", "tail"])
def _write_values(values, count, tail, length, BYTES: tl.constexpr, TILE: tl.constexpr):
    """Byte by byte: where values begin is odd as often as not."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    size = tl.load(count) * BYTES
    begin = tl.load(length) - size
    byte = tl.load(values + at, mask=at < size)
    tl.store(tail + begin + at, byte, mask=at < size)


def tail_bound(count: int, size: int, values: torch.dtype) -> int:
    """Return the bytes of the longest tail of up to `count` entries below `size`."""
    blocks = triton.cdiv(count, PER_BLOCK.value)
    stream = 1 + 4 * blocks + (min(15 * count + size // 16384, 35 * count) + 7) // 8
    return HEAD.value + stream + count * values.itemsize


def write(entries: Entries, size: int, tail: torch.Tensor, length: torch.Tensor) -> None:
    """Write the tail of a message, on the current stream.

    All tensors are contiguous, on one device, and overlap no other.

    Args:
        entries: places ascend strictly, and are below `size`.
        size: at most 2^32.
        tail: uint8, with room for `tail_bound` of as many as `entries` have room for.
        length: int64, ``(1,)``: becomes the tail's bytes.

    Raises:
        ConfigurationError: a tensor or the size is not as said.
    """
    check_space(0, size)
    entries.check("entries", 0, tail.device)
    bound = tail_bound(entries.places.numel(), size, entries.values.dtype)
    check("tail", tail, (torch.uint8,), bound, tail.device)
    check("length", length, (torch.int64,), 1, tail.device)
    capacity, width = entries.places.numel(), entries.values.element_size()
    blocks = triton.cdiv(max(capacity, 1), PER_BLOCK.value)
    sizes, begins = (torch.empty(blocks, dtype=torch.int64, device=tail.device) for _ in range(2))
    with torch.accelerator.device_index(tail.device.index):
        _head_blocks[blocks,](entries.places, entries.count, tail, sizes, num_warps=1, **OPTIONS)
        _place_bodies[1,](sizes, begins, entries.count, tail, length, blocks, BYTES=width, **_ALONE)
        _write_bodies[blocks,](entries.places, entries.count, tail, begins, num_warps=1, **OPTIONS)
        if capacity:
            _write_values[triton.cdiv(capacity * width, VALUES),](
                *(entries.values.view(torch.uint8), entries.count, tail, length),
                **{"BYTES": width, "TILE": VALUES, **OPTIONS},
            )


@triton.jit
def _word_at(tail):
    byte = tl.arange(0, 4)
    return tl.sum(tl.load(tail + byte).to(tl.int64) << (8 * byte), axis=0)


@triton.jit
def _refuse(heads, count, bad, blocks, TILE: tl.constexpr):
    """There are no places, so no block has any."""
    for first in range(0, blocks, TILE):
        block = first + tl.arange(0, TILE).to(tl.int64)
        tl.store(heads + block, tl.zeros((TILE,), tl.int64), mask=block < blocks)
    tl.store(count, tl.full((), 0, tl.int64))
    tl.atomic_or(bad, 1, sem="relaxed")


@triton.jit(
    do_not_specialize=["size", "blocks", "most", "room"], do_not_specialize_on_alignment=["tail"]
)
def _find_bodies(
    tail,
    length,
    count,
    heads,
    values,
    bad,
    size,
    blocks,
    most,
    room,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each block's head: where its body begins, its places, its width, its unary bytes, in a word.

    And where values begin, and how many places there are. Where that cannot be there are none, and
    no block has any.
    """
    whole = tl.load(length)
    many = tl.full((), 0, tl.int64)
    stream = tl.full((), 0, tl.int64)
    good = (whole >= HEAD + 1) & (whole <= room)
    if good:
        many = _word_at(tail)
        stream = _word_at(tail + 4)
        good = (whole == HEAD + stream + many * BYTES) & (many <= most) & (many <= size)
    number = (many + PER_BLOCK - 1) // PER_BLOCK
    if good:
        good = stream >= 1 + 2 * number
    if good:
        good = tl.load(tail + HEAD) == 1
    if good:
        begin = HEAD + 1 + 2 * number
        wrong = tl.zeros((TILE,), tl.int32)
        for first in range(0, blocks, TILE):
            block = first + tl.arange(0, TILE).to(tl.int64)
            inside = block < number
            header = tail + HEAD + 1 + 2 * block
            width = tl.load(header, mask=inside, other=0).to(tl.int32)
            unary = tl.load(header + 1, mask=inside, other=0).to(tl.int32)
            wrong |= ((width > 31) | (unary > MOST_UNARY)).to(tl.int32)
            wrong |= ((unary == 0) & (width != 0)).to(tl.int32)
            here = tl.maximum(tl.minimum(many - block * PER_BLOCK, PER_BLOCK), 0)
            took = tl.where(inside, unary + _low_bytes(here, width), 0)
            begins = begin + tl.cumsum(took, axis=0) - took
            head = (begins << 24) | (here << 16) | (width << 8) | unary
            tl.store(heads + block, head, mask=block < blocks)
            begin += tl.sum(took, axis=0)
        good = (begin == HEAD + stream) & (tl.max(wrong, axis=0) == 0)
    if good:
        tl.store(count, many)
        tl.store(values, stream + HEAD)
    else:
        tl.store(values, tl.full((), 0, tl.int64))
        _refuse(heads, count, bad, blocks, TILE)


@triton.jit
def _lanes(tail, begin, width, unary, here):
    """A block's body: of each bit of its unary part whether it is a place, which, and where.

    Where: counted from the least that the block's first can be. And whether the body is right.
    """
    byte = tl.arange(0, 64)
    bits = tl.load(tail + begin + byte, mask=byte < unary, other=0).to(tl.int32)
    last = tl.max(tl.where((byte < unary) & (bits != 0), byte, -1), axis=0)
    ones = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    one = tl.reshape(ones, (512,))
    lane = tl.arange(0, 512)
    one = tl.where(unary == 0, (lane < here).to(tl.int32), one)  # a run
    number = tl.cumsum(one, axis=0) - one
    good = (tl.sum(one, axis=0) == here) & (last == unary - 1)
    is_place = (one != 0) & (number < here)
    # Its low bits, from up to five bytes.
    from_bit = number * width
    shift = from_bit & 7
    low = tl.zeros((512,), tl.int64)
    lows = tail + begin + unary + (from_bit >> 3)
    for more in tl.static_range(5):
        has = is_place & (shift + width > 8 * more)
        low |= tl.load(lows + more, mask=has, other=0).to(tl.int64) << (8 * more)
    low = (low >> shift) & ((tl.full((), 1, tl.int64) << width) - 1)
    used = (here * width) & 7
    if used != 0:
        end = tl.load(tail + begin + unary + _low_bytes(here, width) - 1).to(tl.int32)
        good &= (end >> used) == 0
    where = tl.cumsum(low, axis=0) + number + ((lane - number).to(tl.int64) << width)
    where = tl.where(unary == 0, lane, where)
    return is_place, number, where, good


@triton.jit
def _body(tail, heads):
    """This program's block."""
    head = tl.load(heads + tl.program_id(0))
    begin = head >> 24
    here = ((head >> 16) & 255).to(tl.int32)
    width = ((head >> 8) & 255).to(tl.int32)
    unary = (head & 255).to(tl.int32)
    is_place, number, where, good = _lanes(tail, begin, width, unary, here)
    return here, is_place, number, where, good


@triton.jit(do_not_specialize_on_alignment=["tail"])
def _read_spans(tail, heads, spans):
    """How many places each block takes up, to its last; -1: its body is wrong."""
    here, is_place, _, where, good = _body(tail, heads)
    span = tl.max(tl.where(is_place, where + 1, 0), axis=0)
    # More than 2^32 is too much, whatever it is: the sum must not overflow.
    span = tl.where((here > 0) & (good == 0), -1, tl.minimum(span, 1 << 32))
    tl.store(spans + tl.program_id(0), span)


@triton.jit(do_not_specialize=["size", "blocks"])
def _add_up(spans, firsts, heads, count, bad, size, blocks, TILE: tl.constexpr):
    """The sums of all before each. Where a block is wrong or beyond the size, no place is left."""
    total = tl.full((), 0, tl.int64)
    least = tl.full((), 0, tl.int64)
    for first in range(0, blocks, TILE):
        at = first + tl.arange(0, TILE)
        mine = tl.load(spans + at, mask=at < blocks, other=0)
        before = total + tl.cumsum(mine, axis=0) - mine
        tl.store(firsts + at, before.to(tl.int32), mask=at < blocks)
        total += tl.sum(mine, axis=0)
        least = tl.minimum(least, tl.min(mine, axis=0))
    if (least < 0) | (total > size):
        _refuse(heads, count, bad, blocks, TILE)


@triton.jit
def _value_at(at, mask, VALUE: tl.constexpr, BYTES: tl.constexpr):
    """The numbers whose bytes begin there, which need not be aligned."""
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for more in tl.static_range(1, BYTES):
        word |= tl.load(at + more, mask=mask, other=0).to(tl.int32) << (8 * more)
    return widened(word if BYTES == 4 else word.to(tl.int16), VALUE)


@triton.jit(do_not_specialize_on_alignment=["tail"])
def _read_blocks(
    tail,
    heads,
    firsts,
    begin,
    places,
    out,
    divisor,
    BYTES: tl.constexpr,
    VALUE: tl.constexpr,
    DENSE: tl.constexpr,
    DIVIDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Places and values of each block; or, `DENSE`, the values divided where they belong."""
    _, is_place, number, where, _ = _body(tail, heads)
    block = tl.program_id(0).to(tl.int64)
    where += tl.load(firsts + block).to(tl.uint32, bitcast=True).to(tl.int64)
    entry = block * PER_BLOCK + number
    x = _value_at(tail + tl.load(begin) + entry * BYTES, is_place, VALUE, BYTES)
    if DENSE:
        if DIVIDED:
            x = tl.div_rn(x, tl.full(x.shape, divisor, tl.float32))
        tl.store(out + where, narrowed(x, out.dtype.element_ty, FORMAT), mask=is_place)
    else:
        tl.store(places + entry, where.to(tl.int32), mask=is_place)
        tl.store(out + entry, x, mask=is_place)


def _read(
    tail: torch.Tensor,
    length: torch.Tensor,
    size: int,
    values: torch.dtype,
    capacity: int,
    count: torch.Tensor,
    bad: torch.Tensor,
    to: dict[str, Any],
) -> None:
    check("tail", tail, (torch.uint8,), 0, tail.device)
    check("length", length, (torch.int64,), 1, tail.device)
    check("bad", bad, (torch.int32,), 1, tail.device)
    check_space(0, size)
    if values not in FLOATS:
        raise ConfigurationError(f"no message has values of {name_of(values)}")
    blocks = triton.cdiv(max(capacity, 1), PER_BLOCK.value)
    heads, spans = (torch.empty(blocks, dtype=torch.int64, device=tail.device) for _ in range(2))
    firsts = torch.empty(blocks, dtype=torch.int32, device=tail.device)
    begin = torch.empty(1, dtype=torch.int64, device=tail.device)
    with torch.accelerator.device_index(tail.device.index):
        _find_bodies[1,](
            *(tail, length, count, heads, begin, bad, size, blocks, capacity, tail.numel()),
            **{"BYTES": values.itemsize, **_ALONE},
        )
        _read_spans[blocks,](tail, heads, spans, num_warps=1, **OPTIONS)
        _add_up[1,](spans, firsts, heads, count, bad, size, blocks, **_ALONE)
        _read_blocks[blocks,](
            *(tail, heads, firsts, begin),
            **{"VALUE": name_of(values), "BYTES": values.itemsize},
            **{"num_warps": 2, **to, **OPTIONS},
        )


def read(
    tail: torch.Tensor,
    length: torch.Tensor,
    size: int,
    values: torch.dtype,
    entries: Entries,
    bad: torch.Tensor,
) -> None:
    """Read the tail of a message, on the current stream.

    Whatever its bytes are, nothing outside of it is touched. All tensors are contiguous, on one
    device, and overlap no other.

    Args:
        tail: uint8: from its first byte on; more may lie behind.
        length: int64, ``(1,)``: the bytes of the tail.
        size: places are below it; at most 2^32.
        values: the dtype of the values in the message: float32, float16 or bfloat16.
        entries: become those of the message, their values float32.
        bad: int32, ``(1,)``: bit 0 is set where the bytes are no tail of entries below `size`, or
            of more than `entries` have room for; nothing is cleared. `entries` are none then.

    Raises:
        ConfigurationError: a tensor, the size or the dtype is not as said.
    """
    entries.check("entries", 0, tail.device, (torch.float32,))
    _read(
        *(tail, length, size, values, entries.places.numel(), entries.count, bad),
        {
            **{"places": entries.places, "out": entries.values, "divisor": 1.0},
            **{"DENSE": False, "DIVIDED": False, "FORMAT": ()},
        },
    )


def decode(
    tail: torch.Tensor,
    length: torch.Tensor,
    capacity: int,
    values: torch.dtype,
    out: torch.Tensor,
    divisor: float,
    bad: torch.Tensor,
) -> None:
    """Write what the tail of a message says to a dense tensor, and 0 elsewhere.

    All tensors are contiguous, on one device, and overlap no other.

    Args:
        tail, length, values: as in `read`; the size is that of `out`.
        capacity: how many entries there may be, less than 2^31.
        out: float32, float16 or bfloat16, ``(size,)``; each value is divided and rounded once.
        divisor: a positive number of fp32.
        bad: as in `read`; `out` is 0 then.

    Raises:
        ConfigurationError: a tensor, a number or the dtype is not as said.
    """
    check("out", out, FLOATS, 0, tail.device)
    check_capacity("capacity", capacity)
    out.zero_()
    count = torch.empty(1, dtype=torch.int64, device=tail.device)
    _read(
        *(tail, length, out.numel(), values, capacity, count, bad),
        {
            **{"places": count, "out": words(out), "divisor": divisor},
            **{"DENSE": True, "DIVIDED": divisor != 1, "FORMAT": tuple(FORMATS[out.dtype])},
        },
    )
