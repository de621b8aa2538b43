"""The headers of compressed messages on GPUs (wire.md): read, compared and written at once.

One program does it:

1. It copies the headers that came for the host to look at, and compares them with this rank's.
2. Of each parameter it notes whether all ranks' parts are all zero.
3. It writes the next messages' headers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import segments
from pycollective.errors import ConfigurationError
from pycollective.triton.formats import check
from pycollective.triton.launching import Launcher
from pycollective.triton.tables import BAD, DIFFERS, NONZERO, Tables

# What this rank's headers say: the digest, as an unsigned integer of 64 bits; the loss scale; how
# many parameters the call has.
Mine = tuple[int, float, int]
# Headers to read: a flat uint8 tensor; int64 ``(n,)``, where each begins in it; the first byte of
# their copies in `found`.
Read = tuple[torch.Tensor, NDArray[np.int64], int]

FIELDS = tl.constexpr(24)  # bytes of a header before those with a bit a parameter
# The first bytes of fields.
_FLAGS, _ITEMS, _RESERVED = tl.constexpr(12), tl.constexpr(16), tl.constexpr(20)
_BLOCK, _ROWS, _BYTES = tl.constexpr(1024), tl.constexpr(16), tl.constexpr(64)
_MOST_READS = 2
OPTIONS = {"num_warps": 4}


@triton.jit
def header_bytes(items):
    """How long a header is."""
    return (items + 7) // 8 + FIELDS


@triton.jit
def field_byte(at, low, high, scale, flags, items):
    """Bytes of the fields of a header; zeros where its bits are.

    Args:
        at: their places in the header.
        low, high: the halves of the digest.
        scale: the loss scale's bits.
    """
    word = tl.where(at < 4, low, tl.where(at < 8, high, scale))
    word = tl.where(at < _FLAGS, word, tl.where(at < _ITEMS, flags, items))
    return tl.where(at < _RESERVED, word >> 8 * (at % 4), 0).to(tl.uint8)


@triton.jit
def _read(buffer, offsets, count, copies, low, high, scale, items):
    """Copies headers. Returns whether they differ from this rank's, and whether one has a flag."""
    length = header_bytes(items)
    differs, flags = tl.zeros((_BLOCK,), tl.int32), tl.zeros((_BLOCK,), tl.int32)
    for first in range(0, count * length, _BLOCK):
        number = first + tl.arange(0, _BLOCK)
        mask = number < count * length
        at = number % length
        offset = tl.load(offsets + number // length, mask=mask, other=0)
        byte = tl.load(buffer + offset + at, mask=mask, other=0)
        tl.store(copies + number, byte, mask=mask)
        is_compared = mask & ((at < _FLAGS) | (at >= _ITEMS) & (at < _RESERVED))
        other = byte != field_byte(at, low, high, scale, 0, items)
        differs |= (is_compared & other).to(tl.int32)
        flags |= tl.where(at == _FLAGS, byte.to(tl.int32) & 1, 0)
    return tl.max(differs, axis=0), tl.max(flags, axis=0)


@triton.jit
def _note_zeros(buffer, offsets, count, zeros, items):
    """Of each parameter: whether all these headers have its bit."""
    for first in range(0, (items + 7) // 8, _BYTES):
        byte = first + tl.arange(0, _BYTES)
        all_of = tl.full((_ROWS, _BYTES), 0xFF, tl.int32)
        for top in range(0, count, _ROWS):
            row = top + tl.arange(0, _ROWS)
            offset = tl.load(offsets + row, mask=row < count, other=0)
            mask = (row < count)[:, None] & (8 * byte < items)[None, :]
            here = buffer + offset[:, None] + FIELDS + byte[None, :]
            all_of &= tl.load(here, mask=mask, other=0xFF).to(tl.int32)
        place = tl.arange(0, 8)
        bits = tl.min((all_of[:, :, None] >> place[None, None, :]) & 1, axis=0)
        item = 8 * byte[:, None] + place[None, :]
        tl.store(zeros + item, bits, mask=item < items)


@triton.jit
def _write(out, stride, count, flags, zeros, is_set, low, high, scale, items):
    """Headers, with a parameter's bit where its word of `zeros` is not 0 as `is_set` says."""
    length = header_bytes(items)
    for first in range(0, count * length, _BLOCK):
        number = first + tl.arange(0, _BLOCK)
        at = number % length
        byte = field_byte(at, low, high, scale, flags, items)
        for bit in tl.static_range(8):
            item = 8 * (at - FIELDS) + bit
            is_there = (at >= FIELDS) & (item < items)
            word = tl.load(zeros + item, mask=is_there, other=0)
            is_one = is_there & ((word != 0) == is_set)
            byte |= (is_one.to(tl.int32) << bit).to(tl.uint8)
        here = out + (number // length).to(tl.int64) * stride + at
        tl.store(here, byte, mask=number < count * length)


@triton.jit(
    do_not_specialize=[
        *("first_count", "first_at", "second_count", "second_at", "stride", "messages"),
        *("is_mean", "low", "high", "scale", "items"),
    ],
    do_not_specialize_on_alignment=[
        *("found", "first", "first_offsets", "second", "second_offsets", "out"),
    ],
)
def exchange_headers(
    found,
    first,
    first_offsets,
    first_count,
    first_at,
    second,
    second_offsets,
    second_count,
    second_at,
    out,
    stride,
    messages,
    is_mean,
    low,
    high,
    scale,
    items,
):
    """Read and write headers; see `headers`."""
    copies = found.to(tl.pointer_type(tl.uint8))
    differs, flag = _read(
        *(first, first_offsets, first_count, copies + first_at, low, high, scale, items)
    )
    more, another = _read(
        *(second, second_offsets, second_count, copies + second_at, low, high, scale, items)
    )
    differs |= more | tl.load(found + DIFFERS)
    bad = differs | flag | another | tl.load(found + BAD)
    zeros = found + NONZERO
    if is_mean:
        zeros += items
        if second_count > 0:
            _note_zeros(second, second_offsets, second_count, zeros, items)
        else:
            _note_zeros(first, first_offsets, first_count, zeros, items)
    tl.debug_barrier()  # the words have been loaded, and those of zeros stored
    tl.store(found + DIFFERS, differs)
    tl.store(found + BAD, bad)
    _write(
        *(out, stride, messages, bad, zeros, is_mean != 0),
        *(low ^ -differs, high ^ -differs, scale, items),
    )


_EXCHANGE = Launcher(exchange_headers, OPTIONS)


def fields_of(mine: Mine) -> tuple[int, int, int, int]:
    """Return what kernels are told of a header: the digest's halves, the scale's bits, the
    parameters; signed."""
    digest, scale, items = mine
    return *struct.unpack("<iii", struct.pack("<Qf", digest, scale)), items


def headers(
    found: torch.Tensor,
    mine: Mine,
    reads: Sequence[Read],
    write: torch.Tensor | None,
    means: bool,
    tables: Tables,
) -> None:
    """Read the headers that came and write the next ones, on their device's current stream.

    A digest, a loss scale or a number of parameters that is not this rank's sets ``DIFFERS`` and
    ``BAD`` of `found`. A header's flag that something was not finite sets ``BAD``.

    Args:
        found: int32, ``(words,)``, see `pycollective.segments`; on the device of all tensors.
        mine: what this rank's headers say.
        reads: at most two: of each headers to read, which are copied to the bytes of `found`.
        write: ``(messages, bytes)`` of uint8, whose rows begin with the headers to write; None: no
            header is written. Where ``DIFFERS`` is set all bits of the digest are flipped; the flag
            is ``BAD``. A parameter's bit says that this rank's part is all zero, by ``NONZERO``; or
            with `means` that all are.
        means: note in `found`, from `zero_at` on, of which parameters all headers of the last
            read say that they are all zero.

    Raises:
        ConfigurationError: too many reads, or no room for the copies or the headers.
    """
    fields = fields_of(mine)
    length = FIELDS.value + -(-mine[2] // 8)
    if len(reads) > _MOST_READS:
        raise ConfigurationError(f"headers of {_MOST_READS} reads at most, not {len(reads)}")
    ends = (at + len(offsets) * length for _, offsets, at in reads)
    room = max([segments.heads_at(mine[2]), *ends])
    check("found", found, (torch.int32,), -(-room // 4), found.device)
    own = found.view(torch.uint8)
    out = own.view(1, -1)[:0] if write is None else write
    if write is not None and (write.shape[1] < length or write.stride(1) != 1):
        raise ConfigurationError(f"messages must have at least {length} contiguous bytes")
    none: Read = own, np.zeros(0, np.int64), 0
    read: list[Any] = []
    for buffer, offsets, at in [*reads, none, none][:_MOST_READS]:
        read += [buffer, tables.numbers(offsets), len(offsets), at]
    _EXCHANGE(1, found, *read, out, out.stride(0), len(out), int(means), *fields)
