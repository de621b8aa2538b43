"""The PTX that adds a leaf to nodes, executed: the contract's bits, and each byte moved once.

As `test_reduce_ptx`: what `tests/ptx` does not know, such as a fused or an approximate operation,
is an error.
"""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest
from triton.backends.compiler import GPUTarget

from tests.inputs import dtype_of
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module, needs
from tests.triton.test_accumulate import (
    CPU,
    DTYPES,
    numbers,
    one_behind_another,
    same_numbers,
    sums,
)

KERNELS = module("accumulate", interpreted=False)
SIZE, TAIL = KERNELS.SIZE.value, KERNELS.TAIL.value
TARGETS = ("80", "90", "100")
STORM = pytest.mark.storm
ALL = (*DTYPES, None)
FAR = 1 << 31  # elements


@functools.cache
def adder(terms, kinds, aligned=True, target="90"):
    """The kernel for gradients of these dtypes, which are bits."""
    return compiled(
        KERNELS.add_leaf,
        {"rows": "*i64", "parts": "*i64", "part_of": "*i32"},
        KERNELS.constants(terms, kinds, aligned),
        KERNELS.OPTIONS,
        target=GPUTarget("cuda", int(target), 32),
    )


class Added:
    """A launch, and what it has done: gradients of these dtypes (None: there is none) were added to
    rows, of which the last is also the result if `onto`.

    With `before`, a multiple of `SIZE`, the first gradient begins so many elements later in the
    rows, and so many of its own are left out: no memory is needed for them.
    """

    def __init__(self, kinds, counts, terms, onto, aligned=True, target="90", before=0):
        self.counts, self.begins = counts, one_behind_another(counts)
        self.memory = memory = Memory(1 << 21)
        skew = 0 if aligned else 1
        self.leaf, self.leaf_at, table = [], [], []
        for dtype, count in zip(kinds, counts, strict=True):
            if dtype is None:
                self.leaf.append(None)
                table += 0, 0
                continue
            x = numbers(dtype, count, count)
            self.leaf.append(x)
            self.leaf_at.append(memory.read_only(dtype, x, skew * x.itemsize))
            table += self.leaf_at[-1] - before * x.itemsize, *kinds_of([dtype])
        size = self.begins[-1] + counts[-1]
        self.rows = [numbers("float32", size, 100 + i) for i in range(terms)]
        self.rows_at = []
        for i, row in enumerate(self.rows):
            address = memory.allocate(f"row {i}", row.nbytes, 4 * skew, far=i << 33)
            memory.put(address, row)
            self.rows_at.append(address)
        self.out = self.rows_at[-1] if onto else memory.allocate("out", 4 * size, 12 * skew)
        # In rows `before` elements lie in front of the gradient, and then as many of its own.
        table = [each - 4 * 2 * before for each in (self.out, *self.rows_at)] + table
        places = KERNELS.Places(
            [self.begins[0] + before, *self.begins[1:]], [counts[0] + before, *counts[1:]], CPU
        )
        first = before // SIZE
        arrays = [np.array(table), places.parts.numpy(), places.part_of.numpy()[first:]]
        tables = [memory.read_only(f"table {i}", each) for i, each in enumerate(arrays)]
        given = [*tables[:2], tables[2] - 4 * first, 0, 0]
        made = adder(terms, kinds_of(kinds), aligned, target)
        blocks = range(first, first + len(arrays[2]))
        Launch(parse(made.asm["ptx"]), blocks, memory, given, made.metadata.shared).run()
        # Threads read the same words of tables, out of the cache after the first.
        self.table_loads = collections.Counter()
        for address, each in zip(tables, arrays, strict=True):
            read = int(memory.reads[memory.place(address, each.nbytes)].sum())
            self.table_loads[each.itemsize] += read // each.itemsize

    def check(self):
        """The bits; each byte of gradients and of their places has moved once, and no other."""
        memory, moved = self.memory, 0
        there = [each for each in self.leaf if each is not None]
        for address, x in zip(self.leaf_at, there, strict=True):
            assert (memory.reads[memory.place(address, x.nbytes)] == 1).all()
            moved += x.nbytes
        want = sums(self.begins, self.leaf, self.rows, self.counts)
        for begin, total in zip(self.begins, want, strict=True):
            places = [
                memory.place(each + 4 * begin, total.nbytes) for each in (self.out, *self.rows_at)
            ]
            assert same_numbers(memory.get(self.out + 4 * begin, total), total)
            assert (memory.writes[places[0]] == 1).all()
            assert all((memory.reads[each] == 1).all() for each in places[1:])
            moved += len(self.rows) * total.nbytes
        assert memory.writes.sum() == 4 * sum(self.counts)
        tables = sum(width * count for width, count in self.table_loads.items())
        assert memory.reads.sum() == moved + tables


