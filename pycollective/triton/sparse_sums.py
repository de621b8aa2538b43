"""What GPUs do with entries of top-k: averages of ranks' in the contract's order.

Which of a rank's entries a place has is found by a bitmap of its places (`Rows`): the words of a
tile of places have `bits`, `before` says how many entries lie before the tile, and the number of
bits before a place does the rest. What is absent adds nothing, so a sum needs to know. A program
that adds up has the words of a tile, and each of their bits a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pycollective import order
from pycollective.errors import ConfigurationError
from pycollective.order import COMBINE
from pycollective.triton.floats import narrowed
from pycollective.triton.formats import FORMATS, check, words
from pycollective.triton.top_k import (
    FLOATS,
    OPTIONS,
    Entries,
    check_space,
    ones_of,
)

WORDS = tl.constexpr(32)  # of a tile
SIZE = 1024  # entries of a program
MOST_RANKS = 64


class Rows(NamedTuple):
    """Entries of some ranks about the same places, to be added up.

    Attributes:
        bits: int32, ``(ranks, words)``: bit i of word w is place 32 w + i.
        before: int32, ``(ranks, tiles)``: how many entries lie before each tile of `WORDS` words.
        values: float32, ``(ranks, capacity)``.
        size: places are below it.
    """

    bits: torch.Tensor
    before: torch.Tensor
    values: torch.Tensor
    size: int


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["bits"])
def _mark(places, count, bits, size, SIZE: tl.constexpr):
    """Set the bits of places below `size`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < tl.load(count)
    place = tl.load(places + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    inside &= place < size
    tl.atomic_or(bits + (place >> 5), 1 << (place & 31).to(tl.int32), mask=inside, sem="relaxed")


@triton.jit
def _words_of(bits, tile, words):
    at = tile * WORDS + tl.arange(0, WORDS)
    return tl.load(bits + at, mask=at < words, other=0)


@triton.jit(do_not_specialize=["words", "tiles"])
def _count_tiles(bits, counts, words, tiles):
    """How many places of each tile a row has."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    found = _words_of(bits + row * words, program - row * tiles, words)
    tl.store(counts + program, tl.sum(ones_of(found), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def _add_up(counts, before, tiles, TILE: tl.constexpr):
    """Of each tile of a row, how many lie before it."""
    row = tl.program_id(0).to(tl.int64)
    counts += row * tiles
    before += row * tiles
    many = tl.full((), 0, tl.int64)
    for first in range(0, tiles, TILE):
        at = first + tl.arange(0, TILE)
        mine = tl.load(counts + at, mask=at < tiles, other=0).to(tl.int64)
        through = many + tl.cumsum(mine, axis=0)
        tl.store(before + at, (through - mine).to(before.dtype.element_ty), mask=at < tiles)
        many += tl.sum(mine, axis=0)


@triton.jit
def _sum_of_rows(bits, before, values, tile, words, tiles, capacity, COMBINES: tl.constexpr):
    """(whether any rank has it, the sum) for each place of a tile."""
    bit = tl.arange(0, 32)[None, :]
    below = ((tl.full((), 1, tl.int64) << bit) - 1).to(tl.int32)
    waiting = ()
    for i in tl.static_range(len(COMBINES)):
        if COMBINES[i]:
            has, x = waiting[-2]
            other_has, y = waiting[-1]
            x = tl.where(has & other_has, x + y, tl.where(has, x, y))
            waiting = waiting[:-2] + ((has | other_has, x),)
        else:
            word = _words_of(bits, tile, words)
            count = ones_of(word)
            first = tl.load(before + tile) + tl.cumsum(count, axis=0) - count
            has = ((word[:, None] >> bit) & 1) != 0
            at = first[:, None] + ones_of(word[:, None] & below)
            x = tl.load(values + at, mask=has, other=0.0)
            waiting = waiting + ((has, x),)
            bits += words
            before += tiles
            values += capacity
    return waiting[0]


@triton.jit(do_not_specialize=["words", "tiles", "capacity", "size"])
def _average(
    bits,
    before,
    values,
    out,
    words,
    tiles,
    capacity,
    size,
    divisor,
    COMBINES: tl.constexpr,
    DIVIDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    has, x = _sum_of_rows(bits, before, values, tile, words, tiles, capacity, COMBINES)
    if DIVIDED:
        x = tl.div_rn(x, tl.full(x.shape, divisor, tl.float32))
    word = tl.where(has, narrowed(x, out.dtype.element_ty, FORMAT), 0)
    at = tile * (32 * WORDS)
    place = (32 * tl.arange(0, WORDS))[:, None] + tl.arange(0, 32)[None, :]
    if at + 32 * WORDS <= size:
        tl.store(out + at + place, word.to(out.dtype.element_ty))
    else:
        tl.store(out + at + place, word.to(out.dtype.element_ty), mask=place < size - at)


def mark(entries: Sequence[Entries], size: int) -> Rows:
    """Rows of ranks' entries, to be added up. They own their memory.

    Args:
        entries: of each rank, as `places.read` gives them: their values are float32, and all have
            room for as many; at least one, at most 64.
        size: places are below it; at most 2^32. Of others nothing is added.

    Raises:
        ConfigurationError: entries or the size are not as said.
    """
    ranks = len(entries)
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigurationError(f"entries must be of 1 to {MOST_RANKS} ranks, not {ranks}")
    device, capacity = entries[0].places.device, entries[0].places.numel()
    check_space(0, size)
    for rank, each in enumerate(entries):
        each.check(f"entries[{rank}]", capacity, device, (torch.float32,))
        if each.places.numel() != capacity or each.values.numel() != capacity:
            raise ConfigurationError(f"entries[{rank}] must have room for {capacity}")
    count = triton.cdiv(size, 32)
    tiles = triton.cdiv(count, WORDS.value)
    bits = torch.zeros(ranks, max(count, 1), dtype=torch.int32, device=device)
    counts, before = (
        torch.empty(ranks, max(tiles, 1), dtype=torch.int32, device=device) for _ in range(2)
    )
    values = torch.stack([each.values for each in entries])
    with torch.accelerator.device_index(device.index):
        for row, each in zip(bits, entries, strict=True):
            if each.places.numel():
                grid = triton.cdiv(each.places.numel(), SIZE)
                _mark[grid,](each.places, each.count, row, size, SIZE=SIZE, **OPTIONS)
        if size:
            _count_tiles[ranks * tiles,](bits, counts, count, tiles, num_warps=1, **OPTIONS)
            _add_up[ranks,](counts, before, tiles, TILE=SIZE, **OPTIONS)
    return Rows(bits, before, values, size)


def _sums(rows: Rows) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """What kernels of sums take: pointers, numbers, constexprs."""
    n = len(rows.bits)
    recipe = order.recipe((0, n), [(i, i + 1) for i in range(n)])
    return (
        (rows.bits, rows.before, rows.values),
        (rows.bits.shape[1], rows.before.shape[1], rows.values.shape[1]),
        {"COMBINES": tuple(each == COMBINE for each in recipe), **OPTIONS},
    )


def average(rows: Rows, out: torch.Tensor, divisor: float) -> None:
    """Write the sum in the contract's order, divided and rounded once, and 0 where no rank has any.

    Args:
        rows: of each rank.
        out: float32, float16 or bfloat16, contiguous, ``(rows.size,)``, on the device of `rows`;
            overlaps none of them.
        divisor: a positive number of fp32.

    Raises:
        ConfigurationError: `out` is not as said.
    """
    check("out", out, FLOATS, rows.size, rows.bits.device)
    pointers, numbers, constants = _sums(rows)
    if rows.size:
        with torch.accelerator.device_index(out.device.index):
            _average[rows.before.shape[1],](
                *(*pointers, words(out), *numbers, rows.size, divisor),
                **{"DIVIDED": divisor != 1, "FORMAT": tuple(FORMATS[out.dtype]), **constants},
            )
