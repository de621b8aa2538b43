"""A leaf is added to nodes with the bits of a loop over the terms, by the kernel in Triton's
interpreter."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from pycollective.errors import ConfigurationError
from tests.inputs import awkward, from_words, same_bits, subnormal, words
from tests.triton.compiled import module
from tests.triton.test_reduce import tensor

KERNEL = module("accumulate", interpreted=True)
CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
SIZE, TAIL = KERNEL.SIZE.value, KERNEL.TAIL.value
BETWEEN = 0x5A5A5A5A  # in rows where nothing was written; no NaN, for sums may be some


@pytest.fixture(autouse=True)
def no_warnings():
    """NumPy's, of infinities and NaNs in the interpreter."""
    with np.errstate(all="ignore"):
        yield


def numbers(dtype, count, seed):
    """Zeros of both signs, subnormals, infinities, NaNs, and numbers whose order of addition
    shows, in any order."""
    half = count // 2
    made = np.concatenate([subnormal(dtype, 1, half)[0], *awkward(dtype, 1, count - half, seed)])
    return from_words(np.random.default_rng(seed).permutation(words(made)), dtype)


def placed(x, skew=0):
    """A tensor of these numbers that begins `skew` elements behind 64 aligned bytes."""
    room = torch.zeros(x.nbytes + skew * x.itemsize + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64 + skew * x.itemsize
    room[begin : begin + x.nbytes] = torch.from_numpy(x.view(np.uint8))
    return room[begin : begin + x.nbytes].view(tensor(x[:0]).dtype)


def row_of(size, seed, skew=0):
    return placed(numbers("float32", size, seed), skew)


def sums(begins, gradients, terms, counts):
    """What the contract says: (of each gradient, its sums), from arrays."""
    for begin, count, gradient in zip(begins, counts, gradients, strict=True):
        value = np.zeros(count, np.float32) if gradient is None else gradient.astype(np.float32)
        for term in terms:
            with np.errstate(all="ignore"):
                value = value + term[begin : begin + count]
        yield value


def same_numbers(a, b):
    """The same bits, but for NaNs."""
    nan = np.isnan(b)
    return np.array_equal(np.isnan(a), nan) and same_bits(a[~nan], b[~nan])


def one_behind_another(counts, step=16):
    """Begins, at multiples of `step`, with some elements between."""
    rooms = [(count // step + 1) * step for count in counts]
    return [step + sum(rooms[:i]) for i in range(len(rooms))]


def check(kinds, counts, begins, terms, onto=None, skews=(0, 0)):
    """Accumulate gradients of these dtypes (None: there is none). `onto` is the number of the term
    that is the result, or None; gradients and rows begin `skews` elements behind what is aligned.
    """
    size = max((b + c for b, c in zip(begins, counts, strict=True)), default=0) + 3
    given = [
        None if kind is None else numbers(kind, count, seed)
        for seed, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]
    leaf = [None if each is None else placed(each, skews[0]) for each in given]
    rows = [row_of(size, 100 + i, skews[1]) for i in range(terms)]
    if onto is None:
        out = placed(np.full(size, BETWEEN, np.int32).view(np.float32), skews[1])
    else:
        out = rows[onto]
    before, read = out.numpy().copy(), [row.numpy().copy() for row in rows]
    KERNEL.accumulate(KERNEL.Places(begins, counts, CPU), leaf, rows, out)
    after = out.numpy().copy()
    for begin, count, want in zip(begins, counts, sums(begins, given, read, counts), strict=True):
        assert same_numbers(after[begin : begin + count], want)
        after[begin : begin + count] = before[begin : begin + count]
    assert same_bits(after, before)  # what lies between
    for i, (row, was) in enumerate(zip(rows, read, strict=True)):
        assert i == onto or same_bits(row.numpy(), was)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("terms", "onto"), [(0, None), (1, 0), (2, None), (5, 4)])
def test_sums_of_each_type(dtype, terms, onto):
    counts = [SIZE + 130, 3]
    check([dtype] * 2, counts, one_behind_another(counts), terms, onto)


@pytest.mark.parametrize(("terms", "onto"), [(0, None), (1, None), (2, 1), (5, 0), (15, 14)])
@pytest.mark.parametrize("skews", [(0, 0), (1, 0), (0, 1)])
def test_a_bucket_of_all_types(terms, onto, skews):
    """Also of gradients and rows that begin at no multiple of 16 bytes."""
    kinds = [*DTYPES, None]
    counts = [SIZE + 3, 5, SIZE, 127, 0, TAIL + 1]
    check(kinds, counts, one_behind_another(counts), terms, onto, skews)


@pytest.mark.parametrize("count", [1, 127, 128, 129, TAIL, TAIL + 1, SIZE - 1, SIZE, 2 * SIZE + 1])
def test_each_number_of_elements(count):
    check(["bfloat16"], [count], [16], 1)


def test_gradients_lie_in_any_order_and_begin_anywhere():
    counts = [130, SIZE + 1, 7]
    check(["float16", "float32", None], counts, [SIZE + 13, 11, 2], 2, 0)


@pytest.mark.parametrize("terms", [0, 1, 3])
def test_a_gradient_that_is_not_there_is_plus_0(terms):
    """Which is +0 with a term that is -0."""
    size = SIZE + 9
    rows = [torch.full((size,), -0.0) for _ in range(terms)]
    out = torch.full((size,), 7.0)
    KERNEL.accumulate(KERNEL.Places([0], [size], CPU), [None], rows, out)
    assert not words(out.numpy()).any()


def test_minus_0_stays():
    """That of a gradient, with no terms and with a term that is -0."""
    size = SIZE + 9
    places = KERNEL.Places([0], [size], CPU)
    for rows in ([], [torch.full((size,), -0.0)]):
        out = torch.full((size,), 7.0)
        KERNEL.accumulate(places, [torch.full((size,), -0.0).to(torch.bfloat16)], rows, out)
        assert (words(out.numpy()) == 1 << 31).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_word_is_widened(dtype):
    bits = 8 * numbers(dtype, 2, 0).itemsize
    every = from_words(np.arange(1 << bits)[:: 1 if bits == 8 else 19], dtype)
    out = torch.empty(len(every))
    KERNEL.accumulate(KERNEL.Places([0], [len(every)], CPU), [placed(every)], [], out)
    assert same_numbers(out.numpy(), every.astype(np.float32))


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_a_bucket_without_elements(counts):
    places = KERNEL.Places([0] * len(counts), counts, CPU)
    out = torch.full((2,), 7.0)
    KERNEL.accumulate(places, [torch.empty(0) for _ in counts], [torch.empty(0)], out)
    KERNEL.accumulate(places, [None for _ in counts], [], torch.empty(0))
    assert out.tolist() == [7, 7]


def test_shapes_do_not_matter():
    out = torch.empty(12)
    x = torch.arange(12.0).view(3, 2, 2)
    KERNEL.accumulate(KERNEL.Places([0], [12], CPU), [x], [], out)
    assert torch.equal(out, x.flatten())


def test_the_same_tables_are_uploaded_once():
    """Each that differs, in any address or dtype, is its own."""
    places = KERNEL.Places([0, 16], [16, 16], CPU)
    x, y, z = (torch.full((16,), value) for value in (1.0, 2.0, 4.0))
    rows = [torch.full((32,), value) for value in (8.0, 16.0, 32.0)]
    halves = torch.full((16,), 0.5, dtype=torch.float16)  # as bfloat16 2**-15
    calls = [
        # the leaf, terms, the result, whether its table is new, what comes first and last
        ([x, y], rows[:1], rows[2], True, [9, 10]),
        ([x, y], rows[:1], rows[2], False, [9, 10]),
        ([y, x], rows[:1], rows[2], True, [10, 9]),
        ([x, z], rows[:1], rows[2], True, [9, 12]),
        ([x, None], rows[:1], rows[2], True, [9, 8]),
        ([x, y], rows[1:2], rows[2], True, [17, 18]),
        ([x, y], rows[:2], rows[2], True, [25, 26]),
        ([x, halves], rows[:1], rows[2], True, [9, 8.5]),
        ([x, halves.view(torch.bfloat16)], rows[:1], rows[2], True, [9, 8 + 2.0**-15]),
        ([x, y], rows[:1], rows[2], False, [9, 10]),
        ([y, x], rows[:1], rows[2], False, [10, 9]),
    ]
    tables = places.tables.numbers.__globals__
    for leaf, terms, out, is_new, want in calls:
        with mock.patch.dict(tables, upload=mock.Mock(wraps=tables["upload"])):
            KERNEL.accumulate(places, leaf, terms, out)
            assert tables["upload"].call_count == is_new
        assert out[:16].tolist() == [want[0]] * 16
        assert out[16:].tolist() == [want[1]] * 16


def test_vectors_are_for_what_is_aligned():
    """All gradients, rows and begins. The interpreter does not care; a GPU faults."""
    x, odd = placed(numbers("float16", 16, 1)), placed(numbers("float16", 16, 2), 1)
    row, odd_row = row_of(32, 3), row_of(32, 4, 1)
    cases = [
        ([0, 16], [x, x], [row], row, True),
        ([0, 16], [x, None], [row], row, True),
        ([0, 16], [x, odd], [row], row, False),
        ([0, 16], [x, x], [row, odd_row], row, False),
        ([0, 16], [x, x], [row], odd_row, False),
        ([0, 17], [x, x[:15]], [row], row, False),
    ]
    for begins, leaf, terms, out, aligned in cases:
        places = KERNEL.Places(begins, [16, 32 - begins[1]], CPU)
        with mock.patch.object(KERNEL, "_launcher") as launcher:
            KERNEL.accumulate(places, leaf, terms, out)
        launcher.assert_called_once_with(len(terms), (4,), aligned)


REFUSED = [
    ("3 gradients for 2 places", {"leaf": [None] * 3}),
    ("1 gradients for 2 places", {"leaf": [None]}),
    ("gradient 1 must have .* not 5 strided", {"second": torch.empty(5, 2)[:, 0]}),
    ("gradient 1 must have 5 .* not 6", {"second": torch.empty(6)}),
    ("gradient 1 must have at least 5 .* not 4", {"second": torch.empty(4)}),
    ("gradient 1 must .* not 5 ones of float64", {"second": torch.empty(5, dtype=torch.float64)}),
    ("gradient 1 must .* not 5 ones of int32", {"second": torch.empty(5, dtype=torch.int32)}),
    ("gradient 1 must .* on meta", {"second": torch.empty(5, device="meta")}),
    ("out must .* not 20 ones of bfloat16", {"out": torch.empty(20, dtype=torch.bfloat16)}),
    ("out must have at least 21 .* not 20", {"out": torch.empty(20)}),
    ("out must .* not 21 strided", {"out": torch.empty(42)[::2]}),
    ("a term must have at least 21 .* not 20", {"terms": [torch.empty(21), torch.empty(20)]}),
    ("a term must .* of int32", {"terms": [torch.empty(21, dtype=torch.int32)]}),
    ("15 rows at most, not 16", {"terms": [torch.empty(21)] * 16}),
]


@pytest.mark.parametrize(("why", "wrong"), REFUSED)
def test_what_is_not_as_said_is_refused(why, wrong):
    """Before anything is launched or uploaded."""
    wrong = {**wrong}
    leaf = wrong.pop("leaf", [None, wrong.pop("second", None)])
    out = torch.full((21,), 7.0)
    given = {"terms": [], "out": out, **wrong}
    places = KERNEL.Places([0, 16], [16, 5], CPU)
    with mock.patch.object(places.tables, "numbers"):
        with pytest.raises(ConfigurationError, match=why):
            KERNEL.accumulate(places, leaf, **given)
        assert not places.tables.numbers.called
    assert out.tolist() == [7] * 21


@pytest.mark.parametrize(
    ("why", "begins", "counts"),
    [
        ("1 begins of 2", [0], [1, 2]),
        ("begin at 0 or later", [0, -16], [1, 2]),
        ("0 elements or more", [0, 16], [1, -1]),
        ("overlap", [16, 0, 8], [4, 17, 0]),
    ],
)
def test_places_that_are_none(why, begins, counts):
    with pytest.raises(ConfigurationError, match=why):
        KERNEL.Places(begins, counts, CPU)
