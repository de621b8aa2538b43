"""Top-k selection and its steps, at each SIMD level, against a few lines of NumPy.

Bits everywhere: there is one right answer, whatever the kernels guess on their way to it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pycollective import _core, segments
from tests.float_environment import flushing, needs_flushing
from tests.inputs import dtype_of, same_bits
from tests.kernels.segments import found_for, table_of

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


NO_MESSAGES = np.zeros(0, np.uint8)


def rounded(c, dtype):
    """To nearest even, never past the largest finite number."""
    return np.clip(c, -LARGEST[dtype], LARGEST[dtype]).astype(dtype_of(dtype))


def taken(c, places, dtype="float32"):
    """The values at some places, and what is left."""
    values, left = rounded(c[places], dtype), c.copy()
    left[places] -= values.astype(np.float32)
    return values, left


def entries(count, dtype="float32"):
    return np.zeros(count, np.uint32), np.zeros(count, dtype_of(dtype))


def run_top_k(x, held, k, simd, chunk=0, many=None):
    """Places, values and what is left; None if an element is not finite."""
    left, found = np.full(x.shape, np.nan, np.float32), found_for(1)
    places, values = entries(k if many is None else many)
    table = table_of([{"x": x, "held": held, "left": left, "k": k}])
    _core.top_k(table, chunk, places, values, NO_MESSAGES, found, simd)
    return None if found[segments.BAD] else (places, values, left)


def sum_is_finite(x, held, left, simd):
    found = found_for(1)
    table = table_of([{"x": x, "held": held, "left": left, "k": 1}])
    _core.sparse_add(table, NO_MESSAGES, found, simd)
    return not found[segments.BAD]


def same_taken(got, c, want):
    values, left = taken(c, want)
    return same_bits(got[0], want) and same_bits(got[1], values) and same_bits(got[2], left)


def check_top_k(x, held, *ks):
    c = x.astype(np.float32) if held is None else x.astype(np.float32) + held
    order = in_order(c)
    for k in ks:
        want = np.sort(order[:k])
        for simd in LEVELS:
            assert same_taken(run_top_k(x, held, k, simd), c, want), simd


def check_top_k_chunks(x, held, k, chunk):
    c = x.astype(np.float32) if held is None else x.astype(np.float32) + held
    want = first_of_chunks(c, k, chunk)
    for simd in LEVELS:
        assert same_taken(run_top_k(x, held, k, simd, chunk, len(want)), c, want), simd


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", INPUTS)
def test_top_k(kind, dtype):
    for count in (1, 2, 63, 64, 1000, 70_001):
        x = make(kind, dtype, count)
        held = make(kind, "float32", count, seed=1) if count % 2 else None
        with np.errstate(all="ignore"):
            ks = {1, min(count, 3), *(count // n for n in (100, 10, 2, 1))}
            check_top_k(x, held, *(ks - {0}))


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
        want = x + held
        sources = at_byte(offset, x)[0], at_byte(offset, held)[0]
        for simd in LEVELS:
            hundredth = max(1, count // 100)
            for k, chunk, many in [(hundredth, 0, hundredth), (1, 64, -(-count // 64))]:
                left, *around_left = at_byte(offset, np.zeros(count, np.float32))
                places, *around_places = at_byte(offset, np.zeros(many, np.uint32))
                values, *around_values = at_byte(offset, np.zeros(many, np.float32))
                table = table_of([{"x": sources[0], "held": sources[1], "left": left, "k": k}])
                _core.top_k(table, chunk, places, values, NO_MESSAGES, found_for(1), simd)
                at = first_of_chunks(want, k, chunk) if chunk else first(want, k)
                assert same_taken((places, values, left), want, at)
                for room, inner in (around_left, around_places, around_values):
                    room[inner] = 0
                    assert not room.any()
            assert sum_is_finite(*sources, left, simd)
            assert same_bits(left, want)


@needs_flushing
@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_are_kept_whatever_the_host_does(flush):
    x, held = subnormals(5000), subnormals(5000, seed=1)
    want = x + held
    for simd in LEVELS:
        with flushing(flush):
            got = run_top_k(x, held, 500, simd)
        assert same_taken(got, want, first(want, 500))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_anywhere(dtype, value):
    for count in (1, 64, 100, 5001):
        for at in {0, count // 2, count - 2, count - 1} - {-1}:
            x = make("gaussian", dtype, count)
            x[at] = value
            for simd in LEVELS:
                assert run_top_k(x, None, 1, simd) is None
                assert run_top_k(x, None, count, simd) is None
                assert run_top_k(x, None, 1, simd, 64, -(-count // 64)) is None
                assert not sum_is_finite(x, None, np.empty(count, np.float32), simd)


def test_a_sum_that_is_too_large_is_not_finite():
    x = np.full(100, np.finfo(np.float32).max)
    left = np.empty(100, np.float32)
    for simd in LEVELS:
        assert sum_is_finite(x, None, left, simd)
        assert sum_is_finite(x, np.full(100, 1e31, np.float32), left, simd)
        assert not sum_is_finite(x, x, left, simd)
        assert run_top_k(x, x, 1, simd) is None


@pytest.mark.parametrize("dtype", TYPES)
def test_the_steps_together_are_top_k(dtype):
    """As ranks of a host would: a histogram of each part, one threshold, a share of the ties."""
    for kind in INPUTS:
        count, k = 10_007, 501
        x, held = make(kind, dtype, count), make(kind, "float32", count, seed=1)
        c = x.astype(np.float32) + held
        cuts = [(0, 3001), (3001, 3002), (3002, count)]
        for simd in LEVELS:
            left = np.full(count, np.nan, np.float32)
            table = table_of(
                [
                    {"x": x[a:b], "held": held[a:b], "left": left[a:b], "at": a, "k": k}
                    for a, b in cuts
                ]
            )
            _core.sparse_add(table, NO_MESSAGES, found_for(3), simd)
            assert same_bits(left, c)
            prefix, wanted = 0, k
            for shift, bits in ((20, 11), (10, 10), (0, 10)):
                bins = np.zeros((3, 1 << bits), np.int32)
                _core.sparse_histogram(table, shift, bits, np.full(3, prefix), bins, simd)
                here = keys_of(c).astype(np.int64) >> shift
                within = np.where(here >> bits == prefix, here & (1 << bits) - 1, 1 << bits)
                for row, (a, b) in zip(bins, cuts, strict=True):
                    want = np.bincount(within[a:b], minlength=1 << bits)[: 1 << bits]
                    assert same_bits(row, want.astype(np.int32))
                above = np.cumsum(bins.sum(0)[::-1])[::-1]
                digit = int(np.nonzero(above >= wanted)[0].max())
                wanted -= int(above[digit] - bins[:, digit].sum())
                prefix = prefix << bits | digit
            ties = []
            for a, b in cuts:
                ties.append(wanted)
                wanted -= min(wanted, int((keys_of(c[a:b]) == prefix).sum()))
            places, values = entries(2 * k + 1)
            keys = np.full(3, prefix)
            many = _core.sparse_select(table, keys, np.array(ties), places, values, simd)
            assert many == k
            assert same_taken((places[:k], values[:k], left), c, first(c, k))


def run_select(left, key, ties, simd, k=None):
    """Places of one row; behind the last that there may be they stay as they are."""
    k = len(left) if k is None else k
    table = table_of([{"x": left, "left": left, "k": k}])
    room = min(k, len(left))
    places, values = entries(room + 16)
    places[:] = 7
    keys = np.array([key]), np.array([ties])
    many = _core.sparse_select(table, *keys, places, values, simd)
    assert (places[room:] == 7).all()
    return places[:many]


def test_no_more_is_selected_than_there_is_room_for():
    """K of a row, whatever the key is: the first ones."""
    left = make("few values", "float32", 1003)
    key = int(np.float32(0.5).view(np.uint32))
    above, ties = int((keys_of(left) > key).sum()), int((keys_of(left) == key).sum())
    for simd in LEVELS:
        for take in (0, 1, ties - 1, ties, ties + 1, 1 << 40):
            many = above + min(take, ties)
            want = first(left, many)
            for k in (1, 2, many // 2, many - 1, many, many + 1):
                assert same_bits(run_select(left.copy(), key, take, simd, k), want[:k])


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_rounded_to_what_is_finite(dtype):
    random = np.random.default_rng(3)
    c = random.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    c[~np.isfinite(c)] = np.float32(np.finfo(np.float32).max)
    c[:6] = [0.0, -0.0, 65504, 65520, -65520, 3.4e38]
    with np.errstate(all="ignore"):
        want, rest = taken(c, slice(None), dtype)
    assert np.isfinite(want.astype(np.float32)).all()
    for simd in LEVELS:
        left, (places, values) = np.zeros_like(c), entries(len(c), dtype)
        table = table_of([{"x": c, "left": left, "k": len(c)}])
        kinds = [values, values.view(np.int16)] if dtype == "bfloat16" else [values]
        for each in kinds:  # NumPy alone has no bfloat16
            values[:] = 0
            _core.top_k(table, 0, places, each, NO_MESSAGES, found_for(1), simd)
            assert same_bits(values, want)
            assert same_bits(left, rest)


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
            want = 5 + np.bincount(within, minlength=1 << bits).astype(np.int32)
            for simd in LEVELS:
                bins = np.full((1, 1 << bits), 5, np.int32)
                table = table_of([{"x": left.view(np.float32), "left": left, "k": 1}])
                _core.sparse_histogram(table, shift, bits, np.array([prefix]), bins, simd)
                assert same_bits(bins[0], want), simd


def test_nothing_is_above_the_largest_key():
    """That of a NaN whose bits are all set."""
    left = make("gaussian", "float32", 1003)
    left.view(np.uint32)[[5, 64, 700, 1002]] = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
    for simd in LEVELS:
        for ties in range(6):
            found = run_select(left.copy(), 0x7FFFFFFF, ties, simd)
            assert found.tolist() == [5, 64, 700, 1002][:ties]


def test_every_tie_in_turn():
    """Of equal magnitudes the first, in whichever lane, up to each of them."""
    left = np.where(np.arange(133) % 3 == 0, -2.0, 1.0).astype(np.float32)
    key = int(keys_of(left).max())
    for simd in LEVELS:
        for ties in range(46):
            found = run_select(left.copy(), key, ties, simd)
            assert found.tolist() == list(range(0, 133, 3))[:ties]


def test_more_ties_than_there_are():
    """Of key 0, as zeros behind the last element would have: all there is, and no more."""
    for count in range(1, 40):
        left = (np.arange(count) % 3).astype(np.float32)
        for simd in LEVELS:
            found = run_select(left.copy(), 0, 1 << 40, simd, 99)
            assert found.tolist() == list(range(count))


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
                assert not sum_is_finite(x, None, left, simd)
            x[at] = before
        for simd in LEVELS:
            assert sum_is_finite(x, None, left, simd)
