"""Corners of the sparse kernels that tensors of everyday sizes and values do not come to."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _core
from tests.inputs import same_bits
from tests.kernels.test_sparse import LEVELS, check_top_k, first, keys_of, make


def bits_in_last_bins(count):
    """Numbers of which many end in ones: the last bin of each of a histogram's digits."""
    random = np.random.default_rng(count)
    digits = [random.choice([0, 1, 1022, 1023], count).astype(np.uint32) for _ in range(2)]
    upper = random.integers(0x3F8, 0x3FA, count, np.uint32)
    return (upper << np.uint32(20) | digits[0] << np.uint32(10) | digits[1]).view(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "few values", "neighbours", "last bins"])
def test_top_k_of_much_of_a_long_tensor(kind):
    """More than an eighth of more than 2^19 elements: nothing is guessed, all is counted."""
    count = (1 << 19) + 77
    x = bits_in_last_bins(count) if kind == "last bins" else make(kind, "float32", count)
    for k in (count // 7, count // 2 + 1, count - 1):
        check_top_k(x, None, k)


@pytest.mark.parametrize(
    ("shift", "bits"), [(19, 12), (0, 12), (15, 16), (4, 13), (20, 11), (9, 1)]
)
def test_histograms_of_any_digit(shift, bits):
    """Wide ones are counted another way; what has another prefix is not."""
    random = np.random.default_rng(shift)
    for count in (0, 1, 3, 4, 70_003):
        left = random.integers(0, 1 << 32, count, np.uint32)
        left[: count // 2] &= np.uint32((1 << min(shift + bits, 31)) - 1 | 1 << 31)
        left[-3:] = left[:1]
        for prefix in (0, 1, int(left[-1] & 0x7FFFFFFF) >> (shift + bits) if count else 2):
            keys = (left & np.uint32(0x7FFFFFFF)).astype(np.int64)
            within = keys[keys >> (shift + bits) == prefix] >> shift & (1 << bits) - 1
            want = 5 + np.bincount(within, minlength=1 << bits).astype(np.int64)
            for simd in LEVELS:
                bins = np.full(1 << bits, 5, np.int64)
                _core.sparse_histogram(left.view(np.float32), shift, bits, prefix, bins, simd)
                assert same_bits(bins, want), simd


def test_nothing_is_above_the_largest_key():
    """That of a NaN whose bits are all set."""
    left = make("gaussian", "float32", 1003)
    left.view(np.uint32)[[5, 64, 700, 1002]] = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
    for simd in LEVELS:
        for ties in range(6):
            indices = np.zeros(1003, np.uint32)
            many = _core.sparse_select(left, 0x7FFFFFFF, ties, indices, simd)
            assert indices[:many].tolist() == [5, 64, 700, 1002][:ties]


def test_every_tie_in_turn():
    """Of equal magnitudes the first, in whichever lane, up to each of them."""
    left = np.where(np.arange(133) % 3 == 0, -2.0, 1.0).astype(np.float32)
    key = int(keys_of(left).max())
    for simd in LEVELS:
        for ties in range(46):
            indices = np.zeros(45, np.uint32)
            many = _core.sparse_select(left, key, ties, indices, simd)
            assert indices[:many].tolist() == list(range(0, 133, 3))[:ties]


def test_more_ties_than_there_are():
    """Of key 0, as zeros behind the last element would have: all there is, and no more."""
    for count in range(1, 40):
        left = (np.arange(count) % 3).astype(np.float32)
        for simd in LEVELS:
            indices = np.zeros(count + 32, np.uint32)
            many = _core.sparse_select(left, 0, 1 << 40, indices, simd)
            assert indices[:many].tolist() == list(range(count))


def at_byte(offset, array):
    """A copy that begins so far behind a line: no number lies as its type would have it."""
    room = np.zeros(array.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + 64 + offset
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy, room, slice(start, start + array.nbytes)


@pytest.mark.parametrize("offset", [1, 2, 63])
@pytest.mark.parametrize("count", [37, 1_050_007])
def test_arrays_begin_at_any_byte(count, offset):
    x, held = make("gaussian", "float32", count), make("gaussian", "float32", count, seed=1)
    k = max(1, count // 100)
    want = first(x + held, k)
    for simd in LEVELS:
        left, room, inner = at_byte(offset, np.zeros(count, np.float32))
        indices = at_byte(offset, np.zeros(k, np.uint32))[0]
        sources = at_byte(offset, x)[0], at_byte(offset, held)[0]
        assert _core.top_k(*sources, left, k, indices, simd) == k
        assert same_bits(left, x + held)
        assert same_bits(indices, want)
        chunks = at_byte(offset, np.zeros(-(-count // 64), np.uint32))[0]
        assert _core.top_k_chunks(*sources, left, 1, 64, chunks, simd) == len(chunks)
        assert _core.sparse_add(*sources, left, simd)
        assert same_bits(left, x + held)
        room[inner] = 0
        assert not room.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_that_is_not_finite_in_a_long_tensor(value):
    """At both ends of what is stored past the caches, on and off a line's beginning."""
    count = 1_050_007
    x = make("gaussian", "float32", count)
    for offset in (0, 4, 36):
        left = at_byte(offset, x)[0]
        for at in (0, 6, 7, 14, 15, 16, 63, 64, count // 2, count - 8, count - 2, count - 1):
            x[at], before = value, x[at]
            for simd in LEVELS:
                assert _core.sparse_add(x, None, left, simd) is False
            x[at] = before
        for simd in LEVELS:
            assert _core.sparse_add(x, None, left, simd) is True