def kinds_of(dtypes):
    return tuple(1 << place for place, dtype in enumerate(DTYPES) if dtype in dtypes)


COUNTS = (SIZE + 3, 5, SIZE + TAIL + 130, 127, 2 * SIZE, TAIL + 1)  # of gradients of `ALL`
CASES = [(2, True, True, "90"), (5, False, False, "80"), (0, False, True, "100")]
CASES_MORE = [
    (terms, onto, aligned, target)
    for terms in (0, 1, 2, 3, 5, 8, 15)
    for onto in (False, True)[: 1 + (terms > 0)]
    for aligned in (True, False)
    for target in TARGETS
]


@pytest.mark.parametrize(
    ("terms", "onto", "aligned", "target"),
    [*CASES, *(pytest.param(*each, marks=STORM) for each in CASES_MORE if each not in CASES)],
)
def test_bits_and_traffic_of_all_types(terms, onto, aligned, target):
    Added(ALL, COUNTS, terms, onto, aligned, target).check()


@pytest.mark.parametrize(
    ("dtype", "terms"),
    [
        pytest.param(dtype, terms, marks=() if terms == turn % 3 else STORM)
        for turn, dtype in enumerate(ALL)
        for terms in (0, 1, 2, 7)
    ],
)
def test_full_programs_move_vectors(dtype, terms):
    """Four elements a thread: 16 bytes of rows, and of a gradient of fp32. Others move elements."""
    more = 77
    done = Added([dtype], [2 * SIZE + more], terms, False)
    done.check()
    size = 0 if dtype is None else dtype_of(dtype).itemsize
    loads = collections.Counter({16: terms * 2 * SIZE // 4, 4: terms * more}) + done.table_loads
    if dtype is not None:
        loads += collections.Counter({4 * size: 2 * SIZE // 4})
        loads += collections.Counter({size: more})
    assert +done.memory.loads == +loads
    assert done.memory.stores == {16: 2 * SIZE // 4, 4: more}


@pytest.mark.parametrize(("dtype", "aligned"), [("bfloat16", True), ("float32", False)])
def test_offsets_have_64_bits(dtype, aligned):
    """Of the last elements of a gradient of more than 2**31, which begins behind as many in rows;
    rows lie 8 GiB apart."""
    Added([dtype], [SIZE + TAIL + 9], 2, True, aligned, before=FAR).check()


EVERY = kinds_of(DTYPES)
FITTING = [(0, (1,), True), (1, (2,), True), (7, EVERY, True), (15, EVERY, True)]
FITTING_MORE = [
    (terms, kinds, aligned)
    for terms in range(KERNELS.MOST_TERMS + 1)
    for kinds in ((1,), (2,), EVERY)
    for aligned in (True, False)
]


@pytest.mark.parametrize(
    ("terms", "kinds", "aligned", "target"),
    [
        pytest.param(*each, target, marks=() if each in FITTING and target == "90" else STORM)
        for each in FITTING_MORE
        for target in TARGETS
    ],
)
def test_nothing_spills(tmp_path, record_property, terms, kinds, aligned, target):
    """And enough threads fit on a multiprocessor, which has 65,536 registers, for 64 KiB of what
    they load before they wait."""
    registers, spilled = needs(adder(terms, kinds, aligned, target), tmp_path)
    record_property("registers", registers)
    assert spilled == 0
    assert registers <= (64 if terms <= 7 else 128)
