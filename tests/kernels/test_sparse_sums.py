"""Sums of sparse vectors in the contract's order, and what becomes of them, at each SIMD level."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _core, reference, segments
from tests.inputs import dtype_of, same_bits
from tests.kernels.segments import found_for, table_of
from tests.kernels.test_sparse import LEVELS, TYPES, make


def sparse_vectors(ranks, size, density, dtype, seed=0):
    random = np.random.default_rng([seed, ranks, size])
    vectors = []
    for rank in range(ranks):
        many = 0 if rank % 5 == 4 else int(random.binomial(size, density))
        at = np.sort(random.choice(size, many, replace=False)).astype(np.uint32)
        values = random.standard_normal(many) * 10.0 ** random.integers(-4, 4, many)
        vectors.append((at, values.astype(np.float32).astype(dtype_of(dtype))))
    return vectors


def tree_of_present(vectors):
    """T over the leaves, place by place: a node of which one child is absent is the other one."""

    def combine(a, b):
        joined = dict(a)
        for place, value in b.items():
            joined[place] = joined[place] + value if place in joined else value
        return joined

    leaves = [
        dict(zip(at.tolist(), values.astype(np.float32), strict=True)) for at, values in vectors
    ]
    root = reference.tree(leaves, combine)
    places = sorted(root)
    return np.array(places, np.uint32), np.array([root[p] for p in places], np.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 8, 13])
def test_sums(dtype, ranks):
    for size, density in [(1, 1.0), (100, 0.5), (3000, 0.2), (3000, 1.0), (100_000, 0.001)]:
        vectors = sparse_vectors(ranks, size, density, dtype)
        at, values = tree_of_present(vectors)
        room = sum(len(each) for each, _ in vectors)
        for simd in LEVELS:
            places, sums = np.zeros(room, np.uint32), np.zeros(room, np.float32)
            many = _core.sparse_sum(*map(list, zip(*vectors, strict=True)), places, sums, simd)
            assert same_bits(places[:many], at)
            assert same_bits(sums[:many], values)


def test_sums_see_the_order():
    """Leaves for which a chain, or another tree, has other bits; whole, they are the contract's."""
    dense = [make("lognormal", "float32", 500, seed) for seed in range(7)]
    everywhere = np.arange(500, dtype=np.uint32)
    places, sums = np.zeros(3500, np.uint32), np.zeros(3500, np.float32)
    assert _core.sparse_sum([everywhere] * 7, dense, places, sums) == 500
    assert same_bits(sums[:500], reference.reduce(dense))
    chain = dense[0].copy()
    for leaf in dense[1:]:
        chain += leaf
    assert not same_bits(sums[:500], chain)


def test_a_sum_has_one_nan_and_keeps_minus_zero():
    nan = np.array([0xFFC12345, 0x80000000], np.uint32).view(np.float32)
    at = np.array([3, 9], np.uint32)
    for simd in LEVELS:
        for ranks in (1, 2):
            places, sums = np.zeros(2 * ranks, np.uint32), np.zeros(2 * ranks, np.float32)
            assert _core.sparse_sum([at] * ranks, [nan] * ranks, places, sums, simd) == 2
            assert sums.view(np.uint32)[:2].tolist() == [0x7FC00000, 0x80000000]


def test_what_one_alone_has_keeps_its_sign_whichever_it_is():
    """Nothing is added to it, not even a zero."""
    minus_zero, one = np.array([-0.0], np.float32), np.ones(1, np.float32)
    near, far = np.array([3], np.uint32), np.array([9], np.uint32)
    for simd in LEVELS:
        for at, values in [((near, far), (minus_zero, one)), ((far, near), (one, minus_zero))]:
            places, sums = np.zeros(2, np.uint32), np.zeros(2, np.float32)
            assert _core.sparse_sum(list(at), list(values), places, sums, simd) == 2
            assert places.tolist() == [3, 9]
            assert sums.view(np.uint32).tolist() == [0x80000000, 0x3F800000]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("divisor", [1, 3, 8, 0.75])
def test_scatter(dtype, divisor):
    """To rows that begin at odd places of the sum, and at any element in memory."""
    for size, density in [(1, 1.0), (100, 0.5), (5000, 0.01), (5000, 1.0), (1_100_000, 0.001)]:
        at, values = sparse_vectors(1, size, density, "float32")[0]
        want = np.zeros(size, np.float32)
        want[at] = values / np.float32(divisor)
        with np.errstate(over="ignore"):
            want = want.astype(dtype_of(dtype))
        cuts = [(0, size // 3), (size // 3, size // 3), (size // 3 + 1, size)]
        for simd in LEVELS:
            for offset in (0, 1, 8):
                room = np.full(size + offset + 16, 7, dtype_of(dtype))
                out, found = room[offset : offset + size], found_for(3)
                table = table_of([{"x": out[a:b], "at": a, "k": 1} for a, b in cuts])
                zero = np.zeros(3, np.uint8)
                _core.sparse_scatter(table, at, values, divisor, found, zero, simd)
                for a, b in cuts:
                    assert same_bits(out[a:b], want[a:b])
                    out[a:b] = 7
                assert (room == 7).all()  # between rows and around them
                assert found[segments.BAD] == (not np.isfinite(want.astype(np.float32)).all())
