"""What GPUs do with entries of top-k: sums of ranks' in the contract's order, residuals.

Which of a rank's entries a place has is found by a bitmap of its places (`Rows`): the words of a
tile of places have `bits`, `before` says how many entries lie before the tile, and the number of
bits before a place does the rest. What is absent adds nothing, so a sum needs to know.

`total` and `average` add up. A program has the words of a tile, and each of their bits a lane. In
`select_sums` it has a segment: sums are few, and lie in the cache.
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
from pycollective.triton.floats import narrowed, widened
from pycollective.triton.formats import FORMATS, check, name_of, words
from pycollective.triton.top_k import (
    FLOATS,
    OPTIONS,
    Entries,
    check_space,
    key_of,
    nearest_finite,
    ones_of,
    tell,
)

WORDS = tl.constexpr(32)  # of a tile
SIZE = 1024  # entries of a program
MOST_RANKS = 64
# Of a program that loads what it stores to: a thread has one, so that it stores its own.
EACH = 128


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
def _count_tiles(bits, counts, words, tiles, RANKS: tl.constexpr):
    """How many places of each tile some rank has: of each of several rows, or of all `RANKS`."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program - row * tiles
    found = tl.zeros((WORDS,), tl.int32)
    for rank in tl.static_range(RANKS):
        found |= _words_of(bits + (row + rank) * words, tile, words)
    tl.store(counts + program, tl.sum(ones_of(found), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def _add_up(counts, before, total, tiles, TILE: tl.constexpr):
    """Of each tile of a row, how many lie before it; and of the row."""
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
    tl.store(total + row, many)


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


@triton.jit(do_not_specialize=["words", "tiles", "capacity"])
def _total(
    bits,
    before,
    values,
    starts,
    places,
    sums,
    words,
    tiles,
    capacity,
    COMBINES: tl.constexpr,
    FORMAT: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    has, x = _sum_of_rows(bits, before, values, tile, words, tiles, capacity, COMBINES)
    place = (32 * tl.arange(0, WORDS))[:, None] + tl.arange(0, 32)[None, :]
    one = tl.reshape(has.to(tl.int32), (32 * WORDS,))
    to = tl.load(starts + tile) + tl.cumsum(one, axis=0) - one
    place = tl.reshape(tile * (32 * WORDS) + place, (32 * WORDS,))
    tl.store(places + to, place.to(tl.int32), mask=one != 0)
    word = narrowed(tl.reshape(x, (32 * WORDS,)), tl.int32, FORMAT)
    tl.store(sums + to, word, mask=one != 0)


@triton.jit
def _add_at(
    left,
    places,
    values,
    count,
    limits,
    bits,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    DROPPED: tl.constexpr,
):
    """left[place - first] += value, of places in [first, last); `DROPPED`: without a bit alone."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < tl.load(count)
    place = tl.load(places + at, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    first = tl.load(limits)
    inside &= (place >= first) & (place < tl.load(limits + 1))
    if DROPPED:
        word = tl.load(bits + (place >> 5), mask=inside, other=0)
        inside &= ((word >> (place & 31).to(tl.int32)) & 1) == 0
    left += place - first
    x = widened(tl.load(values + at, mask=inside, other=0), VALUE)
    tl.store(left, tl.load(left, mask=inside, other=0.0) + x, mask=inside)


@triton.jit
def _select_again(
    places,
    values,
    edges,
    wanted,
    starts,
    kept_places,
    kept_values,
    lost,
    bad,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Select of a program's segment: first the magnitude of the last that is wanted, bit by bit."""
    segment = tl.program_id(0)
    first = tl.load(edges + segment)
    many = (tl.load(edges + segment + 1) - first).to(tl.int32)
    k = tl.load(wanted + segment).to(tl.int32)
    places += first
    values += first
    to = tl.load(starts + segment)
    least = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)  # how many have more than `least`
    if k > 0:
        for bit in range(31):
            more = least | (1 << (30 - bit))
            reaching = tl.zeros((SIZE,), tl.int32)
            for begin in range(0, many, SIZE):
                at = begin + tl.arange(0, SIZE)
                key = key_of(tl.load(values + at, mask=at < many, other=0.0))
                reaching += (key >= more).to(tl.int32)
            found = tl.sum(reaching, axis=0)
            if found >= k:
                least = more
            else:
                above = found
        ties = k - above
        seen = tl.full((), 0, tl.int32)
        for begin in range(0, many, SIZE):
            at = begin + tl.arange(0, SIZE)
            inside = at < many
            x = tl.load(values + at, mask=inside, other=0.0)
            key = key_of(x)
            tell(bad, key)
            equal = (inside & (key == least)).to(tl.int32)
            before = seen + tl.cumsum(equal, axis=0) - equal
            taken = inside & ((key > least) | ((equal != 0) & (before < ties)))
            through = tl.cumsum(taken.to(tl.int32), axis=0)
            entry = to + through - 1
            word = nearest_finite(x, kept_values.dtype.element_ty, FORMAT)
            tl.store(kept_places + entry, tl.load(places + at, mask=taken, other=0), mask=taken)
            tl.store(kept_values + entry, word, mask=taken)
            tl.store(lost + entry, x - widened(word, VALUE), mask=taken)
            to += tl.max(through, axis=0)
            seen += tl.sum(equal, axis=0)


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
    total = torch.empty(ranks, dtype=torch.int64, device=device)
    values = torch.stack([each.values for each in entries])
    with torch.accelerator.device_index(device.index):
        for row, each in zip(bits, entries, strict=True):
            if each.places.numel():
                grid = triton.cdiv(each.places.numel(), SIZE)
                _mark[grid,](each.places, each.count, row, size, SIZE=SIZE, **OPTIONS)
        if size:
            _count_tiles[ranks * tiles,](
                bits, counts, count, tiles, RANKS=1, num_warps=1, **OPTIONS
            )
            _add_up[ranks,](counts, before, total, tiles, TILE=SIZE, **OPTIONS)
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


def total(rows: Rows, out: Entries) -> None:
    """Write the sum in the contract's order; an absent element adds nothing, a NaN is fp32's one.

    Args:
        rows: of each rank.
        out: becomes the sum; its values are float32, with room for all ranks' entries together, or
            for all places. On the device of `rows`; overlaps none of them.

    Raises:
        ConfigurationError: `out` is not as said.
    """
    room = min(rows.values.numel(), rows.size)
    out.check("out", room, rows.bits.device, (torch.float32,))
    pointers, numbers, constants = _sums(rows)
    if rows.size == 0:
        out.count.zero_()
        return
    (ranks, count), tiles = rows.bits.shape, rows.before.shape[1]
    counts, starts = (
        torch.empty(tiles, dtype=torch.int64, device=rows.bits.device) for _ in range(2)
    )
    with torch.accelerator.device_index(rows.bits.device.index):
        _count_tiles[tiles,](rows.bits, counts, count, tiles, RANKS=ranks, num_warps=1, **OPTIONS)
        _add_up[1,](counts, starts, out.count, tiles, TILE=SIZE, **OPTIONS)
        _total[tiles,](
            *(*pointers, starts, out.places, words(out.values), *numbers),
            **{"FORMAT": tuple(FORMATS[torch.float32]), **constants},
        )


def add_at(
    left: torch.Tensor, entries: Entries, limits: torch.Tensor, but: Rows | None = None
) -> None:
    """Add values to a residual: left[place - first] += value, of places in [first, last).

    All tensors are contiguous, on one device, and overlap no other.

    Args:
        left: float32, with room for last - first.
        entries: places ascend strictly.
        limits: int64, ``(2,)``: first and last, which is at most the size of `but`.
        but: entries of one rank: nothing is added at its places. So what a host has sent, and the
            owner did not take, returns to where it came from.

    Raises:
        ConfigurationError: a tensor is not as said, or `but` is not of one rank.
    """
    device = left.device
    check("left", left, (torch.float32,), 0, device)
    entries.check("entries", 0, device)
    check("limits", limits, (torch.int64,), 2, device)
    if but is not None:
        check("but.bits", but.bits, (torch.int32,), 0, device)
        if len(but.bits) != 1:
            raise ConfigurationError(f"but must be of one rank, not {len(but.bits)}")
    bits = limits if but is None else but.bits
    capacity = entries.places.numel()
    if capacity:
        with torch.accelerator.device_index(left.device.index):
            _add_at[triton.cdiv(capacity, EACH),](
                *(left, entries.places, words(entries.values), entries.count, limits, bits),
                **{"SIZE": EACH, "VALUE": name_of(entries.values.dtype)},
                **{"DROPPED": but is not None, **OPTIONS},
            )


def select_sums(
    sums: Entries,
    edges: torch.Tensor,
    wanted: torch.Tensor,
    kept: Entries,
    lost: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    """Select again of an owner's sums, of each segment of them the first so many.

    All tensors are contiguous, on one device, and overlap no other.

    Args:
        sums: float32, as `total` makes them.
        edges: int64, ``(n + 1,)``: the numbers of the sums with which segments begin, and of the
            one behind the last.
        wanted: int64, ``(n,)``: how many of each are selected, at most as many as it has.
        kept: become those selected; with room for as many as `sums` have room for.
        lost: float32, with room for as many: what rounding the values of `kept` has dropped.
        bad: int32, ``(1,)``: bit 0 is set if a sum is not finite, of a segment of which some are
            wanted; nothing is cleared.

    Raises:
        ConfigurationError: a tensor is not as said.
    """
    device, capacity, n = sums.places.device, sums.places.numel(), wanted.numel()
    sums.check("sums", 0, device, (torch.float32,))
    check("edges", edges, (torch.int64,), n + 1, device)
    check("wanted", wanted, (torch.int64,), n, device)
    kept.check("kept", capacity, device)
    check("lost", lost, (torch.float32,), capacity, device)
    check("bad", bad, (torch.int32,), 1, device)
    through = wanted.cumsum(0)
    kept.count.copy_(through[-1:].sum())  # of no segments, too
    if n:
        with torch.accelerator.device_index(device.index):
            _select_again[n,](
                *(sums.places, sums.values, edges, wanted, through - wanted),
                *(kept.places, words(kept.values), lost, bad),
                **{"SIZE": SIZE, "VALUE": name_of(kept.values.dtype), "num_warps": 8},
                **{"FORMAT": tuple(FORMATS[kept.values.dtype]), **OPTIONS},
            )
