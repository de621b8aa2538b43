"""Ordered reductions of rows have the oracle's bits, by the Triton kernel in Triton's interpreter
and by torch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from pycollective import order, reference
from pycollective.errors import ConfigurationError
from pycollective.torch.ordered import plain, reduction
from tests.exact import FORMATS as EXACT
from tests.inputs import (
    DTYPES,
    EIGHT_BITS,
    FLOATS,
    INTEGERS,
    PAIRS,
    awkward,
    dtype_of,
    from_words,
    order_sensitive,
    same_bits,
    subnormal,
    words,
)
from tests.triton.compiled import module

KERNEL = module("reduce", interpreted=True)
WAYS = [pytest.param(KERNEL, id="triton"), pytest.param(plain, id="torch")]
LEAVES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17]
MANY = [33, 64]  # each takes Triton's interpreter a second
# On the device. By what fp32 has in the place of the last two, other quotients are rounded.
DIVISORS = [1, 3, 24, 2**30 + 7, 2**53, float("nan"), 3 * 2**24 + 1, 2**24 + 1]
NARROW = [name for name in FLOATS if dtype_of(name).itemsize < 4]


@pytest.fixture(params=WAYS)
def way(request):
    with np.errstate(all="ignore"):
        yield request.param


@pytest.fixture
def large_programs(monkeypatch):
    """For many elements: a program of the interpreter's takes as long as one of a few."""
    monkeypatch.setattr(KERNEL, "THREADS", tl.constexpr(1 << 14))


def torch_type(dtype):
    return getattr(torch, dtype)


def tensor(array):
    """A torch tensor of an array's bits; ml_dtypes' are not torch's."""
    return torch.from_numpy(array.view(np.uint8)).view(torch_type(array.dtype.name))


def array(values):
    dtype = str(values.dtype).removeprefix("torch.")
    return values.view(torch.uint8).numpy().view(dtype_of(dtype))


def accumulator(dtype, op):
    return "float32" if dtype in NARROW and op in ("sum", "avg", "prod") else dtype


def rows_of(arrays, gap=0, shift=0):
    """The arrays as rows of one tensor; between two of them and before the first lie some elements
    that belong to no row."""
    count = arrays[0].size
    flat = np.full(shift + len(arrays) * (count + gap), 1, arrays[0].dtype)
    whole = tensor(flat)[shift:].view(len(arrays), count + gap)
    for row, each in zip(whole, arrays, strict=True):
        row[:count] = tensor(each)
    return whole[:, :count]


def reduced(way, rows, op, out="", *, dtype="", recipe=(), leaves=0, finish=True, shift=0):
    """What `way` makes of rows, by default leaves of the whole order; nothing else is written."""
    n, m = rows.shape
    kind = dtype or str(rows.dtype).removeprefix("torch.")
    room = tensor(np.full(m + shift + 2, 1, dtype_of(out or kind)))
    before = array(room).copy()
    result = room[shift : shift + m]
    recipe = recipe or whole_order(n)
    leaves = n if isinstance(leaves, int) and not leaves else leaves
    way.reduce(rows, result, op, recipe, leaves, torch_type(kind), finish)
    after = array(room)
    assert same_bits(after[:shift], before[:shift])
    assert same_bits(after[shift + m :], before[shift + m :])
    return after[shift : shift + m].copy()


def whole_order(n):
    return order.recipe((0, n), [(i, i + 1) for i in range(n)])


def more_than_a_program(dtype, vectors=1):
    """A number of elements that fills programs of the kernel and leaves some."""
    return vectors * 128 * (16 // dtype_of(dtype).itemsize) + 3


def in_turns(kinds, others, usual):
    """Each kind with each of the others; the usual run has `usual` of them, in turns."""
    return [
        pytest.param(
            *kind,
            other,
            marks=() if (row + column) % len(others) in usual else pytest.mark.storm,
        )
        for row, kind in enumerate(kinds)
        for column, other in enumerate(others)
    ]


@pytest.mark.parametrize(("dtype", "op", "leaves"), in_turns(PAIRS, LEAVES, {0}))
def test_bits_are_the_oracles(way, dtype, op, leaves):
    inputs = awkward(dtype, leaves, more_than_a_program(dtype), leaves)
    assert same_bits(reduced(way, rows_of(inputs), op), reference.reduce(inputs, op))


@pytest.mark.parametrize(
    ("dtype", "op", "leaves"),
    [("bfloat16", "avg", 64), ("float32", "sum", 33)]
    + [pytest.param(*pair, n, marks=pytest.mark.storm) for pair in PAIRS for n in MANY],
)
def test_many_leaves(way, dtype, op, leaves):
    inputs = awkward(dtype, leaves, 515, leaves)
    assert same_bits(reduced(way, rows_of(inputs), op), reference.reduce(inputs, op))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves", [2, 5, 8])
def test_the_order_shows(way, dtype, leaves):
    """By inputs of which another order has other sums."""
    op = "bxor" if dtype == "bool" else "sum"
    inputs = order_sensitive(dtype, leaves, 200)
    assert same_bits(reduced(way, rows_of(inputs), op), reference.reduce(inputs, op))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_subnormals(way, dtype, op):
    inputs = subnormal(dtype, 3, 300)
    assert same_bits(reduced(way, rows_of(inputs), op), reference.reduce(inputs, op))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "bool"])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, "program", "programs"])
