"""An accumulator's rows are the nodes of the contract's order, whatever is added when."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import Accumulator, ConfigurationError, _core, leaves_of, reference
from pycollective.order import held
from tests.float_environment import flushing, needs_flushing
from tests.inputs import FLOATS, awkward, order_sensitive, same_bits, subnormal

DTYPES = [name for name in FLOATS if name != "float64"]


SHAPES = [(), (0,), (1,), (5,), (31,), (32,), (3, 7), (2, 3, 11), (257,)]


def same_numbers(row, want):
    """Bit for bit; but a NaN of a row is any, and the oracle's is the type's one."""
    return same_bits(np.where(np.isnan(row), np.float32(np.nan), row), want)


@settings(deadline=None, max_examples=300)
@given(
    leaves=st.integers(1, 9) | st.sampled_from([12, 16, 17, 24, 31, 64]),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    inputs=st.sampled_from([order_sensitive, order_sensitive, awkward]),
    share=st.sampled_from([1.0, 1.0, 0.5]),
    unused=st.sampled_from([0.0, 0.2]),
    donated=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_rows_are_the_oracles_nodes(leaves, shapes, kinds, inputs, share, unused, donated, seed):
    """Leaves of several types, in any order, of which this rank has some, and arrays unused."""
    choose = random.Random(seed)
    mine = choose.sample(range(leaves), max(1, round(share * leaves)))
    gradients = {leaf: [] for leaf in mine}
    columns = []  # for each shape its array in each leaf
    for number, shape in enumerate(shapes):
        arrays = inputs(choose.choice(kinds), leaves, prod(shape), seed + number)
        for leaf in mine:
            part = arrays[leaf].reshape(shape)
            if choose.random() < unused:
                arrays[leaf] = np.zeros(part.size, np.float32)
                part = None
            elif choose.random() < 0.5:
                part = part.copy(order="F")
            gradients[leaf].append(part)
        columns.append(arrays)
    accumulator = Accumulator(shapes, leaves=leaves)
    for leaf in mine:
        accumulator.add(leaf, gradients[leaf], donate=choose.random() < donated)
    assert accumulator.nodes == tuple(held(mine, leaves))
    for (lo, hi), row in zip(accumulator.nodes, accumulator._rows(), strict=True):
        want = [reference.reduce(arrays[lo:hi], dtype=np.float32) for arrays in columns]
        assert same_numbers(row, np.concatenate(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_streams_and_stores_the_same_bits(dtype):
    """A row of 4 MiB and more is written past the caches, from whatever alignment."""
    shapes = [(3,), ((1 << 20) - 1,), (38,)]
    size = sum(map(prod, shapes))
    [leaf] = order_sensitive(dtype, 1, size)
    parts = np.split(leaf, [3, size - 38])
    nodes = [each.astype(np.float32) for each in order_sensitive("float16", 2, size)]
    for rows in ([], nodes):
        want = leaf.astype(np.float32)
        for row in rows:
            want += row
        for level in _core.simd_levels():
            out = np.ones(size + 1, np.float32)
            _core.accumulate(parts, shapes, rows, out[:-1], level)
            assert same_bits(out[:-1], want)
            assert out[-1] == 1
    for level in _core.simd_levels():
        in_place = [*nodes[:-1], nodes[-1].copy()]
        _core.accumulate(parts, shapes, in_place, in_place[-1], level)
        assert same_bits(in_place[-1], want)


@needs_flushing
def test_a_host_that_flushes_subnormals_changes_nothing():
    leaves = subnormal("float32", 4, 100)
    accumulator = Accumulator(100, leaves=4)
    with flushing():
        for leaf, gradient in enumerate(leaves):
            accumulator.add(leaf, gradient)
    assert same_bits(accumulator._rows()[0], reference.reduce(leaves))


def test_zeros_keep_their_signs():
    """A start from +0 would lose the sign; and a parameter that is not used is +0."""
    minus = np.full(2, -0.0, np.float32)
    for unused, want in [((), minus), ((0,), -minus), ((2,), -minus)]:
        accumulator = Accumulator(2, leaves=3)
        for leaf in range(3):
            accumulator.add(leaf, None if leaf in unused else minus)
        assert same_bits(accumulator._rows()[0], want)


def rows_needed(leaves, order):
    accumulator = Accumulator(1, leaves=leaves)
    one = np.ones(1, np.float32)
    for leaf in order:
        accumulator.add(leaf, one)
    return accumulator.nbytes // 128  # of a row: its room is a multiple of 32 elements


def test_a_run_in_sequence_needs_as_many_rows_as_its_logarithm():
    for k in range(7):
        for begin in (0, 1 << k, 6 << k):
            run = range(begin, begin + (1 << k))
            assert rows_needed(1 << 10, run) <= k + 1
    for leaves in (1, 12, 24, 37, 64):
        for size in range(1, 9):
            for rank in range(size):
                run = leaves_of(rank, size, leaves)
                assert rows_needed(leaves, run) <= 2 * len(run).bit_length()
    assert rows_needed(64, range(0, 64, 2)) == 32  # nothing merges: a row a leaf


def test_memory_is_used_again_after_a_reset():
    accumulator = Accumulator(1000, leaves=8)
    leaves = order_sensitive("float32", 8, 1000)
    for step in range(3):
        for leaf in (5, 0, 1, 3, 2, 7, 6, 4):
            accumulator.add(leaf, leaves[leaf])
        assert same_bits(accumulator._rows()[0], reference.reduce(leaves))
        if step == 0:
            needed = accumulator.nbytes
        assert accumulator.nbytes == needed
        accumulator.reset()
        assert accumulator.nodes == ()


def test_adding_one_after_another_gives_other_bits():
    """What `.grad +=` does with micro-batches."""
    leaves = order_sensitive("float32", 12, 10_000)
    accumulator, added = Accumulator(10_000, leaves=12), np.zeros(10_000, np.float32)
    for leaf, gradient in enumerate(leaves):
        accumulator.add(leaf, gradient)
        added += gradient
    assert same_bits(accumulator._rows()[0], reference.reduce(leaves))
    assert np.mean(accumulator._rows()[0] != added) > 0.5


def test_what_is_not_donated_is_not_kept():
    accumulator = Accumulator(5, leaves=3)
    gradient = np.ones(5, np.float32)
    for leaf in range(3):
        gradient[:] = leaf
        accumulator.add(leaf, gradient)
    assert accumulator._rows()[0].tolist() == [3] * 5


def test_what_is_donated_is_kept_and_not_written():
    leaves = order_sensitive("float32", 5, 300)
    originals = [leaf.copy() for leaf in leaves]
    accumulator = Accumulator(300, leaves=5)
    accumulator.add(2, leaves[2], donate=True)
    assert accumulator.nbytes == leaves[2].nbytes  # no row yet
    for leaf in (4, 0):
        accumulator.add(leaf, leaves[leaf], donate=True)
    for row in accumulator._spend():
        row[:] = 0
    assert all(same_bits(a, b) for a, b in zip(leaves, originals, strict=True))
    accumulator.reset()
    for leaf in (2, 4, 0, 1, 3):  # the right edge waits for all the others
        accumulator.add(leaf, leaves[leaf], donate=True)
    assert same_bits(accumulator._rows()[0], reference.reduce(leaves))
    assert all(same_bits(a, b) for a, b in zip(leaves, originals, strict=True))


def test_nothing_is_changed_by_what_is_refused():
    accumulator = Accumulator([(2, 3), (4,)], leaves=4)
    good = [np.ones((2, 3), np.float32), np.ones(4, np.float16)]
    accumulator.add(0, good)
    for leaf, gradient, message in [
        (4, good, "leaf must be 0 to 3, not 4"),
        (-1, good, "leaf must be 0 to 3, not -1"),
        (0, good, "leaf 0 was added before; add each leaf once"),
        (1, good[:1], "a leaf must have 2 arrays here, not 1"),
        (1, good[0], "a leaf is a list of 2 arrays here, not ndarray"),
        (
            1,
            [good[0].T, good[1]],
            r"array 0 of the gradient must have shape \(2, 3\), not \(3, 2\)",
        ),
        (1, [good[0], good[1][:3]], r"array 1 of the gradient must have shape \(4,\), not \(3,\)"),
        (1, [good[0], np.ones(4)], "array 1 of the gradient must be of a float type up to float32"),
        (1, [good[0].astype(np.int32), good[1]], "array 0 of the gradient must be of a float type"),
        (1, [good[0], "x"], "array 1 of the gradient"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            accumulator.add(leaf, gradient)
        assert accumulator.nodes == ((0, 1),)
        assert accumulator.nbytes == 128
    accumulator.add(1, good)
    assert [row.tolist() for row in accumulator._rows()] == [[2.0] * 10]


def test_leaves_that_were_given_to_a_reduction_are_spent():
    accumulator = Accumulator(3, leaves=2)
    accumulator.add(0, np.ones(3, np.float32))
    [row] = accumulator._spend()
    assert row.tolist() == [1, 1, 1]
    for refused in (accumulator._spend, lambda: accumulator.add(1, row)):
        with pytest.raises(ConfigurationError, match=r"given to a reduction; reset\(\) begins"):
            refused()
    accumulator._take_back()
    assert accumulator._spend()[0] is row
    accumulator.reset()
    accumulator.add(0, np.full(3, 2, np.float32))
    assert accumulator._rows()[0].tolist() == [2, 2, 2]


def test_shapes_that_are_none_are_refused():
    for shape in ((2, -1), [(2,), (-3,)], -4):
        with pytest.raises(ConfigurationError, match="no array has the shape"):
            Accumulator(shape, leaves=2)
    with pytest.raises(ConfigurationError, match="a scalar is"):
        Accumulator([], leaves=2)
    assert Accumulator((), leaves=2).size == 1
    with pytest.raises(ConfigurationError, match="leaves must be 1 to"):
        Accumulator(2, leaves=0)


def test_gradients_of_torch():
    torch = pytest.importorskip("torch")
    leaves = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    types = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    accumulator = Accumulator((4, 6), leaves=3)
    for leaf, dtype in enumerate(types):
        leaves[leaf] = leaves[leaf].to(dtype)
        accumulator.add(leaf, leaves[leaf])
    first, second, third = (each.float() for each in leaves)
    assert accumulator._rows()[0].tolist() == ((first + second) + third).flatten().tolist()
