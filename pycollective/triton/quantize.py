"""1-bit and 8-bit quantization with error feedback on GPUs: the payloads of the CPU's kernels.

docs/wire.md says what a payload is, byte by byte, and in which order a 1-bit scale is added up.

`encode` is one pass over gradient and residual. A program is one warp, and takes four chunks:

1. Each step loads 32 elements of each chunk, 16 bytes of fp32 a thread, and keeps them in
   registers. So each of the order's 32 sums of a chunk is one number of a thread.
2. The chunk's sum, or its largest magnitude, gives its scale.
3. From the registers come the payload's bits or bytes, and the new residual.

A chunk that is too long for the registers is read twice, and what does not fill a program.

`decode` adds up the payloads of all ranks in the contract's order and rounds once. A program takes
1,024 elements.

Payloads may lie anywhere, so their bytes are moved one by one: by neighbouring threads, which is as
fast. What does not fill a program has one of its own, with masks. All else is moved by vectors,
where it is aligned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from pycollective import order
from pycollective.errors import ConfigurationError
from pycollective.triton.floats import divided, narrowed, widened, word_at
from pycollective.triton.formats import FORMATS, check, name_of, words

CHUNKS = tl.constexpr(4)  # of a program that encodes
SUMS = tl.constexpr(32)  # of a chunk
ENCODE = {"num_warps": 1, "enable_fp_fusion": False}
DECODE = {"num_warps": 2, "enable_fp_fusion": False}
# Elements of the longest chunks that stay in registers, of four chunks in those of 32 threads.
_KEPT = {"one_bit": 1024, "int8": 512}
_REREAD = 128  # at most, of a chunk that is read twice
_UNROLLED = 8  # rows; of more, four at a time are added up in a loop
DECODED = tl.constexpr(1024)  # elements of a program
LEFT = tl.constexpr(128)  # at most, of a program with a mask
_LARGEST_SCALE = tl.constexpr(8454659 * 2.0**98)  # of int8: 127 times the next is not finite
_LEAST_NORMAL = tl.constexpr(2.0**-126)
_INFINITY = tl.constexpr(0x7F800000)
_LEAST_CHUNK, _MOST_CHUNK, _MOST_ROWS = 64, 1 << 16, 1 << 15
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ELEMENTS_OF_A_BYTE = {"one_bit": 8, "int8": 1}
# Added to a number below 2^22 in magnitude, the lowest bits are the nearest integer's, the even
# one's of two.
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _elements(
    x,
    held,
    first,
    left,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TYPE: tl.constexpr,
    HELD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """c of `STEPS` steps from an element of each chunk on; zeros behind the last element."""
    at = first + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, SUMS)[None, :]
    cs = ()
    for step in tl.static_range(STEPS):
        here = at + step * SUMS
        mask = here < left if MASKED else None
        other = 0 if MASKED else None
        c = widened(tl.load(x + here, mask=mask, other=other), TYPE)
        if HELD:
            c += tl.load(held + here, mask=mask, other=other)
        cs = cs + (c,)
    return cs


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
    left,
    payload,
    flags,
    count,
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    TYPE: tl.constexpr,
    HELD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The chunks from these pointers on, of which `count` elements are left."""
    STEPS: tl.constexpr = KEPT // SUMS
    ONE_BIT: tl.constexpr = CODEC == "one_bit"
    RECORD: tl.constexpr = 4 + (CHUNK // 8 if ONE_BIT else CHUNK)
    columns = tl.zeros((CHUNKS, SUMS), tl.float32 if ONE_BIT else tl.uint32)
    if KEPT == CHUNK:
        cs = _elements(x, held, 0, count, STEPS, CHUNK, TYPE, HELD, MASKED)
        columns = _accumulated(columns, cs, CODEC)
    else:
        for first in range(0, CHUNK, KEPT):
            cs = _elements(x, held, first, count, STEPS, CHUNK, TYPE, HELD, MASKED)
            columns = _accumulated(columns, cs, CODEC)
    found = _folded(columns, CODEC)
    chunk = tl.arange(0, CHUNKS)
    size = tl.full((CHUNKS,), CHUNK, tl.int32)
    if MASKED:
        size = tl.minimum(tl.maximum(count - chunk * CHUNK, 1), CHUNK).to(tl.int32)
    if ONE_BIT:
        scale = tl.div_rn(found, size.to(tl.float32))
        word = found.to(tl.int32, bitcast=True)
    else:
        word = (found >> 1).to(tl.int32)
        most = word.to(tl.float32, bitcast=True)
        largest_byte = tl.full((CHUNKS,), 127, tl.float32)
        scale = tl.div_rn(most, largest_byte)
        scale = tl.where(scale > _LARGEST_SCALE, _LARGEST_SCALE, scale)
        is_normal = scale >= _LEAST_NORMAL
        scale = tl.where(is_normal, scale, 0.0)
        times = tl.where(is_normal, tl.div_rn(largest_byte, most), 0.0)
    if tl.max(word, axis=0) >= _INFINITY:
        tl.atomic_or(flags, 1, sem="relaxed")
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
            cs = _elements(x, held, first, count, STEPS, CHUNK, TYPE, HELD, MASKED)
            if ONE_BIT:
                _store_one_bit(cs, scale, left, data, first, count, CHUNK, MASKED)
            else:
                _store_int8(cs, scale, times, left, data, first, count, CHUNK, MASKED)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["payload", "flags"])
