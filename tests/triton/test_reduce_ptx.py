"""The PTX of ordered reductions, executed: the contract's bits, and each byte moved once.

`tests/ptx` executes what Triton compiles, for Ampere, Hopper and Blackwell. It knows no fused,
flushing, approximate or atomic operation of floats, and no load past the caches' coherence.
What it does not know is an error, executed or not.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget

from pycollective import order, reference
from pycollective.testing.inputs import leaves
from tests.inputs import FLOATS, PAIRS, TRAITS, awkward, dtype_of, same_bits, subnormal
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton import compiled

TARGETS = {name: GPUTarget("cuda", int(name), 32) for name in ("80", "90", "100")}
NUMBERS = (1, 2, 3, 5, 8, 17, 64)  # of leaves
STORM = pytest.mark.storm
TAIL = 177  # elements behind full programs; the others have 128 each


def power_of_2(n):
    """The least one that is not less."""
    return 1 << (n - 1).bit_length()


class Reduction:
    """A kernel of reductions, as it is compiled, and what launches of it take."""

    def __init__(self, dtype, op, n, target="90", aligned=True, **more):
        self.aligned = aligned
        self.terms, self.out = (dtype_of(more.get(name, dtype)) for name in ("terms", "out"))
        types = {name: getattr(torch, more[name]) for name in ("terms", "out") if name in more}
        more = {**more, **types, "aligned": aligned, "target": TARGETS[target]}
        self.compiled = compiled.kernel(getattr(torch, dtype), op, n, **more)
        self.kernel = parse(self.compiled.asm["ptx"])
        # Of a thread of full programs, whose vector of 16 bytes is halved where rows are many.
        self.vector = 1 if not aligned else min(16 // self.terms.itemsize, 256 // power_of_2(n))
        self.size = self.vector * compiled.COMPILED.THREADS.value

    def run(self, rows, *, far=0, skipped=0, divisor=None):
        """What a launch does to these rows, which lie as close as they may.

        Their bases, and the result's, are one and three elements behind what is aligned, unless
        they are promised to be. `far` bytes more lie between rows, and `skipped` full programs
        have run before the first.
        """
        m, size = len(rows[0]), self.terms.itemsize
        memory = Memory(1 << 21)
        skew, step = (0, 16 // size) if self.aligned else (1, 1)
        stride = -(-m // step) * step
        if far:
            at = [memory.allocate(f"row {i}", m * size, far=i * far) for i in range(len(rows))]
            stride = (at[1] - at[0]) // size
        else:
            whole = memory.allocate("terms", (stride * (len(rows) - 1) + m) * size, skew * size)
            at = [whole + i * stride * size for i in range(len(rows))]
        for address, row in zip(at, rows, strict=True):
            memory.put(address, row)
        like = np.empty(m, self.out)
        out = memory.allocate("out", like.nbytes, 3 * skew * self.out.itemsize)
        before = skipped * self.size
        pointers = at[0] - before * size, out - before * self.out.itemsize
        blocks = range(skipped, compiled.COMPILED.programs(before + m, self.vector))
        arguments = [*pointers, before + m, stride // self.vector, 0, 0]
        if divisor is not None:
            number = memory.read_only("divisor", np.array([divisor], np.float64))
            arguments.insert(4, number)
        Launch(self.kernel, blocks, memory, arguments, self.compiled.metadata.shared).run()
        if divisor is not None:  # which all threads read
            memory.reads[memory.place(number, 8)] = 0
        # Each byte of the rows and of the result, and no other, moves once.
        places = [memory.place(each, m * size) for each in at]
        assert all((memory.reads[place] == 1).all() for place in places)
        assert memory.reads.sum() == len(rows) * m * size
        assert (memory.writes[memory.place(out, like.nbytes)] == 1).all()
        assert memory.writes.sum() == like.nbytes
        return memory.get(out, like), memory


def inputs(dtype, op, n, count):
    """Rows in which the order shows, with what is special of floats."""
    parts = [leaves(dtype, op, n, count - 2 * (count // 3), seed=n)]
    if dtype in FLOATS:
        parts += [awkward(dtype, n, count // 3, seed=n), subnormal(dtype, n, count // 3)]
    else:
        parts += [leaves(dtype, op, n, count // 3, seed=seed) for seed in (n + 1, n + 2)]
    return [np.concatenate(row) for row in zip(*parts, strict=True)]


def cases():
    """All types, operations and numbers; the usual run takes every second pair of the former, so
    that it has each type and each operation, and 64 leaves, which take seconds to compile, of one.
    """
    found = []
    for i, (dtype, op) in enumerate(PAIRS):
        numbers = NUMBERS[-1:] if (dtype, op) == ("bfloat16", "avg") else NUMBERS[:-1]
        for j, n in enumerate(NUMBERS):
            for aligned in (True, False):
                turn, is_left_out = divmod(i, 2)
                usual = (numbers[(turn + 2) % len(numbers)], turn % 2 == 0) == (n, aligned)
                target = list(TARGETS)[(i + j + aligned) % len(TARGETS)]
                marks = () if usual and not is_left_out else STORM
                found.append(pytest.param(dtype, op, n, target, aligned, marks=marks))
    return found


@pytest.mark.parametrize(("dtype", "op", "n", "target", "aligned"), cases())
def test_bits_are_the_references_and_vectors_whole(dtype, op, n, target, aligned):
    made = Reduction(dtype, op, n, target, aligned=aligned)
    rows = inputs(dtype, op, n, 2 * made.size + TAIL)
    got, memory = made.run(rows)
    assert same_bits(got, reference.reduce(rows, op))
    # Full programs move vectors, of 16 bytes unless rows are many, the others elements.
    size = made.out.itemsize
    vector = size * made.vector
    moved = collections.Counter({vector: 2 * made.size * size // vector})
    moved[size] += TAIL
    assert memory.stores == moved
    assert memory.loads == {width: n * count for width, count in moved.items()}


@pytest.mark.parametrize("count", [1, 127, 128, 129])
def test_bits_of_few_elements(count):
    rows = inputs("bfloat16", "sum", 3, count)
    got, _ = Reduction("bfloat16", "sum", 3).run(rows)
    assert same_bits(got, reference.reduce(rows, "sum"))


def usually(usual, others):
    """Pairs of the usual run, and those that `make storm` has, too."""
    stormy = [pytest.param(*each, marks=STORM) for each in others if each not in usual]
    return pytest.mark.parametrize(("dtype", "op"), [*usual, *stormy])


ROUNDED = [
    (dtype, op)
    for dtype, op in PAIRS
    if dtype in FLOATS and dtype_of(dtype).itemsize < 4 and op in ("sum", "avg", "prod")
]


@usually(
    [("bfloat16", "avg"), ("float8_e4m3fn", "sum"), ("float64", "sum"), ("float32", "min")],
    [*ROUNDED, ("float32", "avg"), ("int16", "avg"), ("int64", "prod"), ("bool", "bxor")],
)
def test_nodes_are_neither_divided_nor_rounded(dtype, op):
    """Hosts of 4, 6 and 3 ranks reduce to nodes of the order over 13, and these to the result."""
    whole, hosts = 13, (range(4), range(4, 10), range(10, 13))
    wide = f"float{8 * TRAITS[dtype].accumulator}" if dtype in FLOATS else dtype
    rows = inputs(dtype, op, whole, 2500)
    nodes, terms = [], []
    for node in [node for host in hosts for node in order.held(host, whole)]:
        own = [(i, i + 1) for i in range(*node)]
        recipe = order.recipe(node, own)
        made = Reduction(
            dtype, op, len(own), recipe=recipe, leaves=whole, out=wide, finish=False, target="80"
        )
        nodes.append(node)
        terms.append(made.run(rows[slice(*node)])[0])
    recipe = order.recipe((0, whole), nodes)
    made = Reduction(dtype, op, len(nodes), recipe=recipe, leaves=whole, terms=wide)
    assert same_bits(made.run(terms)[0], reference.reduce(rows, op))


@usually([("bfloat16", "sum"), ("float16", "avg")], ROUNDED)
def test_a_result_may_have_the_accumulators_type(dtype, op):
    made = Reduction(dtype, op, 5, out="float32", target="100")
    rows = inputs(dtype, op, 5, made.size + TAIL)
    got, memory = made.run(rows)
    assert same_bits(got, reference.reduce([row.astype(np.float32) for row in rows], op))
    assert set(memory.stores) == {16, 4}


@pytest.mark.parametrize(("dtype", "target"), [("float32", "90"), ("bfloat16", "100")])
@pytest.mark.parametrize("divisor", [24, 2**24 + 1, float("nan")])
def test_a_divisor_in_memory(dtype, target, divisor):
    made = Reduction(dtype, "avg", 3, target, divisor=True)
    rows = inputs(dtype, "avg", 3, made.size + TAIL)
    got, memory = made.run(rows, divisor=divisor)
    assert same_bits(got, reference.reduce(rows, "avg", divisor))
    assert set(memory.stores) == {16, made.out.itemsize}


@pytest.mark.parametrize(("dtype", "op"), [("float64", "sum"), ("bfloat16", "avg")])
def test_offsets_have_64_bits(dtype, op):
    """Of rows that lie 8 GiB apart, the last blocks of 2**31 elements."""
    made = Reduction(dtype, op, 5)
    rows = inputs(dtype, op, 5, made.size + TAIL)
    got, _ = made.run(rows, far=1 << 33, skipped=(1 << 31) // made.size - 2)
    assert same_bits(got, reference.reduce(rows, op))
