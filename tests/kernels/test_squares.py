"""Sums of squares: each instruction set, with rows cut anywhere, has the oracle's bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pycollective import ConfigurationError, _core, order, reference
from tests.inputs import FLOATS, awkward, dtype_of, same_bits

LEVELS = _core.simd_levels()
SHAPES = [
    *((), (0,), (3, 0), (0, 3), (1,), (7,), (8,), (9,), (300,), (1, 1, 1), (5, 1)),
    *((3, 7), (4, 8), (5, 9), (2, 15), (2, 16), (3, 33), (255, 2), (256, 3), (257, 4), (1025, 2)),
]


def wide(dtype, shape, seed=0):
    """Numbers of many sizes, so that every order of adding their squares shows."""
    random = np.random.default_rng([seed, *shape])
    exponents = random.uniform(-3, 2, shape)
    return np.asarray(random.standard_normal(shape) * 10**exponents, dtype_of(dtype))


def squares(array, rows=None, simd=""):
    """Its nodes' sums: one, of the whole, if it is not cut; none of no rows."""
    if rows is None:
        rows = [each for each in (array.shape or [1])[:1] if each]
    sums = np.full(len(rows), 7.0)
    _core.sum_squares([array], [rows], sums, simd=simd)
    return sums


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_the_oracles(dtype):
    for simd in LEVELS:
        for shape in SHAPES:
            array = wide(dtype, shape)
            assert squares(array, simd=simd).sum() == reference.squares(array), (simd, shape)


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_bits_at_any_address(dtype):
    """Infinities, subnormals; and NaNs, which stay NaN."""
    for count in (7, 8, 61, 1000):
        for leaf in awkward(dtype, 12, count):
            wanted = reference.squares(leaf[1:].reshape(1, -1))
            for simd in LEVELS:
                [found] = squares(leaf[1:].reshape(1, -1), simd=simd)
                assert found == wanted or (np.isnan(found) and np.isnan(wanted))


def test_other_orders_have_other_bits():
    """Rows one after another, lanes one after another, and 16 lanes."""
    array = wide("float32", (300, 100))
    square = array.astype(np.float64) ** 2
    root = reference.squares(array)
    assert squares(array)[0] == root
    rows = [reference.squares(each.reshape(1, -1)) for each in array]
    assert root == reference.tree(rows, np.add)
    assert root != sum(rows)
    assert root != reference.tree(list(reversed(rows)), np.add)
    assert root != reference.tree([sum(each) for each in square], np.add)
    in_lanes = np.zeros((300, 16))
    for at in range(100):
        in_lanes[:, at % 16] += square[:, at]
    assert root != reference.tree(reference.tree(in_lanes.T, np.add), np.add)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 50, 700])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_cut_anywhere_gives_the_same_root(rows, length):
    array = wide("bfloat16", (rows, length))
    random = np.random.default_rng(rows)
    for _ in range(4):
        ranks = int(random.integers(1, 6))
        cuts = [0, *sorted(random.integers(0, rows, ranks - 1, endpoint=True).tolist()), rows]
        nodes, sums = [], []
        for lo, hi in pairwise(cuts):
            mine = [end - begin for begin, end in order.cover(lo, hi, rows)]
            nodes += mine
            sums += squares(array[lo:hi], mine).tolist()
        assert order.join(sums, nodes) == reference.squares(array)


def test_several_arrays():
    arrays = [wide("float32", (5, 3)), wide("float64", (4,))]
    sums = np.full(3, 7.0)
    _core.sum_squares(arrays, [[4, 1], [4]], sums)
    wanted = [reference.squares(each) for each in (arrays[0][:4], arrays[0][4:], arrays[1])]
    assert same_bits(sums, np.array(wanted))
    of_each = [order.join(sums[:2], [4, 1]), order.join(sums[2:], [4])]
    assert np.sqrt(order.join(of_each, [1, 1])) == reference.norm(arrays)
    assert order.join([], []) == 0.0


def test_what_does_not_fit_is_refused():
    array, sums = np.ones((4, 2), np.float32), np.zeros(1)

    def refused(match, call, *arguments):
        with pytest.raises(ConfigurationError, match=match):
            call(*arguments)

    refused("all its rows", _core.sum_squares, [array], [[3]], sums)
    refused("have its rows", _core.sum_squares, [array], [[5]], sums)
    refused("have its rows", _core.sum_squares, [array], [[0]], sums)
    refused("2 sums", _core.sum_squares, [array], [[2, 2]], sums)
    refused("rows for each array", _core.sum_squares, [array], [], sums)
    refused("a float type, not int32", _core.sum_squares, [array.astype("i4")], [[4]], sums)
    refused("contiguous", _core.sum_squares, [array[:, :1]], [[4]], sums)