def encode(
    x,
    held,
    left,
    payload,
    flags,
    count,
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    REREAD: tl.constexpr,
    TYPE: tl.constexpr,
    HELD: tl.constexpr,
):
    """Quantize `count` words of x and what is held of them; see `quantize`.

    `KEPT` elements of a chunk are in registers at once, `REREAD` in the last program. `TYPE` is the
    gradient's dtype.
    """
    SIZE: tl.constexpr = CHUNKS * CHUNK
    RECORDS: tl.constexpr = CHUNKS * (4 + (CHUNK // 8 if CODEC == "one_bit" else CHUNK))
    program = tl.program_id(0).to(tl.int64)
    first = program * SIZE
    if program < count // SIZE:
        _encoded(
            *(x + first, held + first, left + first, payload + program * RECORDS, flags, SIZE),
            *(CODEC, CHUNK, KEPT, TYPE, HELD, False),
        )
    else:
        _encoded(
            *(x + first, held + first, left + first, payload + program * RECORDS, flags),
            *((count - first).to(tl.int32), CODEC, CHUNK, REREAD, TYPE, HELD, True),
        )


@triton.jit
def _leaf(payload, records, data, is_there, mask, CODEC: tl.constexpr):
    """What one payload decodes to, in a row for each of `records`: (row, element)."""
    ROWS: tl.constexpr = data.shape[0]
    FOURS: tl.constexpr = data.shape[1]
    place = tl.arange(0, 4)[None, None, :]
    scale = word_at(payload + records, is_there, 4)[:, :, None]
    other = None if mask is None else 0
    if CODEC == "one_bit":
        byte = tl.load(payload + data, mask=mask, other=other).to(tl.int32)
        four = byte >> tl.arange(0, FOURS)[None, :] % 2 * 4
        found = (((four[:, :, None] >> place) << 31) ^ scale).to(tl.float32, bitcast=True)
    else:
        byte = tl.load(payload + data[:, :, None] + place, mask=mask, other=other).to(tl.int32)
        # Behind the exponent of 2^23 a byte of 128 + b is 2^23 + 128 + b. GPUs convert more slowly.
        number = (byte ^ 0x4B000080).to(tl.float32, bitcast=True) - (2.0**23 + 128)
        found = number * scale.to(tl.float32, bitcast=True)
    return tl.reshape(found, (ROWS, 4 * FOURS))


@triton.jit
def _node(
    payload, stride, records, data, is_there, mask, CODEC: tl.constexpr, COMBINES: tl.constexpr
):
    """The sum of some payloads, by a recipe."""
    waiting = ()
    for i in tl.static_range(len(COMBINES)):
        if COMBINES[i]:
            waiting = waiting[:-2] + (waiting[-2] + waiting[-1],)
        else:
            waiting = waiting + (_leaf(payload, records, data, is_there, mask, CODEC),)
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
        node = _node(payload, stride, records, data, is_there, mask, CODEC, FOUR)
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
        edge = _node(payload, stride, records, data, is_there, mask, CODEC, REST)
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
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
    DIVIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The `SIZE` elements from number `first` on, or `count` of them, to `out`."""
    ROWS: tl.constexpr = SIZE // BLOCK
    RECORD: tl.constexpr = 4 + (CHUNK // 8 if CODEC == "one_bit" else CHUNK)
    # A thread loads what four elements need that it stores at once: none needs another's.
    row = tl.arange(0, ROWS)[:, None] * BLOCK
    four = tl.arange(0, BLOCK // 4)[None, :]
    if SIZE % CHUNK == 0:
        payload += first // CHUNK * RECORD
        start = row
    else:
        start = first + row
    records = start // CHUNK * RECORD
    if CODEC == "one_bit":
        data = records + 4 + start % CHUNK // 8 + four // 2
    else:
        data = records + 4 + start % CHUNK + 4 * four
    is_there = row < count if MASKED else None
    mask = None
    if MASKED:
        mask = row + 4 * four < count
        if CODEC == "int8":
            mask = (row + 4 * four)[:, :, None] + tl.arange(0, 4)[None, None, :] < count
    x = _sum(
        payload, stride, records, data, is_there, mask, (ROWS, BLOCK), CODEC, FOURS, FOUR, REST
    )
    if DIVIDE:
        x = divided(x, divisor)
    else:
        x *= divisor
    at = row + tl.arange(0, BLOCK)[None, :]
    word = narrowed(x, out.dtype.element_ty, FORMAT)
    tl.store(out + at, word, mask=at < count if MASKED else None)


@triton.jit(do_not_specialize=["stride", "count"], do_not_specialize_on_alignment=["payload"])
def decode(
    payload,
    stride,
    out,
    count,
    divisor,
    CODEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FOURS: tl.constexpr,
    FOUR: tl.constexpr,
    REST: tl.constexpr,
    DIVIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Add up payloads, `stride` bytes apart, to `count` words; see `dequantize`.

    There are `FOURS` times four payloads and those that `REST` combines. A program's rows have
    `BLOCK` elements, each of one chunk.
    """
    PIECE: tl.constexpr = min(BLOCK, LEFT)
    program = tl.program_id(0).to(tl.int64)
    stride = stride.to(tl.int64)
    full = count // DECODED
    if program < full:
        first = program * DECODED
        _decoded(
            *(payload, stride, out + first, first, DECODED, divisor, CODEC, CHUNK, BLOCK, DECODED),
            *(FOURS, FOUR, REST, DIVIDE, FORMAT, False),
        )
    else:
        first = full * DECODED + (program - full) * PIECE
        _decoded(
            *(payload, stride, out + first, first, count - first, divisor, CODEC, CHUNK, PIECE),
            *(PIECE, FOURS, FOUR, REST, DIVIDE, FORMAT, True),
        )


def _combines(terms: int) -> tuple[bool, ...]:
    """The order over so many terms: see `pycollective.order.recipe`."""
    made = order.recipe((0, terms), [(i, i + 1) for i in range(terms)]) if terms else []
    return tuple(each == order.COMBINE for each in made)


def encode_constants(codec: str, chunk: int, dtype: torch.dtype, is_held: bool) -> dict[str, Any]:
    """Return the constexprs of `encode` for a gradient of this dtype."""
    reread = math.gcd(chunk, _REREAD)
    return {
        "CODEC": codec,
        "CHUNK": chunk,
        "KEPT": chunk if chunk <= _KEPT[codec] else reread,
        "REREAD": reread,
        "TYPE": name_of(dtype),
        "HELD": is_held,
    }


def decode_constants(
    codec: str, chunk: int, rows: int, dtype: torch.dtype, divisor: float
) -> dict[str, Any]:
    """Return the constexprs of `decode` for a result of this dtype."""
    fours, rest = divmod(rows, 4) if rows > _UNROLLED else (0, rows)
    return {
        "CODEC": codec,
        "CHUNK": chunk,
        "BLOCK": math.gcd(chunk, DECODED.value),
        "FOURS": fours,
        "FOUR": _combines(4),
        "REST": _combines(rest),
        "DIVIDE": math.frexp(divisor)[0] != 0.5 or not 1 / divisor >= 2.0**-126,
        "FORMAT": tuple(FORMATS[dtype]),
    }


def quantize(
    codec: str,
    chunk: int,
    x: torch.Tensor,
    held: torch.Tensor | None,
    left: torch.Tensor,
    payload: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Quantize x + held on their device's current stream, as ``_core.quantize`` does on a CPU.

    All tensors are contiguous, on one device, and the caller's; `left` and `payload` overlap no
    other. Where a number is not finite, `left` and `payload` hold anything afterwards.

    Args:
        codec: ``one_bit`` or ``int8``.
        chunk: elements to a scale, a multiple of 64 up to 65,536.
        x: ``(m,)``, the gradient, fp32, fp16 or bf16.
        held: ``(m,)`` of fp32, what was held back before; None: nothing.
        left: ``(m,)`` of fp32, gets what the payload does not carry.
        payload: uint8, with room for `payload_bytes`, gets the payload (docs/wire.md).
        flags: ``(1,)`` of int32, as in a message's header. Bit 0 is set if a number is not finite;
            nothing is cleared.

    Raises:
        ConfigurationError: a codec or chunk that is none of these, or a tensor that is not as said.
    """
    m = x.numel()
    _check(codec, chunk)
    check("x", x, _DTYPES, 0, x.device)
    for name, each, dtype, least in (
        ("held", left if held is None else held, torch.float32, m),
        ("left", left, torch.float32, m),
        ("payload", payload, torch.uint8, payload_bytes(codec, chunk, m)),
        ("flags", flags, torch.int32, 1),
    ):
        check(name, each, (dtype,), least, x.device)
    if m == 0:
        return
    constexprs = encode_constants(codec, chunk, x.dtype, held is not None)
    with torch.accelerator.device_index(x.device.index):
        encode[triton.cdiv(m, CHUNKS.value * chunk),](
            *(words(x), left if held is None else held, left, payload, flags, m),
            **constexprs,
            **ENCODE,
        )


def dequantize(
    codec: str, chunk: int, messages: torch.Tensor, at: int, out: torch.Tensor, divisor: float
) -> None:
    """Add up payloads, divide and round once, as ``_core.dequantize`` does on a CPU.

    The order is the contract's. All is done on the device's current stream. Nothing outside of the
    payloads is read, whatever they hold.

    Args:
        codec: ``one_bit`` or ``int8``.
        chunk: elements to a scale, a multiple of 64 up to 65,536.
        messages: ``(rows, bytes)`` of uint8, contiguous: a message of each rank, 1 to 32,768; on
            the device of `out`.
        at: where the payload begins in each message.
        out: ``(m,)``, contiguous, fp32, fp16 or bf16; overlaps no message.
        divisor: an fp32 number above 0; 1: do not divide.

    Raises:
        ConfigurationError: a codec, chunk or place that is none of these, or a tensor that is not
            as said.
    """
    m = out.numel()
    _check(codec, chunk)
    check("out", out, _DTYPES, 0, out.device)
    check("messages", messages, (torch.uint8,), 0, out.device)
    rows, stride = messages.shape
    if not 0 <= at <= stride - payload_bytes(codec, chunk, m):
        raise ConfigurationError(f"messages must have payloads of {m} elements from byte {at} on")
    if not 1 <= rows <= _MOST_ROWS:
        raise ConfigurationError(f"messages must be of 1 to {_MOST_ROWS} ranks, not {rows}")
    if m == 0:
        return
    constexprs = decode_constants(codec, chunk, rows, out.dtype, divisor)
    factor = divisor if constexprs["DIVIDE"] else 1 / divisor
    with torch.accelerator.device_index(out.device.index):
        decode[programs(m, constexprs["BLOCK"]),](
            messages.view(-1)[at:], stride, words(out), m, factor, **constexprs, **DECODE
        )


def programs(m: int, block: int) -> int:
    """Return how many programs decode `m` elements: full ones, and those of what is left."""
    full, left = divmod(m, DECODED.value)
    return full + triton.cdiv(left, min(block, LEFT.value))


def payload_bytes(codec: str, chunk: int, count: int) -> int:
    """Return how many bytes the payload of `count` elements has."""
    return 4 * triton.cdiv(count, chunk) + triton.cdiv(count, _ELEMENTS_OF_A_BYTE[codec])


def _check(codec: str, chunk: int) -> None:
    if codec not in _ELEMENTS_OF_A_BYTE:
        raise ConfigurationError(f"no codec {codec!r}; there are {list(_ELEMENTS_OF_A_BYTE)}")
    if chunk % _LEAST_CHUNK or not 0 < chunk <= _MOST_CHUNK:
        raise ConfigurationError(f"a chunk is a multiple of 64 elements up to 65536, not {chunk}")
