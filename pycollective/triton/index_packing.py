"""Packed places in messages of top-k, on GPUs: the bytes of docs/inside/wire.md, "Sparse payloads".

What a message has behind its header and its small parameters is its *tail*: the number of places
(4 bytes), the length of their stream (4 bytes), the stream, and the values. All of these lengths
are known to the device alone; buffers have room for the longest. A block is 128 places.

`pack` is two launches:

1. `_head_blocks` finds each block's width and how long its body is. The last program of a message
   adds these up.
2. `_write` writes bodies and values.

`read` is three:

1. `_find_bodies` checks each message's headers and adds up.
2. `_read_spans` checks each block and reads how many places it spans. The last program of a message
   adds these up and checks the sum. So nothing is written of a tail that is refused.
3. `_read_blocks` writes.

In a block that is read, each bit of the unary part has a lane. Bit p, if it is the i-th 1, has the
gap ((p - i) - what the one before it has) 2^w + low bits, so its place is a sum over the lanes
before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import segments
from pycollective.errors import ConfigurationError
from pycollective.triton.floats import widened, word_at
from pycollective.triton.formats import check, name_of
from pycollective.triton.launching import launcher
from pycollective.triton.tables import BAD, DIFFERS, Tables, is_last
from pycollective.triton.top_k import FLOATS, OPTIONS, SPACE

PER_BLOCK = tl.constexpr(128)  # places
MOST_UNARY = tl.constexpr(48)  # bytes of a block
HEAD = tl.constexpr(8)  # bytes of a tail before its stream
_ONE_WARP = {"TILE": 512, "num_warps": 1, **OPTIONS}
VALUES = 512  # bytes of a program

# Columns of the numbers that kernels are given of each message.
ENTRY = tl.constexpr(0)  # the number of its first entry
CAPACITY = tl.constexpr(1)
SIZE = tl.constexpr(2)
TAIL = tl.constexpr(3)  # its byte in all messages
BOUND = tl.constexpr(4)  # bytes of its longest tail
PARTS = tl.constexpr(5)
# And of each that has come.
START = tl.constexpr(0)
CAME_TAIL = tl.constexpr(1)
ROOM = tl.constexpr(2)
CAME_SIZE = tl.constexpr(3)
CAME_CAPACITY = tl.constexpr(4)
CAME = tl.constexpr(6)


@triton.jit
def _gaps(places, at, inside):
    """How many places lie between one and that before it, which is before the first at -1."""
    here = tl.load(places + at, mask=inside, other=0)
    before = tl.load(places + at - 1, mask=inside & (at > 0), other=-1)
    return (here - before - 1).to(tl.uint32, bitcast=True)


@triton.jit
def _low_bytes(count, width):
    return (count * width + 7) // 8


@triton.jit
def _count_of(counts, part, message, found, COUNTED: tl.constexpr):
    """How many entries a message has."""
    many = tl.load(counts + message if COUNTED else part + CAPACITY)
    return tl.where(tl.load(found + BAD) == 0, many, 0)


@triton.jit
def _put_word(to, number):
    byte = tl.arange(0, 4)
    tl.store(to + byte, ((number >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit
def _head_block(places, block, many, tail):
    """Write a block's header, and return how many bytes its body has."""
    lane = tl.arange(0, PER_BLOCK)
    here = tl.minimum(many - block * PER_BLOCK, PER_BLOCK).to(tl.int32)
    size = tl.full((), 0, tl.int32)
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
        unary = tl.where(span == 0, 0, unary).to(tl.int32)
        header = tail + HEAD + 1 + 2 * block
        tl.store(header, width.to(tl.uint8))
        tl.store(header + 1, unary.to(tl.uint8))
        size = unary + _low_bytes(here, width)
    return size


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["messages"])
def _head_blocks(
    places,
    counts,
    parts,
    messages,
    found,
    sizes,
    begins,
    counters,
    most,
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each block's header, and where its body begins in the tail; what the tail begins with.

    `begins` has one more of each message: where values begin.
    """
    program = tl.program_id(0).to(tl.int64)
    message = program // most
    part = parts + message * PARTS
    many = _count_of(counts, part, message, found, COUNTED)
    tail = messages + tl.load(part + TAIL)
    size = _head_block(places + tl.load(part + ENTRY), program - message * most, many, tail)
    tl.store(sizes + program, size)
    if is_last(counters + message, most):
        sizes += message * most
        begins += message * (most + 1)
        begin = HEAD + 1 + 2 * ((many + PER_BLOCK - 1) // PER_BLOCK)
        for first in range(0, most, TILE):
            at = first + tl.arange(0, TILE)
            mine = tl.load(sizes + at, mask=at < most, other=0)
            tl.store(begins + at, begin + tl.cumsum(mine, axis=0) - mine, mask=at < most)
            begin += tl.sum(mine, axis=0)
        tl.store(begins + most, begin)
        _put_word(tail, many)
        _put_word(tail + 4, begin - HEAD)
        tl.store(tail + HEAD, tl.full((), 1, tl.uint8))


@triton.jit
def _of_one_byte(byte, bits, earlier_byte, earlier_bits):
    """The bits of the earlier byte."""
    return earlier_byte, earlier_bits | tl.where(byte == earlier_byte, bits, 0)


@triton.jit
def _write_body(places, block, many, tail, body):
    lane = tl.arange(0, PER_BLOCK)
    first = block * PER_BLOCK
    here = tl.minimum(many - first, PER_BLOCK).to(tl.int32)
    if here > 0:
        header = tail + HEAD + 1 + 2 * block
        width = tl.load(header).to(tl.int32)
        unary = tl.load(header + 1).to(tl.int32)
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


@triton.jit(
    do_not_specialize=["most", "tiles"], do_not_specialize_on_alignment=["values", "messages"]
)
def _write(
    places,
    values,
    counts,
    parts,
    messages,
    found,
    begins,
    most,
    tiles,
    COUNTED: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each block's body; and tiles of values and of the zeros behind, byte by byte: where values
    begin is odd as often as not."""
    program = tl.program_id(0).to(tl.int64)
    message = program // (most + tiles)
    number = program - message * (most + tiles)
    part = parts + message * PARTS
    many = _count_of(counts, part, message, found, COUNTED)
    entry = tl.load(part + ENTRY)
    tail = messages + tl.load(part + TAIL)
    begins += message * (most + 1)
    if number < most:
        _write_body(places + entry, number, many, tail, tail + tl.load(begins + number))
    else:
        at = (number - most) * TILE + tl.arange(0, TILE)
        begin = tl.load(begins + most)
        byte = tl.load(values + entry * BYTES + at, mask=at < many * BYTES, other=0)
        tl.store(tail + begin + at, byte, mask=begin + at < tl.load(part + BOUND))


def _bounds(counts, sizes, width: int):
    """As `tail_bound`, of arrays."""
    blocks = -(-counts // PER_BLOCK.value)
    bits = np.minimum(15 * counts + sizes // 16384, 35 * counts)
    return HEAD.value + 1 + 4 * blocks + (bits + 7) // 8 + counts * width


def tail_bound(count: int, size: int, values: torch.dtype) -> int:
    """Return the bytes of the longest tail of up to `count` entries below `size`."""
    return int(_bounds(count, size, values.itemsize))


def pack(
    places: torch.Tensor,
    values: torch.Tensor,
    parts: NDArray[np.int64],
    counts: torch.Tensor | None,
    messages: torch.Tensor,
    found: torch.Tensor,
    tables: Tables,
) -> None:
    """Write the tails of messages, on the current stream.

    All tensors are contiguous, on one device, and overlap no other. Of a tail's room, which is
    `tail_bound` of its capacity, what is not in use becomes 0.

    Args:
        places: int32, the words of uint32: of each message they ascend strictly.
        values: float32, float16 or bfloat16, of the same entries.
        parts: ``(messages, 4)``: of each message its first entry, how many it has at most, the
            size that its places are below, and its tail's first byte in `messages`.
        counts: int64, ``(messages,)``: how many entries each has; None: as many as it can.
        messages: uint8, flat.
        found: as `segments` says. Where BAD is set no message has entries.
        tables: of the device.

    Raises:
        ConfigurationError: a tensor or a number is not as said, or a tail has no room.
    """
    device = messages.device
    if parts.ndim != 2 or parts.shape[1] != PARTS.value - 1 or parts.dtype != np.int64:
        raise ConfigurationError(f"parts must be int64 (messages, 4), not {parts.shape}")
    if not len(parts):
        return

    def make() -> tuple[torch.Tensor, int, int, int, int]:
        first, capacity, size, tail = parts.T
        bounds = _bounds(capacity, size, values.itemsize)
        _check_numbers(capacity, size)
        if (first < 0).any() or (tail < 0).any():
            raise ConfigurationError("an entry or a tail begins before the first")
        return (
            tables.numbers(np.column_stack([parts, bounds])),
            *(int((first + capacity).max()), int((tail + bounds).max())),
            *(_blocks(capacity), -(-(int(bounds.max()) - HEAD.value - 1) // VALUES)),
        )

    key = "pack", values.itemsize, parts.tobytes()
    numbers, entries, room, most, tiles = tables.once(key, make)
    check("places", places, (torch.int32,), entries, device)
    check("values", values, FLOATS, places.numel(), device)
    check("messages", messages, (torch.uint8,), room, device)
    check("found", found, (torch.int32,), segments.NONZERO, device)
    if counts is not None:
        check("counts", counts, (torch.int64,), len(parts), device)
    sizes = torch.empty(len(parts), most, dtype=torch.int32, device=device)
    begins = torch.empty(len(parts), most + 1, dtype=torch.int64, device=device)
    counted = counts is not None
    count = numbers if counts is None else counts
    counters = tables.workspace("programs", len(parts))
    launch = launcher(_head_blocks, COUNTED=counted, **_ONE_WARP)
    launch(
        *(len(parts) * most, places, count, numbers, messages, found, sizes, begins, counters),
        most,
    )
    launch = launcher(
        _write,
        **{"COUNTED": counted, "BYTES": values.itemsize, "TILE": VALUES, "num_warps": 1, **OPTIONS},
    )
    launch(
        *(len(parts) * (most + tiles), places, values.view(torch.uint8), count, numbers),
        *(messages, found, begins, most, tiles),
    )


def _check_numbers(capacity: NDArray[np.int64], size: NDArray[np.int64]) -> None:
    """Refuse entries whose numbers, and places that, are no words."""
    if (capacity < 0).any() or (capacity >= 1 << 31).any():
        raise ConfigurationError("a message has room for 0 to 2^31 - 1 entries")
    if (size < 0).any() or (size > SPACE).any():
        raise ConfigurationError("places of a message are not below 2^32")


def _blocks(capacity: NDArray[np.int64]) -> int:
    """How many blocks a message has at most; one where it has none, for its programs."""
    return max(-(-int(capacity.max()) // PER_BLOCK.value), 1)


class Entries(NamedTuple):
    """The entries of messages that have come, found by their places.

    Attributes:
        marks: int64, ``(messages, words)``, of 32 places each: in the lower half bit i is set
            where a message has place 32 w + i. In the upper half of a word that has any is
            `capacity` less the number of its first entry. There is one word more than there are
            places for.
        values: float32, ``(messages, capacity)``.
    """

    marks: torch.Tensor
    values: torch.Tensor


@triton.jit
def _word_at(tail):
    byte = tl.arange(0, 4)
    return tl.sum(tl.load(tail + byte).to(tl.int64) << (8 * byte), axis=0)


@triton.jit
def _refuse(heads, found, blocks, TILE: tl.constexpr):
    """There are no places, so no block has any."""
    for first in range(0, blocks, TILE):
        block = first + tl.arange(0, TILE).to(tl.int64)
        tl.store(heads + block, tl.zeros((TILE,), tl.int64), mask=block < blocks)
    tl.atomic_or(found + DIFFERS, 1, sem="relaxed")
    tl.atomic_or(found + BAD, 1, sem="relaxed")


@triton.jit
def _find_bodies_of(
    tail, part, heads, values, found, blocks, BYTES: tl.constexpr, TILE: tl.constexpr
):
    room = tl.load(part + ROOM)
    many = tl.full((), 0, tl.int64)
    stream = tl.full((), 0, tl.int64)
    good = room >= HEAD + 1
    if good:
        many = _word_at(tail)
        stream = _word_at(tail + 4)
        most = tl.minimum(tl.load(part + CAME_CAPACITY), tl.load(part + CAME_SIZE))
        good = (HEAD + stream + many * BYTES <= room) & (many <= most)
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
    tl.store(values, stream + HEAD)
    if good == 0:
        _refuse(heads, found, blocks, TILE)


@triton.jit(
    do_not_specialize=["messages", "blocks", "words"], do_not_specialize_on_alignment=["came"]
)
def _find_bodies(
    came,
    parts,
    heads,
    values,
    marks,
    found,
    messages,
    blocks,
    words,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each block's head: where its body begins, its places, its width, its unary bytes, in a word.

    And where values begin. Where that cannot be no block has any places. The programs behind those
    of messages write zeros to `marks`.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < messages:
        part = parts + program * CAME
        tail = came + tl.load(part + CAME_TAIL)
        _find_bodies_of(
            *(tail, part, heads + program * blocks, values + program, found, blocks, BYTES, TILE)
        )
    else:
        at = (program - messages) * TILE + tl.arange(0, TILE)
        tl.store(marks + at, tl.zeros((TILE,), tl.int64), mask=at < words)


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
def _body(tail, head):
    """A block, as its head says."""
    begin = head >> 24
    here = ((head >> 16) & 255).to(tl.int32)
    width = ((head >> 8) & 255).to(tl.int32)
    unary = (head & 255).to(tl.int32)
    is_place, number, where, good = _lanes(tail, begin, width, unary, here)
    return here, is_place, number, where, good


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["came"])
def _read_spans(came, parts, heads, spans, firsts, counters, found, blocks, TILE: tl.constexpr):
    """How many places each block takes up, to its last, and those of all before it.

    Where a block is wrong, or beyond the size, no place of the message is left.
    """
    program = tl.program_id(0).to(tl.int64)
    message = program // blocks
    part = parts + message * CAME
    tail = came + tl.load(part + CAME_TAIL)
    here, is_place, _, where, good = _body(tail, tl.load(heads + program))
    span = tl.max(tl.where(is_place, where + 1, 0), axis=0)
    # More than 2^32 is too much, whatever it is: the sum must not overflow. -1: it is wrong.
    span = tl.where((here > 0) & (good == 0), -1, tl.minimum(span, 1 << 32))
    tl.store(spans + program, span)
    if is_last(counters + message, blocks):
        spans += message * blocks
        firsts += message * blocks
        total = tl.full((), 0, tl.int64)
        least = tl.full((), 0, tl.int64)
        for first in range(0, blocks, TILE):
            at = first + tl.arange(0, TILE)
            mine = tl.load(spans + at, mask=at < blocks, other=0)
            before = total + tl.cumsum(mine, axis=0) - mine
            tl.store(firsts + at, before, mask=at < blocks)
            total += tl.sum(mine, axis=0)
            least = tl.minimum(least, tl.min(mine, axis=0))
        if (least < 0) | (total > tl.load(part + CAME_SIZE)):
            _refuse(heads + message * blocks, found, blocks, TILE)


@triton.jit(
    do_not_specialize=["blocks", "words", "capacity"], do_not_specialize_on_alignment=["came"]
)
def _read_blocks(
    came,
    parts,
    heads,
    firsts,
    begins,
    marks,
    values,
    blocks,
    words,
    capacity,
    BYTES: tl.constexpr,
    VALUE: tl.constexpr,
):
    """Marks and values of each block's entries."""
    program = tl.program_id(0).to(tl.int64)
    message = program // blocks
    tail = came + tl.load(parts + message * CAME + CAME_TAIL)
    _, is_place, number, where, _ = _body(tail, tl.load(heads + program))
    where += tl.load(firsts + program)
    entry = (program - message * blocks) * PER_BLOCK + number
    word = word_at(tail + tl.load(begins + message) + entry * BYTES, is_place, BYTES)
    x = widened(word if BYTES == 4 else word.to(tl.int16), VALUE)
    tl.store(values + message * capacity + entry, x, mask=is_place)
    mark = (marks + message * words + (where >> 5)).to(tl.pointer_type(tl.int32))
    tl.atomic_or(mark, 1 << (where & 31).to(tl.int32), mask=is_place, sem="relaxed")
    tl.atomic_max(mark + 1, (capacity - entry).to(tl.int32), mask=is_place, sem="relaxed")


def read(
    came: torch.Tensor,
    parts: NDArray[np.int64],
    values: torch.dtype,
    found: torch.Tensor,
    tables: Tables,
) -> Entries:
    """Read the tails of messages, on the current stream.

    Whatever their bytes are, nothing outside of them is touched. All tensors are contiguous, on
    one device, and overlap no other.

    Args:
        came: uint8, flat: the messages.
        parts: ``(messages, 6)``: of each message its first byte, its tail's first byte, how many
            bytes from there on may be read, the size that its places are below, how many entries it
            may have; and one more number.
        values: the dtype of the values in messages: float32, float16 or bfloat16.
        found: as `segments` says. DIFFERS and BAD are set where the bytes are no tail of so many
            entries below the size; such a message has none.
        tables: of the device.

    Raises:
        ConfigurationError: a tensor, a number or the dtype is not as said.
    """
    device = came.device
    if parts.ndim != 2 or parts.shape[1] != CAME.value or parts.dtype != np.int64:
        raise ConfigurationError(f"parts must be int64 (messages, 6), not {parts.shape}")

    def make() -> tuple[int, int, int, int]:
        start, tail, room, size, capacities, _ = parts.T
        _check_numbers(capacities, size)
        if (start < 0).any() or (tail < start).any() or (room < 0).any():
            raise ConfigurationError("a message begins or ends before its first byte")
        end, width = int((tail + room).max()), int(size.max()) // 32 + 2
        return end, _blocks(capacities), width, int(capacities.max())

    key = "read", parts.tobytes()
    end, blocks, width, capacity = tables.once(key, make)
    check("came", came, (torch.uint8,), end, device)
    check("found", found, (torch.int32,), segments.NONZERO, device)
    if values not in FLOATS:
        raise ConfigurationError(f"no message has values of {name_of(values)}")
    count = len(parts)
    heads, spans, firsts = (
        torch.empty(count, blocks, dtype=torch.int64, device=device) for _ in range(3)
    )
    begins = torch.empty(count, dtype=torch.int64, device=device)
    marks = torch.empty(count, width, dtype=torch.int64, device=device)
    wide = torch.empty(count, capacity, dtype=torch.float32, device=device)
    given = came, tables.numbers(parts), heads
    tile = 2048
    bytes_of = values.itemsize
    launch = launcher(_find_bodies, BYTES=bytes_of, TILE=tile, num_warps=16, **OPTIONS)
    launch(
        *(count - (-count * width // tile), *given, begins, marks, found),
        *(count, blocks, count * width),
    )
    launch = launcher(_read_spans, **_ONE_WARP)
    counters = tables.workspace("programs", count)
    launch(count * blocks, *given, spans, firsts, counters, found, blocks)
    launch = launcher(_read_blocks, VALUE=name_of(values), BYTES=bytes_of, num_warps=2, **OPTIONS)
    launch(count * blocks, *given, firsts, begins, marks, wide, blocks, width, capacity)
    return Entries(marks, wide)