@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (1, 0), (16, 16), (3, 5)])
def test_tails_and_strided_rows(way, dtype, count, gap, shift):
    """Also of rows that begin anywhere, and nothing beyond the result is written."""
    if isinstance(count, str):
        count = more_than_a_program(dtype, len(count) - 6) - 3 * (gap % 2)
    inputs = awkward(dtype, 3, count)
    op = "max" if dtype == "bool" else "sum"
    out = reduced(way, rows_of(inputs, gap, shift), op, shift=shift)
    assert same_bits(out, reference.reduce(inputs, op))


@pytest.mark.parametrize(("dtype", "op", "sizes"), in_turns(PAIRS, [(3, 1, 5), (2, 6, 1, 4)], {0}))
def test_nodes_of_uneven_hosts(way, dtype, op, sizes):
    """Each host makes the nodes that its ranks' leaves make up; these together are the result."""
    leaves = sum(sizes)
    inputs = awkward(dtype, leaves, 150, 1)
    wide = accumulator(dtype, op)
    nodes = {}
    first = 0
    for size in sizes:
        for lo, hi in order.held(range(first, first + size), leaves):
            recipe = order.recipe((lo, hi), [(i, i + 1) for i in range(lo, hi)])
            rows = rows_of(inputs[lo:hi])
            nodes[lo, hi] = reduced(
                way, rows, op, wide, dtype=dtype, recipe=recipe, leaves=leaves, finish=False
            )
        first += size
    recipe = order.recipe((0, leaves), sorted(nodes))
    rows = rows_of([nodes[each] for each in sorted(nodes)])
    out = reduced(way, rows, op, dtype, dtype=dtype, recipe=recipe, leaves=leaves)
    assert same_bits(out, reference.reduce(inputs, op))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_a_result_that_is_not_rounded(way, dtype, op):
    """The fp32 result of narrow leaves is that of the leaves as fp32."""
    inputs = awkward(dtype, 6, more_than_a_program(dtype))
    want = reference.reduce([each.astype(np.float32) for each in inputs], op)
    assert same_bits(reduced(way, rows_of(inputs), op, "float32"), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_node_is_neither_divided_nor_rounded(way, dtype):
    inputs = order_sensitive(dtype, 3, 200)
    wide = accumulator(dtype, "avg")
    want = reference.reduce([each.astype(dtype_of(wide)) for each in inputs], "sum")
    assert same_bits(reduced(way, rows_of(inputs), "avg", wide, finish=False), want)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_an_average_by_more_leaves_than_a_byte_counts(way, dtype):
    """Of one node, the sum of a thousand leaves."""
    (total,) = awkward(accumulator(dtype, "avg"), 1, 200)
    if dtype in FLOATS:
        want = (total / total.dtype.type(1000)).astype(dtype_of(dtype))
    else:
        want = np.array([abs(x) // 1000 * (1 if x > 0 else -1) for x in total.tolist()], dtype)
    rows = rows_of([total])
    out = reduced(way, rows, "avg", dtype, dtype=dtype, recipe=[order.TAKE], leaves=1000)
    assert same_bits(out, reference.reduce([want]))


def near_ties(dtype, divisor, count):
    """Sums whose quotients are next to what is halfway between two numbers of the type."""
    random = np.random.default_rng(count)
    mantissa = EXACT[dtype].precision - 1
    quotients = 1 + (random.integers(0, 1 << mantissa, count) + 0.5) / (1 << mantissa)
    return (quotients * np.nan_to_num(divisor, nan=1)).astype(accumulator(dtype, "avg"))


def on_device(divisor):
    return torch.tensor([divisor], dtype=torch.float64)


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("are_nodes", [False, True])
def test_an_average_by_a_number_on_the_device(way, dtype, divisor, are_nodes):
    """The bits of a division in fp64; those of one in fp32 by what fp32 has in the divisor's place
    are others. Of a NaN all is NaN."""
    if are_nodes:  # of the orders over two leaves, and over one
        inputs = awkward(accumulator(dtype, "avg"), 2, more_than_a_program("float32"))
        ties = near_ties(dtype, divisor, 300)
        inputs = [np.append(each, row) for each, row in zip(inputs, (ties, 0 * ties), strict=True)]
        recipe = order.recipe((0, 3), [(0, 2), (2, 3)])
    else:
        inputs = awkward(dtype, 3, more_than_a_program(dtype))
        recipe = whole_order(3)
    given = {"dtype": dtype, "recipe": recipe, "leaves": on_device(divisor)}
    out = reduced(way, rows_of(inputs), "avg", dtype, **given)
    assert same_bits(out, reference.reduce(inputs, "avg", divisor, dtype_of(dtype)))
    # Of a narrow type only quotients next to ties are others, and all of these only by the last.
    others = DIVISORS[-2:] if dtype not in NARROW else DIVISORS[-1:] if are_nodes else []
    if divisor in others:
        rounded = float(np.float32(divisor))
        assert not same_bits(out, reference.reduce(inputs, "avg", rounded, dtype_of(dtype)))
    if np.isnan(divisor):
        assert np.isnan(out).all()


def test_a_node_is_not_divided_by_a_number_on_the_device(way):
    inputs = order_sensitive("float32", 3, 200)
    out = reduced(way, rows_of(inputs), "avg", finish=False, leaves=on_device(np.nan))
    assert same_bits(out, reference.reduce(inputs, "sum"))


def test_the_host_does_not_ask_what_divides():
    """It would wait for the device. What a tensor without memory has nobody can ask."""
    terms, out, divisor = (torch.empty(*each, device="meta") for each in ((3, 8), (8,), (1,)))
    recipe = whole_order(3)
    reduction.reduce(terms, out, "avg", recipe, divisor.double(), torch.float32, finish=True)


def test_a_tensor_does_not_divide_integers():
    terms, out = torch.ones(3, 8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    with pytest.raises(ConfigurationError, match=r"of floats, not of torch\.int32"):
        reduction.reduce(terms, out, "avg", whole_order(3), on_device(3), torch.int32, finish=True)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_word_is_widened(way, large_programs, dtype):
    """To the fp32 number that it is; NaNs to any."""
    bits = 8 * dtype_of(dtype).itemsize
    every = from_words(np.arange(1 << bits), dtype)
    out = reduced(way, rows_of([every]), "sum", "float32", finish=False)
    want = every.astype(np.float32)
    numbers = ~np.isnan(want)
    assert same_bits(out[numbers], want[numbers])
    assert np.isnan(out[~numbers]).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_every_tie_is_rounded(way, large_programs, dtype):
    """All numbers of the format, what is halfway to the next, and the fp32 numbers beside these,
    with infinities and NaNs, of both signs; of a byte also all from the least to the greatest."""
    form = EXACT[dtype]
    bits = 8 * dtype_of(dtype).itemsize
    numbers = from_words(np.arange(1 << (bits - 1)), dtype).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    beyond = float(form.beyond)
    halfway = (numbers + np.append(numbers[1:], beyond)) / 2
    points = np.concatenate([numbers, halfway, [beyond]])
    points = words(points[points <= np.finfo(np.float32).max].astype(np.float32)).astype(np.int64)
    beside = np.unique(np.concatenate([points - 1, points, points + 1, [0x7F7FFFFF, 0x7F800000]]))
    beside = beside[(beside >= 0) & (beside <= 0x7F800000)]
    every = np.concatenate([beside, [0x7F800001, 0x7FC00000, 0x7FFFFFFF]]).astype(np.uint32)
    every = from_words(np.concatenate([every, every | np.uint32(1 << 31)]), "float32")
    out = reduced(way, rows_of([every]), "sum", dtype, dtype=dtype)
    with np.errstate(all="ignore"):
        rounded = every.astype(dtype_of(dtype))
    assert same_bits(out, reference.reduce([rounded]))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_pair_of_floats_of_a_byte(way, large_programs, dtype):
    every = np.arange(256, dtype=np.uint8)
    pair = [from_words(x, dtype) for x in (np.repeat(every, 256), np.tile(every, 256))]
    for op in ("sum", "prod", "min", "max"):
        assert same_bits(reduced(way, rows_of(pair), op), reference.reduce(pair, op)), op


@pytest.mark.parametrize("dtype", FLOATS)
def test_least_and_greatest_know_zeros_and_nans(way, dtype):
    """Each pair of some words: zeros, subnormals, infinities and NaNs of both signs."""
    sign = 1 << (8 * dtype_of(dtype).itemsize - 1)
    infinite = int(words(np.array([np.inf]).astype(dtype_of(dtype)))[0])
    special = [0, 1, infinite - 1, infinite, sign - 1]
    special = np.array([*special, *(sign | each for each in special)], np.uint64)
    pair = [from_words(np.repeat(special, 10), dtype), from_words(np.tile(special, 10), dtype)]
    for op in ("min", "max"):
        assert same_bits(reduced(way, rows_of(pair), op), reference.reduce(pair, op)), op
