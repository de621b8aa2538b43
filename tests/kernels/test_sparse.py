"""Top-k selection and its steps, at each SIMD level, against a few lines of NumPy.

Bits everywhere: there is one right answer, whatever the kernels guess on their way to it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pycollective import ConfigurationError, _core
from tests.float_environment import flushing, needs_flushing
from tests.inputs import dtype_of, same_bits

LEVELS = _core.simd_levels()
TYPES = ["float16", "bfloat16", "float32"]
MAGNITUDE = np.uint32(0x7FFFFFFF)
LARGEST = {
    "float32": np.finfo(np.float32).max,
    "float16": np.float32(65504),
    "bfloat16": np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
}


def keys_of(c):
    return c.view(np.uint32) & MAGNITUDE


def in_order(c):
    """All elements' indices: |c| descending, then the index ascending."""
    behind = (MAGNITUDE - keys_of(c)).astype(np.uint64)  # with the index one number, no two alike
    return np.sort(behind << np.uint64(32) | np.arange(len(c), dtype=np.uint64)).astype(np.uint32)


def first(c, k):
    """The k elements that come first."""
    return np.sort(in_order(c)[:k])


def first_of_chunks(c, k, chunk):
    found = []
    for at in range(0, len(c), chunk):
        part = c[at : at + chunk]
        wanted = k if len(part) == chunk else max(1, -(-k * len(part) // chunk))
        found.append(first(part, wanted) + np.uint32(at))
    return np.concatenate([np.zeros(0, np.uint32), *found])


def spread(random, count):
    """Pieces of the tensor whose scales have nothing to do with each other."""
    scale = 10.0 ** random.integers(-30, 30, count // 700 + 1)
    return random.standard_normal(count) * np.repeat(scale, 700)[:count]


def spikes(random, count):
    c = random.standard_normal(count) * 1e-3
    c[random.integers(0, max(count, 1), min(count, 3))] *= 1e6
    return c


# What selection could stumble over, as fp32 or what becomes of it in a narrower type.
INPUTS = {
    "gaussian": lambda r, n: r.standard_normal(n),
    "lognormal": lambda r, n: np.exp(2 * r.standard_normal(n)) * r.choice([-1, 1], n),
    "spikes": spikes,
    "1 % dense": lambda r, n: r.standard_normal(n) * (r.random(n) < 0.01),
    "few values": lambda r, n: r.integers(-3, 4, n) / 4,
    "one value": lambda r, n: np.full(n, -1.5) * r.choice([-1, 1], n),
    # The least step above the k-th magnitude, in what comes after a guess that was far too low.
    "neighbours": lambda r, n: 1 + 2.0**-22 * (r.random(n) < 1 / 400),
    "zeros": lambda r, n: np.zeros(n) * r.choice([-1, 1], n),
    "ascending": lambda r, n: np.arange(n) / 64,
    "descending": lambda r, n: -np.arange(n)[::-1] / 64,
    "pieces": spread,
    "at the end": lambda r, n: np.where(np.arange(n) < n - n // 50, 1e-3, 1.0) * r.random(n),
}


def make(kind, dtype, count, seed=0):
    x = INPUTS[kind](np.random.default_rng([seed, count]), count)
    largest = float(LARGEST[dtype])
    return np.clip(x, -largest, largest).astype(np.float32).astype(dtype_of(dtype))


def subnormals(count, seed=0):
    """fp32 around the least normal number and below it."""
    random = np.random.default_rng([seed, count])
    bits = random.integers(0, 1 << 24, count, np.uint32)
    return (bits | random.integers(0, 2, count, np.uint32) << np.uint32(31)).view(np.float32)


def run_top_k(x, held, k, simd):
    left = np.full(x.shape, np.nan, np.float32)
    indices = np.zeros(k, np.uint32)
    return _core.top_k(x, held, left, k, indices, simd), left, indices


def check_top_k(x, held, *ks):
    c = x.astype(np.float32) if held is None else x.astype(np.float32) + held
    order = in_order(c)
    for k in ks:
        want = np.sort(order[:k])
        for simd in LEVELS:
            found, left, indices = run_top_k(x, held, k, simd)
            assert found == k
            assert same_bits(left, c), simd
            assert same_bits(indices, want), simd


def check_top_k_chunks(x, held, k, chunk):
    c = x.astype(np.float32) if held is None else x.astype(np.float32) + held
    want = first_of_chunks(c, k, chunk)
    for simd in LEVELS:
        left, indices = np.full(x.shape, np.nan, np.float32), np.zeros(len(want), np.uint32)
        assert _core.top_k_chunks(x, held, left, k, chunk, indices, simd) == len(want)
        assert same_bits(left, c), simd
        assert same_bits(indices, want), simd


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", INPUTS)
def test_top_k(kind, dtype):
    for count in (1, 2, 63, 64, 1000, 70_001):
        x = make(kind, dtype, count)
        held = make(kind, "float32", count, seed=1) if count % 2 else None
        with np.errstate(all="ignore"):
            check_top_k(x, held, *{1, min(count, 3), *(count // n for n in (100, 10, 2, 1))})


@pytest.mark.parametrize("kind", INPUTS)
def test_top_k_of_a_long_tensor(kind):
    """Long enough for a sample and a guess; and for the guess to be wrong."""
    count = 1_100_003
    x, held = make(kind, "float32", count), make(kind, "float32", count, seed=1)
    check_top_k(x, held, 1, *(count // n for n in (10_000, 100, 11)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", INPUTS)
def test_top_k_chunks(kind, dtype):
    for count in (1, 63, 64, 65, 4096, 4097, 12_345, 70_001):
        x = make(kind, dtype, count)
        held = make(kind, "float32", count, seed=1) if count % 2 else None
        for k, chunk in [(1, 64), (64, 64), (41, 4096), (4000, 4096), (13, 1088), (655, 65536)]:
            check_top_k_chunks(x, held, k, chunk)


def at_byte(offset, array):
    """A copy that begins so far behind a line, and what lies around it."""
    room = np.zeros(array.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + 64 + offset
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy, room, slice(start, start + array.nbytes)


@pytest.mark.parametrize("offset", [1, 2, 4, 16, 63])
def test_arrays_begin_at_any_byte_and_end_around_a_vector(offset):
    """Large enough for stores past the caches, too; nothing around what is written changes."""
    for count in [*range(1, 70), 1000, 1_050_007]:
        x, held = make("gaussian", "float32", count), make("gaussian", "float32", count, seed=1)
        k = max(1, count // 100)
        want = x + held
        sources = at_byte(offset, x)[0], at_byte(offset, held)[0]
        for simd in LEVELS:
            left, *around_left = at_byte(offset, np.zeros(count, np.float32))
            indices, *around = at_byte(offset, np.zeros(k, np.uint32))
            chunks, *around_chunks = at_byte(offset, np.zeros(-(-count // 64), np.uint32))
            assert _core.top_k(*sources, left, k, indices, simd) == k
            assert same_bits(left, want)
            assert same_bits(indices, first(want, k))
            assert _core.top_k_chunks(*sources, left, 1, 64, chunks, simd) == len(chunks)
            assert _core.sparse_add(*sources, left, simd)
            assert same_bits(left, want)
            for room, inner in (around_left, around, around_chunks):
                room[inner] = 0
                assert not room.any()


@needs_flushing
@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_are_kept_whatever_the_host_does(flush):
    x, held = subnormals(5000), subnormals(5000, seed=1)
    want = x + held
    for simd in LEVELS:
        with flushing(flush):
            found, left, indices = run_top_k(x, held, 500, simd)
        assert found == 500
        assert same_bits(left, want)
        assert same_bits(indices, first(want, 500))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_anywhere(dtype, value):
    for count in (1, 64, 100, 5001):
        for at in {0, count // 2, count - 2, count - 1} - {-1}:
            x = make("gaussian", dtype, count)
            x[at] = value
            for simd in LEVELS:
                left, indices = np.empty(count, np.float32), np.zeros(count, np.uint32)
                assert _core.top_k(x, None, left, 1, indices, simd) == -1
                assert _core.top_k(x, None, left, count, indices, simd) == -1
                assert _core.top_k_chunks(x, None, left, 1, 64, indices, simd) == -1
                assert _core.sparse_add(x, None, left, simd) is False


def test_a_sum_that_is_too_large_is_not_finite():
    x = np.full(100, np.finfo(np.float32).max)
    left = np.empty(100, np.float32)
    for simd in LEVELS:
        assert _core.sparse_add(x, None, left, simd) is True
        assert _core.sparse_add(x, np.full(100, 1e31, np.float32), left, simd) is True
        assert _core.sparse_add(x, x, left, simd) is False
        assert _core.top_k(x, x, left, 1, np.zeros(1, np.uint32), simd) == -1


@pytest.mark.parametrize("dtype", TYPES)
def test_the_steps_together_are_top_k(dtype):
    """As ranks of a host would: a histogram of each part, one threshold, a share of the ties."""
    for kind in INPUTS:
        count, k = 10_007, 501
        x, held = make(kind, dtype, count), make(kind, "float32", count, seed=1)
        c = x.astype(np.float32) + held
        for simd in LEVELS:
            left = np.full(count, np.nan, np.float32)
            assert _core.sparse_add(x, held, left, simd)
            assert same_bits(left, c)
            parts = [left[:3001], left[3001:3002], left[3002:]]
            prefix, wanted = 0, k
            for shift, bits in ((20, 11), (10, 10), (0, 10)):
                bins = np.zeros(1 << bits, np.int64)
                for part in parts:
                    _core.sparse_histogram(part, shift, bits, prefix, bins, simd)
                here = keys_of(c).astype(np.int64) >> shift
                within = here[here >> bits == prefix] & (1 << bits) - 1
                assert same_bits(bins, np.bincount(within, minlength=1 << bits).astype(np.int64))
                above = np.cumsum(bins[::-1])[::-1]
                digit = int(np.nonzero(above >= wanted)[0].max())
                wanted -= int(above[digit] - bins[digit])
                prefix = prefix << bits | digit
            found = []
            for part, at in zip(parts, (0, 3001, 3002), strict=True):
                indices = np.zeros(len(part), np.uint32)
                many = _core.sparse_select(part, prefix, wanted, indices, simd)
                found.append(indices[:many] + np.uint32(at))
                wanted -= min(wanted, int((keys_of(part) == prefix).sum()))
            assert same_bits(np.concatenate(found), first(c, k))


def test_select_has_room_or_refuses():
    left = make("few values", "float32", 1003)
    key = int(np.float32(0.5).view(np.uint32))
    above, ties = int((keys_of(left) > key).sum()), int((keys_of(left) == key).sum())
    for simd in LEVELS:
        for take in (0, 1, ties - 1, ties, ties + 1, 1 << 40):
            many = above + min(take, ties)
            indices = np.full(many + 16, 7, np.uint32)
            assert _core.sparse_select(left, key, take, indices[:many], simd) == many
            assert same_bits(indices[:many], first(left, many))
            assert (indices[many:] == 7).all()
            with pytest.raises(ConfigurationError, match="no room"):
                _core.sparse_select(left, key, take, indices[: many - 1], simd)
            assert (indices[many:] == 7).all()


def rounded(c, dtype):
    """To nearest even, never past the largest finite number."""
    return np.clip(c, -LARGEST[dtype], LARGEST[dtype]).astype(dtype_of(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_take(dtype):
    random = np.random.default_rng(3)
    bits = random.integers(0, 1 << 32, 20_000, np.uint32)
    left = bits.view(np.float32)
    left[~np.isfinite(left)] = np.float32(np.finfo(np.float32).max)
    left[:6] = [0.0, -0.0, 65504, 65520, -65520, 3.4e38]
    indices = np.sort(random.choice(len(left), 7001, replace=False)).astype(np.uint32)
    indices[:6] = range(6)
    with np.errstate(all="ignore"):
        want = rounded(left[indices], dtype)
        rest = left.copy()
        rest[indices] -= want.astype(np.float32)
    assert np.isfinite(want.astype(np.float32)).all()
    for simd in LEVELS:
        got, values = left.copy(), np.zeros(len(indices), dtype_of(dtype))
        _core.sparse_take(got, indices, values, simd)
        assert same_bits(values, want)
        assert same_bits(got, rest)


# --- Corners that tensors of everyday sizes and values do not come to.


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
    check_top_k(x, None, count // 7, count // 2 + 1, count - 1)


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
