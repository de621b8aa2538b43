"""Adds a leaf to the finished nodes that it completes, on a GPU: a whole bucket in one launch.

A leaf's gradients lie strewn in memory. Nodes are flat rows of fp32, in which each gradient of a
bucket has its place. What a program does with its elements of one gradient:

1. It loads those of all terms, and the gradient's.
2. It adds the terms to the gradient, which it has widened, one after the other.
3. It stores the sums.

So each element is read once from each row and written once, and a term's row may be written.

A full program has `SIZE` elements. A thread takes four side by side at a time, which are 16 bytes
of a row and, of a narrow gradient, 8 or 4. Eight elements, 16 bytes of a bfloat16, would leave gaps
between what the threads of a warp load and store of the rows, and these are most of the traffic.

A thread asks for all that it needs of some elements before it waits for any. With a gradient of
fp32 that is 64 to 128 bytes, and 1,024 threads or more run on a multiprocessor, for they need 64
registers at most. With more than 7 terms it is 144 to 256 bytes, of 512 threads. So 64 KiB are on
their way to each multiprocessor. An H200 moves 4.8 TB/s and answers within a microsecond, which is
36 KiB for each of 132; the rest makes up for programs that wait for the tables. Of narrow gradients
without terms less is on its way, and most of the traffic is what is written.

Elements that do not fill a program have programs of their own, of `TAIL` elements at most, with a
mask and one element a thread at a time. A mask in every program would make loads of 16 bytes depend
on the number of elements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pycollective.errors import ConfigurationError
from pycollective.triton.floats import widened
from pycollective.triton.formats import check, name_of
from pycollective.triton.launching import Launcher
from pycollective.triton.tables import Tables, pointer

THREADS = tl.constexpr(128)  # of a program
SIZE = tl.constexpr(2048)  # elements of a full program
TAIL = tl.constexpr(512)  # at most, of a program with a mask
# The compiler fuses a product, which widening may need, and a sum unless it is told not to.
OPTIONS = {"num_warps": THREADS.value // 32, "enable_fp_fusion": False}
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
MOST_TERMS = 15
_VECTOR = tl.constexpr(4)  # elements of a row that a thread loads at once
_ALIGNED = 16  # bytes, to which a row's vectors are
_WORDS = tl.constexpr(32)  # that a thread asks for before it waits, unless it has many rows
# In tables each dtype is a bit: of numbers LLVM would make an indirect branch. No bit: no gradient.
_KINDS = {dtype: 1 << place for place, dtype in enumerate(DTYPES)}
# Columns of `parts`.
_BEGIN, _COUNT, _FIRST = (tl.constexpr(column) for column in range(3))
_COLUMNS = tl.constexpr(3)


@triton.jit
def _loaded(row, at, count, STEPS: tl.constexpr, MASKED: tl.constexpr):
    """The words of each step: those at `at`, as many behind these, and so on."""
    words = ()
    for step in tl.static_range(STEPS):
        here = at + step * at.shape[0]
        words = words + (tl.load(row + here, mask=here < count if MASKED else None),)
    return words


@triton.jit
def _widened(
    gradient,
    at,
    count,
    STEPS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """As fp32, the elements of each step from this address on."""
    NARROW: tl.constexpr = tl.int16 if TYPE == "bfloat16" or TYPE == "float16" else tl.int8
    WORD: tl.constexpr = tl.int32 if TYPE == "float32" else NARROW
    row = gradient.to(tl.pointer_type(WORD))
    words = _loaded(tl.multiple_of(row, 16) if ALIGNED else row, at, count, STEPS, MASKED)
    values = ()
    for step in tl.static_range(STEPS):
        values = values + (widened(words[step], TYPE),)
    return values


@triton.jit
def _in_order(value, terms, step: tl.constexpr, STEPS: tl.constexpr):
    """The terms of one step are added to the value, the first one first."""
    for i in tl.static_range(step, len(terms), STEPS):
        value += terms[i]
    return value


@triton.jit
def _sums(
    nodes,
    out,
    gradient,
    kind,
    begin,
    first,
    count,
    ELEMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    KINDS: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store sums of `ELEMENTS` elements of a gradient, from number `first` on, in steps of `WIDTH`;
    if masked, of those before number `count`."""
    TERMS: tl.constexpr = len(nodes)
    ROWS: tl.constexpr = triton.next_power_of_2(TERMS + 1)
    STEPS: tl.constexpr = min(max(_WORDS * THREADS // (ROWS * WIDTH), 1), ELEMENTS // WIDTH)
    for _ in range(ELEMENTS // (STEPS * WIDTH)):
        at = first + tl.arange(0, WIDTH)
        # The gradient is last: where its kind is looked at, all terms have been asked for.
        terms = ()
        for term in tl.static_range(TERMS):
            terms = terms + _loaded(nodes[term] + begin, at, count, STEPS, MASKED)
        values = ()
        for _ in tl.static_range(STEPS):
            values = values + (tl.zeros((WIDTH,), tl.float32),)
        for i in tl.static_range(len(KINDS)):
            if kind & KINDS[i] != 0:
                values = _widened(gradient, at, count, STEPS, TYPES[i], ALIGNED, MASKED)
        for step in tl.static_range(STEPS):
            total = _in_order(values[step], terms, step, STEPS)
            here = at + step * WIDTH
            tl.store(out + begin + here, total, mask=here < count if MASKED else None)
        first += STEPS * WIDTH


@triton.jit
def add_leaf(
    rows,
    parts,
    part_of,
    TERMS: tl.constexpr,
    KINDS: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add a leaf to `TERMS` rows; see `accumulate`.

    `rows` are int64: the addresses of the result and of the terms, then each gradient's address and
    the bit of its dtype. `KINDS` are those in use, of the dtypes `TYPES`. `parts` and `part_of` are
    those of `Places`.
    """
    VECTOR: tl.constexpr = _VECTOR if ALIGNED else 1
    program = tl.program_id(0)
    # All that a program needs to know it asks for at once, but what depends on the gradient.
    number = tl.load(part_of + program).to(tl.int64)
    out = pointer(rows, 0, tl.float32, ALIGNED)
    nodes = ()
    for term in tl.static_range(TERMS):
        nodes = nodes + (pointer(rows, 1 + term, tl.float32, ALIGNED),)
    part = parts + number * _COLUMNS
    begin = tl.multiple_of(tl.load(part + _BEGIN), VECTOR)
    count = tl.load(part + _COUNT)
    program -= tl.load(part + _FIRST)
    gradient = tl.load(rows + 1 + TERMS + 2 * number)
    kind = tl.load(rows + 2 + TERMS + 2 * number)
    full = count // SIZE
    if program < full:
        _sums(
            *(nodes, out, gradient, kind, begin, program * SIZE, count),
            *(SIZE, THREADS * VECTOR, KINDS, TYPES, ALIGNED, False),
        )
    else:
        first = full * SIZE + (program - full) * TAIL
        _sums(
            *(nodes, out, gradient, kind, begin, first, count),
            *(TAIL, THREADS, KINDS, TYPES, ALIGNED, True),
        )


class Places:
    """Where a bucket's gradients lie in its flat rows. They are uploaded once.

    It also keeps the addresses that launches were given: allocators give the same ones again. So it
    is one stream's, and for one thread at a time.

    Args:
        begins: the first element of each gradient in a row. Loads are the widest where all are
            multiples of 4.
        counts: elements of each; gradients may have none.
        device: that of rows and gradients.

    Attributes:
        parts: int64, ``(gradients, 3)``: where it begins, its elements, its first program.
        part_of: int32, ``(programs,)``: the gradient of each of a launch's programs.
        counts: as given.
        size: elements of a row up to the last gradient's end.
        aligned: whether all begins are multiples of 4.
        tables: the kept addresses.

    Raises:
        ConfigurationError: a negative number, not as many begins as counts, or gradients overlap.
    """

    def __init__(self, begins: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        if len(begins) != len(counts):
            raise ConfigurationError(f"{len(begins)} begins of {len(counts)} gradients")
        begin, count = np.array(begins, np.int64), np.array(counts, np.int64)
        if (begin < 0).any() or (count < 0).any():
            raise ConfigurationError("gradients begin at 0 or later, and have 0 elements or more")
        order = np.flatnonzero(count)
        order = order[np.argsort(begin[order])]
        ends = begin[order] + count[order]
        if (ends[:-1] > begin[order][1:]).any():
            raise ConfigurationError("gradients overlap in the rows")
        full, left = np.divmod(count, SIZE.value)
        programs = full - (-left // TAIL.value)
        parts = np.column_stack([begin, count, np.cumsum(programs) - programs])
        self.counts = tuple(count.tolist())
        self.size = int(ends[-1]) if len(ends) else 0
        self.aligned = not (begin[order] % _VECTOR.value).any()
        self.tables = Tables(device)
        self.parts = self.tables.numbers(parts)
        part_of = np.repeat(np.arange(len(parts), dtype=np.int32), programs)
        self.part_of = self.tables.numbers(part_of)


def accumulate(
    places: Places,
    gradients: Sequence[torch.Tensor | None],
    terms: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Add terms to a bucket's gradients, on their device's current stream.

    Each element of a gradient is widened to fp32, which is exact. The terms' elements at its place
    are added, one after the other, each sum rounded to fp32. What lies between gradients in the
    rows is neither read nor written.

    The kernel finds all of this memory by addresses that it loads. So whoever frees any of it does
    that in the order of the same stream, as torch does with memory of this stream.

    Args:
        places: of the gradients.
        gradients: as many as there are places, each contiguous, of float32, bfloat16, float16,
            float8_e4m3fn or float8_e5m2. None is +0 everywhere.
        terms: up to 15 flat, contiguous rows of fp32.
        out: the row that is written, as these. It is one of the terms, or overlaps none, and it
            overlaps no gradient.

    Raises:
        ConfigurationError: a tensor, or their number, is not as said. Nothing is launched.
    """
    device = places.parts.device
    if len(terms) > MOST_TERMS:
        raise ConfigurationError(f"a leaf is added to {MOST_TERMS} rows at most, not {len(terms)}")
    if len(gradients) != len(places.counts):
        raise ConfigurationError(f"{len(gradients)} gradients for {len(places.counts)} places")
    numbers: list[int] = []
    every = 0  # the bits of all addresses
    for name, row in (("out", out), *(("a term", term) for term in terms)):
        check(name, row, (torch.float32,), places.size, device)
        address = row.data_ptr()
        every |= address
        numbers.append(address)
    kinds = set()
    for i, (gradient, count) in enumerate(zip(gradients, places.counts, strict=True)):
        if gradient is None:
            numbers += 0, 0
            continue
        kind = _KINDS.get(gradient.dtype)
        good = gradient.numel() == count and gradient.device == device
        if kind is None or not good or not gradient.is_contiguous():
            check(f"gradient {i}", gradient, DTYPES, count, device)
            raise ConfigurationError(
                f"gradient {i} must have {count} elements, not {gradient.numel()}"
            )
        address = gradient.data_ptr()
        every |= address
        numbers += address, kind
        kinds.add(kind)
    programs = places.part_of.numel()
    if programs:
        aligned = places.aligned and every % _ALIGNED == 0
        launch = _launcher(len(terms), tuple(sorted(kinds)), aligned)
        rows = places.tables.numbers(np.array(numbers, np.int64))
        launch(programs, rows, places.parts, places.part_of)


def constants(terms: int, kinds: tuple[int, ...], aligned: bool) -> dict[str, Any]:
    """Return the constexprs of `add_leaf`; `kinds` are the bits of the gradients' dtypes."""
    return {
        "TERMS": terms,
        "KINDS": kinds,
        "TYPES": tuple(name_of(dtype) for dtype, kind in _KINDS.items() if kind in kinds),
        "ALIGNED": aligned,
    }


@functools.cache
def _launcher(terms: int, kinds: tuple[int, ...], aligned: bool) -> Launcher:
    return Launcher(add_leaf, {**constants(terms, kinds, aligned), **OPTIONS})
