"""The reference: held to exact fractions, to the documented trees, and to each rule on its own."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import reference
from tests.exact import FORMATS
from tests.inputs import (
    DTYPES,
    EIGHT_BITS,
    FLOATS,
    INTEGERS,
    OPS,
    ORDERED,
    dtype_of,
    from_words,
    order_sensitive,
    same_bits,
    words,
)


@pytest.mark.parametrize(
    ("leaves", "tree"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        (9, "((((0+1)+(2+3))+((4+5)+(6+7)))+8)"),
    ],
)
def test_the_order_is_the_documented_tree(leaves, tree):
    assert reference.tree([str(i) for i in range(leaves)], "({}+{})".format) == tree


@pytest.mark.parametrize("group", [2, 8, 64])
def test_groups_of_a_power_of_two_are_nodes_of_the_order(group):
    """What lets a kernel take many leaves in groups, and hosts their own ranks first."""
    for count in range(1, 200):
        leaves = [str(i) for i in range(count)]
        nodes = [
            reference.tree(leaves[i : i + group], "({}+{})".format) for i in range(0, count, group)
        ]
        assert reference.tree(nodes, "({}+{})".format) == reference.tree(leaves, "({}+{})".format)


def exact_reduce(values, op, dtype):
    """One rounding to the accumulator after each operation, one to the dtype at the end."""
    accumulator = FORMATS["float64" if dtype == "float64" else "float32"]
    combine = (lambda a, b: a * b) if op == "prod" else (lambda a, b: a + b)
    total = reference.tree(
        [Fraction(v) for v in values], lambda a, b: accumulator.round(combine(a, b))
    )
    if op == "avg":
        total = accumulator.round(total / len(values))
    return float(FORMATS[dtype].round(total))


@settings(deadline=None, max_examples=400)
@given(
    dtype=st.sampled_from(FLOATS),
    op=st.sampled_from(["sum", "avg", "prod"]),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_each_operation_rounds_once_and_the_end_once(dtype, op, ranks, seed):
    leaves = order_sensitive(dtype, ranks, 4, seed)
    columns = np.array(leaves).T.astype(float)
    want = [exact_reduce(column, op, dtype) for column in columns.tolist()]
    assert np.array_equal(reference.reduce(leaves, op).astype(float), want, equal_nan=True)


def test_a_division_in_fp64_has_the_bits_of_fp32():
    """Wherever fp32 holds the divisor; subnormal quotients and those beyond all numbers, too."""
    random = np.random.default_rng(3)
    a, b = random.integers(0, 0x7F800000, (2, 200_000)).astype(np.uint32).view(np.float32)
    b = np.where(b == 0, np.float32(1), b)
    with np.errstate(all="ignore"):
        a[::2] = b[::2] * random.integers(1, 1 << 24, 100_000).astype(np.float32)  # near ties
        want = a / b
        assert same_bits((a.astype(np.float64) / b).astype(np.float32), want)
    for x, by, each in zip(a[:999], b[:999], want[:999], strict=True):
        assert same_bits(reference.reduce([np.array([x])], "avg", float(by)), np.array([each]))


@pytest.mark.parametrize("divisor", [2**24 + 1, 3 * 2**24 + 1, 2**53 - 1])
def test_a_divisor_that_fp32_does_not_hold(divisor):
    """Another than the one that fp32 has in its place: rounded to 53 bits, and then to 24."""
    [leaf] = order_sensitive("float32", 1, 300)
    fp32, fp64 = FORMATS["float32"], FORMATS["float64"]
    want = [fp32.round(fp64.round(Fraction(each) / divisor)) for each in leaf.tolist()]
    got = reference.reduce([leaf], "avg", divisor)
    assert got.tolist() == [float(each) for each in want]


@pytest.mark.parametrize("out", ["float8_e5m2", "float16", "bfloat16", "float32"])
def test_leaves_of_several_types_are_divided_and_rounded_once(out):
    """Of micro-batches: by a divisor that is not their number, to a type that is not theirs."""
    types = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float16", "bfloat16", "float32"]
    leaves = [
        (leaf / np.float16(256)).astype(dtype_of(dtype))  # in the range of all
        for leaf, dtype in zip(order_sensitive("float16", 7, 200), types, strict=True)
    ]
    got = reference.reduce(leaves, "avg", 12_345, dtype_of(out))
    fp32, columns = FORMATS["float32"], np.array([leaf.astype(float) for leaf in leaves]).T
    for value, column in zip(got.astype(float), columns.tolist(), strict=True):
        total = reference.tree([*map(Fraction, column)], lambda a, b: fp32.round(a + b))
        assert value == float(FORMATS[out].round(fp32.round(total / 12_345)))
    assert not same_bits(got, reference.reduce(leaves, "avg", None, dtype_of(out)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_types_round_to_nearest_even_everywhere(dtype):
    """Products of two numbers lie anywhere between two neighbours: normal, subnormal, or beyond."""
    random = np.random.default_rng(5)
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    magnitudes = random.integers(0, infinity, (2, 6000))
    leaves = from_words(magnitudes | random.choice([0, 0x8000], (2, 6000)), dtype)
    want = [exact_reduce(column, "prod", dtype) for column in leaves.T.astype(float).tolist()]
    assert reference.reduce(leaves, "prod").astype(float).tolist() == want


def test_a_tie_between_bfloat16_subnormals_goes_to_the_even_one():
    """(1 + 2) / 2 smallest subnormals is fp32 0x00018000, halfway; an instruction gives 0."""
    leaves = [from_words([bits], "bfloat16") for bits in (1, 2)]
    assert words(reference.reduce(leaves, "avg")).tolist() == [0x0002]


def test_an_average_is_a_division():
    """A product with 1/3 rounds twice: it differs in a third of all fp32 sums."""
    leaves = [np.random.default_rng(r).standard_normal(10_000).astype(np.float32) for r in range(3)]
    divided = reference.reduce(leaves, "avg")
    multiplied = reference.reduce(leaves, "sum") * (np.float32(1) / np.float32(3))
    assert 0.2 < np.mean(divided != multiplied) < 0.5
    assert same_bits(divided, reference.reduce(leaves, "sum") / np.float32(3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_keep_their_signs(dtype):
    plus, minus = np.zeros(1, dtype_of(dtype)), -np.zeros(1, dtype_of(dtype))
    for op, leaves, want in [
        ("sum", [minus], minus),
        ("sum", [minus] * 5, minus),
        ("sum", [minus, plus], plus),
        ("avg", [minus] * 3, minus),
        ("prod", [minus, plus], minus),
        ("min", [plus, minus], minus),
        ("min", [minus, plus], minus),
        ("max", [plus, minus], plus),
        ("max", [minus, plus], plus),
        ("max", [minus, minus], minus),
    ]:
        assert same_bits(reference.reduce(leaves, op), want), (op, leaves)


def nearest_words(values, dtype):
    """The words of the nearest numbers, by looking among all there are, ties to even."""
    numbers = np.array(FORMATS[dtype].numbers(), float)
    lost = np.isnan(values)
    magnitudes = np.minimum(np.where(lost, 0, np.abs(values.astype(float))), numbers[-1])
    above = np.searchsorted(numbers, magnitudes)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - magnitudes, magnitudes - numbers[below]
    found = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    found |= np.signbit(values) * 0x80
    if not FORMATS[dtype].infinite:
        lost |= found & 0x7F == len(numbers) - 1
    return np.where(lost, CANONICAL[dtype], found).astype(np.uint8)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_pair_of_floats_of_a_byte(dtype):
    """And of three, so that sums lie just beside a tie, and thirds of them."""
    every = np.arange(256, dtype=np.uint8)
    infinity = [np.inf] * FORMATS[dtype].infinite
    magnitudes = [*np.array(FORMATS[dtype].numbers()[:-1], float), *infinity]
    magnitudes += [np.nan] * (128 - len(magnitudes))
    exact = np.array([*magnitudes, *(-x for x in magnitudes)], np.float32)
    assert np.array_equal(from_words(every, dtype).astype(np.float32), exact, equal_nan=True)
    pair = np.repeat(every, 256), np.tile(every, 256)
    a, b = (exact[each] for each in pair)
    for third in (None, 0x01, 0x81, 0x47):
        rest = [] if third is None else [np.full_like(pair[0], third)]
        leaves = [from_words(each, dtype) for each in (*pair, *rest)]
        n = np.float32(len(leaves))
        with np.errstate(all="ignore"):
            total = a + b if third is None else (a + b) + exact[third]
            product = a * b if third is None else (a * b) * exact[third]
            want = {"sum": total, "avg": total / n, "prod": product}
        for op, value in want.items():
            got = words(reference.reduce(leaves, op))
            assert np.array_equal(got, nearest_words(value, dtype)), (op, third)


CANONICAL = {
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}
LARGEST = {
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7B,
    "float16": 0x7BFF,
    "bfloat16": 0x7F7F,
    "float32": 0x7F7FFFFF,
    "float64": 0x7FEFFFFFFFFFFFFF,
}
# One NaN of each kind: quiet and signalling, of either sign, with payloads.
NANS = {
    "float8_e4m3fn": [0x7F, 0xFF, 0x7F, 0xFF],
    "float8_e5m2": [0x7E, 0xFE, 0x7D, 0xFF],
    "float16": [0x7E00, 0xFE00, 0x7C01, 0xFDFF],
    "bfloat16": [0x7FC0, 0xFFC0, 0x7F81, 0xFFBF],
    "float32": [0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF],
    "float64": [0x7FF8 << 48, 0xFFF80000DEADBEEF, 0x7FF0000000000001, 0xFFF7FFFFFFFFFFFF],
}


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_nan_becomes_the_one_of_its_type(dtype, op):
    nans = from_words(NANS[dtype], dtype)
    one = np.ones(4, dtype_of(dtype))
    for leaves in [[nans], [nans, one], [one, nans], [one, one, nans], [nans, nans]]:
        assert words(reference.reduce(leaves, op)).tolist() == [CANONICAL[dtype]] * 4
    infinity = np.full_like(one, np.inf)
    made = reference.reduce([infinity, -infinity], "sum")
    assert words(made).tolist() == [CANONICAL[dtype]] * 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_overflows_is_infinite_or_no_number(dtype):
    largest = from_words([LARGEST[dtype]], dtype)
    twice = [reference.reduce([x, x]).astype(float) for x in (largest, -largest)]
    if FORMATS[dtype].infinite:
        assert np.isposinf(twice[0])
        assert np.isneginf(twice[1])
    else:
        assert np.isnan(twice).all()
    # Half of that is a number again where the accumulator reaches further.
    average = reference.reduce([largest, largest], "avg")
    if dtype in ("float16", *EIGHT_BITS):
        assert same_bits(average, largest)
    else:
        assert np.isposinf(average.astype(float))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_integers_wrap(dtype, op):
    leaves = order_sensitive(dtype, 5, 50)
    info = np.iinfo(dtype)
    exact = (sum if op == "sum" else math.prod)(leaf.astype(object) for leaf in leaves)
    low = exact - info.min
    assert reference.reduce(leaves, op).tolist() == (low % (1 << info.bits) + info.min).tolist()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 300])
def test_an_average_of_integers_is_the_wrapped_sum_cut_towards_zero(dtype, ranks):
    """As NCCL has it. Integers have no rounding error: here all is exact."""
    leaves = order_sensitive(dtype, ranks, 200)
    leaves[0][:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    for leaf in leaves[1:]:
        leaf[:2] = 0
    sums = reference.reduce(leaves, "sum").tolist()
    want = [abs(each) // ranks * (-1 if each < 0 else 1) for each in sums]
    assert reference.reduce(leaves, "avg").tolist() == want


def test_which_operations_have_a_meaning():
    for dtype in DTYPES:
        meant = {"sum", "avg", "prod", "min", "max"} if dtype in FLOATS else {*OPS}
        if dtype == "bool":
            meant -= {"sum", "prod", "avg"}
        one = np.ones(1, dtype_of(dtype))
        for op in meant:
            assert reference.reduce([one], op).dtype == one.dtype
        for op in set(OPS) - meant:
            with pytest.raises(ValueError, match=f"{op} has no meaning for {dtype}"):
                reference.reduce([one], op)


@pytest.mark.parametrize("dtype", ORDERED)
@pytest.mark.parametrize("ranks", [3, 4, 6, 7, 8, 33])
def test_the_inputs_tell_orders_apart(dtype, ranks):
    """Otherwise every test of bits would pass whatever the order."""
    leaves = order_sensitive(dtype, ranks, 20_000)
    assert all(np.isfinite(leaf.astype(float)).all() for leaf in leaves)
    right = reference.reduce(leaves)
    rotated = reference.reduce(leaves[1:] + leaves[:1])
    assert np.mean(words(right) != words(rotated)) > 0.5


def test_ordinary_inputs_do_not():
    """Why `order_sensitive` exists."""
    random = np.random.default_rng(0)
    leaves = [random.standard_normal(1 << 18).astype(dtype_of("bfloat16")) for _ in range(8)]
    assert same_bits(reference.reduce(leaves), reference.reduce(leaves[1:] + leaves[:1]))
    two = order_sensitive("bfloat16", 2, 1000)
    assert same_bits(reference.reduce(two), reference.reduce(two[::-1]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives_agree_with_each_other(ranks):
    leaves = order_sensitive("bfloat16", ranks, 4 * ranks)
    whole = reference.reduce(leaves, "avg")
    assert all(same_bits(x, whole) for x in reference.all_reduce(leaves, "avg"))
    shards = reference.reduce_scatter(leaves, "avg")
    assert [len(x) for x in shards] == [4] * ranks
    assert all(same_bits(x, whole) for x in reference.all_gather(shards))
    exchanged = reference.all_to_all(leaves)
    assert same_bits(exchanged[0][:4], leaves[0][:4])
    assert same_bits(exchanged[-1][:4], leaves[0][-4:])
    again = reference.all_to_all(exchanged)
    assert all(same_bits(x, y) for x, y in zip(again, leaves, strict=True))
