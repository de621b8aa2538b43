"""1-bit and 8-bit quantization in Triton's interpreter gives what the CPU's kernels give; tables
of many segments also as PTX that is executed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pycollective import ConfigurationError, _core, segments
from tests.inputs import dtype_of, from_words, same_bits
from tests.kernels import quantized as cpu
from tests.kernels.segments import table_of
from tests.triton.compiled import module
from tests.triton.executed import WAYS, address, executed, ways
from tests.turns import each_once, usually

KERNELS = module("quantize", interpreted=True)
CPU = torch.device("cpu")
TABLES = KERNELS.Tables(CPU)
DTYPES = list(segments.DTYPES)
STORM = pytest.mark.storm
UNTOUCHED = 6  # in words of `found`
kernels = ways("quantize")


def equal(dtype, count, seed):
    return np.full(count, -0.3 * seed, dtype_of(dtype))


def one_huge(dtype, count, seed):
    x = cpu.INPUTS["normal"](dtype, count, seed)
    x[count // 2 : count // 2 + 1] = np.finfo(np.float16).max
    return x


INPUTS = {**cpu.INPUTS, "equal": equal, "one huge": one_huge}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def tensor(array):
    """A torch tensor of a copy of an array's bits; ml_dtypes' are not torch's."""
    made = torch.empty(array.size, dtype=getattr(torch, array.dtype.name))
    if array.size:
        made.view(torch.uint8).numpy()[:] = array.view(np.uint8)
    return made


def words(items=1):
    """What a call finds, before anything is found: whatever else is there stays."""
    found = torch.zeros(segments.heads_at(items) // 4 + 3, dtype=torch.int32)
    found[2:4] = found[segments.heads_at(items) // 4 :] = UNTOUCHED
    return found


def quantize(codec, chunk, x, held=None):
    """(payload, left), or None if a number is not finite. Nothing else is written."""
    size = _core.quantized_bytes(codec, chunk, len(x))
    payload = torch.full((size + 40,), 0xA5, dtype=torch.uint8)
    left = torch.full((len(x) + 32,), 7.0)
    found, gradient = words(), tensor(x)
    own, errors = payload[17 : 17 + size], left[16 : 16 + len(x)]
    before = None if held is None else tensor(held)
    table = table_of([{"x": gradient, "held": before, "left": errors, "k": 1, "at": 17}])
    KERNELS.quantize(codec, chunk, table, payload, found, 0, TABLES)
    assert (payload[:17] == 0xA5).all()
    assert (payload[17 + size :] == 0xA5).all()
    assert (left[:16] == 7).all()
    assert (left[16 + len(x) :] == 7).all()
    want = words()
    want[segments.NONZERO] = int((x != 0).any())
    want[segments.BAD] = found[segments.BAD]
    assert torch.equal(found, want)
    return None if found[segments.BAD] else (own.numpy(), errors.numpy())


def dequantize(codec, chunk, messages, at, dtype, count, divisor):
    out = torch.full((count + 64,), 3, dtype=getattr(torch, dtype))
    own, found = out[31 : 31 + count], words()
    table = table_of([{"x": own, "k": 1, "at": at}])
    KERNELS.dequantize(codec, chunk, table, torch.from_numpy(messages), divisor, found, 0, TABLES)
    assert (out[:31] == 3).all()
    assert (out[31 + count :] == 3).all()
    want = words()
    want[segments.BAD] = int(dtype != "float32" and not torch.isfinite(own).all())
    assert torch.equal(found, want)
    whole = out.view(torch.uint8).numpy().view(dtype_of(dtype))
    return whole[31 : 31 + count]


def check_quantized(codec, chunk, x, held=None):
    """What both leave; None where a number is not finite."""
    want, got = cpu.quantize(codec, chunk, x, held), quantize(codec, chunk, x, held)
    assert (got is None) == (want is None)
    if want is None:
        return None
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    return want


def in_turns(kinds, others):
    """Each kind with each of the others; the usual run has each kind with one, in turns."""
    return [
        pytest.param(kind, other, marks=() if row % len(others) == column else pytest.mark.storm)
        for row, kind in enumerate(kinds)
        for column, other in enumerate(others)
    ]


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize(("kind", "dtype"), in_turns(INPUTS, DTYPES))
def test_two_steps_of_error_feedback(codec, kind, dtype):
    """The second with what the first has left."""
    held = None
    for step in range(2):
        x = INPUTS[kind](dtype, 5 * 64 + 13, step)
        found = check_quantized(codec, 64, x, held)
        held = found[1] if found else held


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize("kind", ["order sensitive"])
def test_usual_chunks(codec, kind):
    chunk = cpu.usual_chunk(codec)
    x, held = (INPUTS[kind]("float32", 4 * chunk + 503, seed) for seed in (1, 2))
    assert check_quantized(codec, chunk, x, held)


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize(
    "chunk",
    [64, 320, 1088, *(pytest.param(each, marks=pytest.mark.storm) for each in (832, 2048, 65536))],
)
def test_chunks_of_any_size(codec, chunk):
    """In the registers, or read twice."""
    x, held = (INPUTS["lognormal"]("bfloat16", 4 * chunk + chunk // 2 + 5, seed) for seed in (1, 2))
    assert check_quantized(codec, chunk, x, held.astype(np.float32))


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 32, 33, 63, 64, 65, 255, 257])
def test_tails(codec, count):
    x, held = (INPUTS["normal"]("float32", count, seed) for seed in (1, 2))
    for chunk in (64, 192):
        assert check_quantized(codec, chunk, x, held)


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize("bad", [np.inf, np.nan, pytest.param(-np.inf, marks=pytest.mark.storm)])
def test_one_number_that_is_not_finite_anywhere(codec, bad):
    count = 4 * 64 + 45
    good = INPUTS["normal"]("float32", count, 0)
    for number, at in enumerate([0, 70, 255, 256, count - 1]):
        worse, alone = good.copy(), np.zeros_like(good)
        worse[at] = alone[at] = bad
        dtype = dtype_of(DTYPES[number % 3])
        for x in (worse, alone):
            assert check_quantized(codec, 64, x.astype(dtype)) is None
        assert check_quantized(codec, 64, good.astype(dtype), worse) is None


@pytest.mark.parametrize("codec", cpu.CODECS)
def test_the_largest_and_the_least_numbers(codec):
    """A 1-bit sum that overflows, scales that are bounded, scales that are too small."""
    tiny = 127 * 2.0**-126
    for most in (cpu.FLOAT.max, np.nextafter(cpu.FLOAT.max, np.float32(0)), tiny, 0.99 * tiny):
        check_quantized(codec, 64, np.full(70, most, np.float32))
        few = np.zeros(70, np.float32)
        few[[3, 66]] = most, -most
        assert check_quantized(codec, 64, few)
    assert quantize("one_bit", 64, np.full(70, cpu.FLOAT.max)) is None


def test_int8_rounds_ties_to_even():
    """Of c times (127 / a), beside which lie c / scale and c times (1 / scale)."""
    random = np.random.default_rng(0)
    largest = (1 + random.random((100, 1))).astype(np.float32) * 2.0 ** random.integers(-80, 80)
    ties = (random.integers(-127, 127, (100, 64)) + 0.5) / 127 * largest
    c = ties.astype(np.float32)
    for step, toward in ((1, np.inf), (2, -np.inf)):
        c[:, step::3] = np.nextafter(c[:, step::3], np.float32(toward))
    c[:, :1] = largest.astype(np.float32)
    assert check_quantized("int8", 64, c.reshape(-1))


def sums():
    """Rows with each codec and type; the usual run has each number of rows once."""
    for turn, rows in enumerate([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 30]):
        for codec in cpu.CODECS:
            for dtype in DTYPES:
                usual = (codec, dtype) == (cpu.CODECS[turn % 2], DTYPES[turn % 3])
                yield pytest.param(rows, codec, dtype, marks=() if usual else pytest.mark.storm)


@pytest.mark.parametrize(("rows", "codec", "dtype"), list(sums()))
def test_sums_are_the_cpus(rows, codec, dtype):
    """Of payloads of any bytes, and of such whose order shows, at odd places."""
    chunk, count, at = 192, 1300 + rows, 7 + rows
    size = _core.quantized_bytes(codec, chunk, count)
    messages = np.random.default_rng(rows).integers(0, 256, (rows, at + size + 3), np.uint8)
    honest = messages.copy()
    for seed, row in enumerate(honest):
        x = INPUTS["lognormal"]("float32", count, seed)
        row[at : at + size] = cpu.quantize(codec, chunk, x)[0]
    for each, divisor in ((messages, 1.0), (honest, float(np.float32(3 * rows / 7)))):
        want = cpu.dequantize(codec, chunk, each, at, dtype, count, divisor)
        got = dequantize(codec, chunk, each, at, dtype, count, divisor)
        if dtype != "float32" and not np.isfinite(want).all():  # what comes later may be NaN
            got = np.where(np.isnan(got), want, got)
        assert same_bits(got, want)


@pytest.mark.parametrize("codec", cpu.CODECS)
@pytest.mark.parametrize("count", [0, 1, 9, 63, 65, 1023, 1025])
@pytest.mark.parametrize("chunk", [64, 1024])
def test_tails_of_sums(codec, count, chunk):
    """Of a payload without a byte behind it."""
    size = _core.quantized_bytes(codec, chunk, count)
    messages = np.random.default_rng(count).integers(0, 256, (1, 5 + size), np.uint8)
    want = cpu.dequantize(codec, chunk, messages, 5, "float32", count)
    assert same_bits(dequantize(codec, chunk, messages, 5, "float32", count, 1.0), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_scales_become_the_types_nan(dtype):
    scales = from_words([0x7F800001, 0xFFC12345, 0x7FFFFFFF], "float32")
    for codec in cpu.CODECS:
        records = np.full((3, _core.quantized_bytes(codec, 64, 64)), 255, np.uint8)
        records[:, :4] = scales[:, None].view(np.uint8)
        want = cpu.dequantize(codec, 64, records.reshape(1, -1), 0, dtype, 192)
        got = dequantize(codec, 64, records.reshape(1, -1), 0, dtype, 192, 1.0)
        assert same_bits(got, want)


def test_payloads_are_as_long_as_the_cpus():
    for codec in cpu.CODECS:
        for chunk in (64, 192, 65536):
            for count in (0, 1, 9, 64, 65, 65537):
                want = _core.quantized_bytes(codec, chunk, count)
                assert KERNELS.payload_bytes(codec, chunk, count) == want


# Tables of many segments.


@dataclass
class Segment:
    """A row of a table."""

    item: int
    count: int
    dtype: str = "float32"
    k: int = 1
    kind: str = "normal"
    is_held: bool = True


# In messages they lie in this order, with a gap before each. Parameters 1 and 3 have two.
SEGMENTS = [
    Segment(0, 4 * 64 + 37),
    Segment(1, 2 * 256, "bfloat16"),
    Segment(1, 70, "bfloat16", is_held=False),
    Segment(2, 0),
    Segment(3, 1024 + 333, k=0),
    Segment(3, 5, "float16", k=0, kind="lognormal"),
    Segment(4, 300, kind="zeros"),
    Segment(5, 2 * 1024 + 9, "float16", k=0),
    Segment(6, 0, k=0),
    Segment(7, 1024 + 200, is_held=False),
    Segment(8, 3, k=0, kind="zeros"),
]
ITEMS = 9
BITS_AT = KERNELS.FIELDS.value  # of a header
GAP = 3  # bytes between segments


class Case:
    """The segments' arrays, and where they are in messages."""

    def __init__(self, codec, chunk, first=0, bad=(), gap=GAP):
        self.codec, self.chunk = codec, chunk
        self.x, self.held, self.left, self.ats = [], [], [], []
        at = first
        for seed, each in enumerate(SEGMENTS):
            x = INPUTS[each.kind](each.dtype, each.count, seed)
            if each.item in bad:
                x[each.count // 2] = np.nan
            held = INPUTS["normal"]("float32", each.count, seed + 50) if each.is_held else None
            self.x.append(tensor(x))
            self.held.append(None if held is None or not each.k else tensor(held))
            self.left.append(torch.full((each.count,), 7.0) if each.k else None)
            self.ats.append(at + gap)
            at = self.ats[-1] + self.bytes_of(each)
        self.size = at + gap

    def bytes_of(self, each):
        if each.k:
            return _core.quantized_bytes(self.codec, self.chunk, each.count)
        return 4 * each.count

    def table(self):
        """What its addresses point to is known where launches are executed."""
        columns = zip(SEGMENTS, self.x, self.held, self.left, self.ats, strict=True)
        rows = [
            {"x": x, "held": held, "left": left, "at": at, "k": each.k, "item": each.item}
            for each, x, held, left, at in columns
        ]
        for each in (*self.x, *self.held, *self.left):
            if each is not None:
                address(each)
        return table_of(rows)

    def quantized(self, messages, found, zero_at):
        """What the CPU's kernel does."""
        _core.quantize(self.codec, self.chunk, self.table(), messages, found, zero_at)

    def dequantized(self, messages, divisor, found, zero_at):
        """What the CPU's kernel does."""
        _core.dequantize(self.codec, self.chunk, self.table(), messages, divisor, found, zero_at)


def same(these, those):
    for a, b in zip(these, those, strict=True):
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("kernels", "gap", "codec"),  # of a gap of 4 bytes fp32 numbers are aligned in messages
    usually(
        lambda kernels, gap, codec: kernels == "interpreted" or (gap, codec) == (GAP, "one_bit"),
        *(WAYS, [GAP, 4], cpu.CODECS),
    ),
    indirect=["kernels"],
)
def test_many_segments_are_quantized(kernels, codec, gap):
    """Each at its place, of two types; of each parameter whether it is all zero."""
    case, want = Case(codec, 64, gap=gap), Case(codec, 64, gap=gap)
    messages = torch.full((case.size,), 0xA5, dtype=torch.uint8)
    wanted, found, finds = messages.clone(), words(ITEMS), words(ITEMS)
    kernels.quantize(codec, 64, case.table(), messages, found, 0, kernels.Tables(CPU))
    want.quantized(wanted, finds, 0)
    assert torch.equal(messages, wanted)
    assert torch.equal(found, finds)
    same(case.left, want.left)
    zero = found[segments.NONZERO :][:ITEMS] == 0
    assert zero.nonzero().flatten().tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("codec", cpu.CODECS)
def test_parameters_that_are_zero_everywhere_are_not_quantized(kernels, codec):
    """Nothing of theirs is written, nor is a NaN in them found. Zeros of others are not noted."""
    zero_at = segments.zero_at(ITEMS)
    case, want = Case(codec, 64, bad=[1, 3, 7]), Case(codec, 64, bad=[1, 3, 7])
    for bad in (False, True):
        messages = torch.full((case.size,), 0xA5, dtype=torch.uint8)
        found = words(ITEMS)
        found[[zero_at + 1, zero_at + 3]] = 1
        found[zero_at + 7] = int(not bad)
        wanted, finds = messages.clone(), found.clone()
        kernels.quantize(codec, 64, case.table(), messages, found, zero_at, kernels.Tables(CPU))
        want.quantized(wanted, finds, zero_at)
        assert torch.equal(found, finds)
        assert found[segments.BAD] == bad
        if not bad:
            assert torch.equal(messages, wanted)
            same(case.left, want.left)


def test_headers_are_written_beside_numbers(kernels):
    """In the same launch, at the start of each message."""
    digest, scale, items = (1 << 64) - 0x1234567890AB, 65536.0, 9
    numbers = [torch.arange(1.0, 1031.0), torch.arange(4.0).half()]
    length = 24 + 2
    size = 28 + 4 * 1030
    messages = torch.full((2 * size,), 0xA5, dtype=torch.uint8)
    rows = [{"x": each, "at": 28 + i * size} for i, each in enumerate(numbers)]
    table = table_of(rows)
    for each in numbers:
        address(each)
    mine = digest, scale, items
    kernels.quantize(
        "int8", 64, table, messages, words(2), 0, kernels.Tables(CPU), header=(mine, 2)
    )
    want = np.zeros(length, np.uint8)
    want[:8] = np.array([digest], np.uint64).view(np.uint8)
    want[8:12] = np.array([scale], np.float32).view(np.uint8)
    want[16] = items
    for message, x in zip(messages.view(2, size).numpy(), numbers, strict=True):
        assert (message[:length] == want).all()
        assert (message[length:28] == 0xA5).all()
        assert (message[28 : 28 + 4 * len(x)] == x.float().view(torch.uint8).numpy()).all()
        assert (message[28 + 4 * len(x) :] == 0xA5).all()


def received(codec, ranks):
    """Messages of ranks. All headers say that parameters 1, 6, 7 and 8 are all zero; all but the
    first also 0 and 3."""
    cases = [Case(codec, 64, BITS_AT + 2) for _ in range(ranks)]
    messages = torch.zeros(ranks, cases[0].size, dtype=torch.uint8)
    for seed, (case, message) in enumerate(zip(cases, messages, strict=True)):
        for x, each in zip(case.x, SEGMENTS, strict=True):
            x.copy_(tensor(INPUTS["lognormal"](each.dtype, each.count, 90 + seed)))
        case.quantized(message, words(ITEMS), 0)
        bits = 0b111000010 | (0b1001 if seed else 0)
        message[BITS_AT] = bits & 0xFF
        message[BITS_AT + 1] = bits >> 8
    return messages


@pytest.mark.parametrize(
    ("kernels", "ranks", "are_zeros", "codec"),
    [
        *usually(
            lambda _, ranks, are_zeros, codec: (ranks, codec) in ((1, "int8"), (3, "one_bit")),
            *(["interpreted"], [1, 3, 11], [False, True], cpu.CODECS),
        ),
        *usually(
            lambda _, ranks, are_zeros, codec: (ranks, are_zeros, codec) == (2, True, "one_bit"),
            *(["executed"], [1, 2, 3, 11], [False, True], cpu.CODECS),
        ),
    ],
    indirect=["kernels"],
)
def test_many_segments_are_added_up(kernels, codec, ranks, are_zeros):
    """In the contract's order; zeros where all headers say so."""
    zero_at = segments.zero_at(ITEMS) if are_zeros else 0
    messages = received(codec, ranks)
    first = BITS_AT + 2
    case, want = Case(codec, 64, first), Case(codec, 64, first)
    found, finds = words(ITEMS), words(ITEMS)
    kernels.dequantize(
        codec, 64, case.table(), messages, float(ranks), found, zero_at, kernels.Tables(CPU)
    )
    want.dequantized(messages, float(ranks), finds, zero_at)
    same(case.x, want.x)
    assert torch.equal(found, finds)
    noted = found[segments.zero_at(ITEMS) :][:ITEMS].nonzero().flatten().tolist()
    assert noted == ([1, 6, 7, 8] if are_zeros else [])


@pytest.mark.parametrize(
    ("kernels", "skew", "more"),
    [
        ("executed", 4, 0),
        ("executed", 0, 1),
        *(pytest.param("executed", *each, marks=STORM) for each in ((0, 0), (1, 0), (0, 4))),
        *(("interpreted", *each) for each in ((0, 0), (4, 0), (1, 0), (0, 4), (0, 1))),
    ],
    indirect=["kernels"],
)
def test_numbers_in_messages_lie_anywhere(kernels, skew, more):
    """At multiples of 16 and of 4 bytes, and at others; `more` bytes lie between messages."""
    ranks, count = 9, 1024 + 100  # 16 bytes divide its numbers'
    x = np.stack([INPUTS["order sensitive"]("float32", count, seed) for seed in range(ranks)])
    x[:, -1] = np.nan  # what comes later may be NaN, too
    x[:, 6] = -0.0
    messages = torch.zeros(ranks, 16 + 4 * count + more, dtype=torch.uint8)
    messages.numpy()[:, skew : skew + 4 * count] = x.view(np.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((count,), 3, dtype=dtype)
        table = table_of([{"x": out, "at": skew}])
        address(out)
        kernels.dequantize("int8", 64, table, messages, 3.0, words(), 0, kernels.Tables(CPU))
        total = np.empty(count, np.float32)
        _core.reduce_into(list(x), "sum", total)
        want = cpu.rounded(total / np.float32(3), str(dtype).removeprefix("torch."))
        assert (out.view(torch.uint8).numpy() == want.view(np.uint8)).all()


@pytest.mark.parametrize(
    ("kernels", "are_zeros", "dtype"),
    [
        *itertools.product(["interpreted"], [False, True], DTYPES),
        *each_once(["executed"], [False, True], DTYPES),
    ],
    indirect=["kernels"],
)
def test_results_that_are_not_finite_are_found(kernels, dtype, are_zeros):
    """Where nothing else would find them: in a narrow type, or where the owner averages."""
    messages = torch.zeros(1, 25 + 4 * 1100, dtype=torch.uint8)
    numbers = np.ones(1100, np.float32)
    table_at = {"at": 25, "item": 0}
    for place, bad in ((3, np.inf), (1090, np.nan), (1090, np.float32(3.4e38))):
        numbers[:] = 1
        numbers[place] = bad
        messages[0, 25:].numpy()[:] = numbers.view(np.uint8)
        out = torch.zeros(1100, dtype=getattr(torch, dtype))
        address(out)
        found = words()
        kernels.dequantize(
            *("int8", 64, table_of([{"x": out, **table_at}]), messages, 1.0, found),
            *(segments.zero_at(1) if are_zeros else 0, kernels.Tables(CPU)),
        )
        is_seen = are_zeros or dtype != "float32"
        want = words()
        want[segments.BAD] = int(is_seen and not torch.isfinite(out).all())
        assert torch.equal(found, want)


def test_all_results_are_nan_where_something_is_bad(kernels):
    messages = received("one_bit", 2)
    case = Case("one_bit", 64, BITS_AT + 2)
    found = words(ITEMS)
    found[segments.BAD] = 1
    want = found.clone()
    zero_at = segments.zero_at(ITEMS)
    kernels.dequantize(
        "one_bit", 64, case.table(), messages, 2.0, found, zero_at, kernels.Tables(CPU)
    )
    nans = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
    for x, each in zip(case.x, SEGMENTS, strict=True):
        bits = x.view(torch.int32 if each.dtype == "float32" else torch.int16)
        assert (bits == nans[each.dtype]).all()
    assert torch.equal(found, want)


@pytest.mark.parametrize("codec", [pytest.param("one_bit", marks=STORM), "int8"])
def test_one_launch_takes_a_bucket(codec):
    """Of one type; more types take one more each."""
    rows = [
        {"x": x, "left": torch.zeros(100), "at": 33 * i, "k": i % 2, "item": i}
        for i, x in enumerate(torch.zeros(48, 100))
    ]
    messages, found = torch.zeros(48 * 500, dtype=torch.uint8), words(48)
    compiled = module("quantize", interpreted=False)
    for count in (1, 48):
        tables, table = compiled.Tables(CPU), table_of(rows[:count])
        with executed(execute=False) as launches:
            mine = 5, 1.0, 48
            compiled.quantize(codec, 64, table, messages, found, 0, tables, header=(mine, 2))
            compiled.dequantize(codec, 64, table, messages.view(2, -1), 2.0, found, 52, tables)
        assert {name: len(each) for name, each in launches.kernels.items()} == {
            "encode": 1,
            "decode": 1,
        }


X, LEFT, BYTES = torch.zeros(100), torch.zeros(100), torch.zeros(21, dtype=torch.uint8)
ROW = table_of([{"x": X, "left": LEFT, "k": 1}])
QUANTIZE = {"codec": "one_bit", "chunk": 64, "table": ROW, "messages": BYTES}
QUANTIZE |= {"found": words(), "zero_at": 0, "tables": TABLES}
DEQUANTIZE = QUANTIZE | {"messages": torch.zeros(2, 21, dtype=torch.uint8), "divisor": 2.0}


def changed(**columns):
    """The table with other numbers in its row."""
    table = ROW.copy()
    for name, number in columns.items():
        table[0, getattr(segments, name)] = number
    return table


@pytest.mark.parametrize(
    ("good", "why", "bad"),
    [
        (QUANTIZE, "no codec 'two_bit'", {"codec": "two_bit"}),
        (QUANTIZE, "not 96", {"chunk": 96}),
        (QUANTIZE, "not 65600", {"chunk": 65600}),
        (QUANTIZE, r"a table has 9 columns of int64, not \(8,\)", {"table": ROW[:, :8]}),
        (QUANTIZE, "a table has 9 columns .* of int32", {"table": ROW.astype(np.int32)}),
        (QUANTIZE, "dtypes in tables are numbers of", {"table": changed(DTYPE=3)}),
        (QUANTIZE, "ends behind the 21 bytes", {"table": changed(AT=1)}),
        (QUANTIZE, "ends behind the 21 bytes", {"table": changed(AT=-1)}),
        (QUANTIZE, "ends behind the 20 bytes", {"messages": BYTES[1:]}),
        (QUANTIZE, "ends behind the 21 bytes", {"table": changed(K=0)}),
        (QUANTIZE, "^messages must have .* strided", {"messages": BYTES.new_zeros(50)[::2]}),
        (QUANTIZE, "^found must have .* of int32", {"found": BYTES}),
        (QUANTIZE, "^found must have at least 4", {"found": words()[:3]}),
        (DEQUANTIZE, "no codec 'int4'", {"codec": "int4"}),
        (DEQUANTIZE, "not 0", {"chunk": 0}),
        (DEQUANTIZE, "ends behind the 21 bytes", {"table": changed(AT=1)}),
        (DEQUANTIZE, "^messages must .* int8", {"messages": torch.zeros(2, 30).to(torch.int8)}),
        (DEQUANTIZE, "^messages must .* strided", {"messages": BYTES.new_zeros(30, 60)[:2, ::2]}),
        (DEQUANTIZE, "1 to 32768 ranks, not 0", {"messages": BYTES.new_zeros(0, 30)}),
    ],
)
def test_what_is_refused(good, why, bad):
    call = KERNELS.quantize if good is QUANTIZE else KERNELS.dequantize
    call(**good)
    with pytest.raises(ConfigurationError, match=why):
        call(**good | bad)


def test_a_table_that_comes_again_is_looked_at_for_other_messages(monkeypatch):
    """Those that begin elsewhere, are shorter, or have headers."""
    launched = []

    def decoder(*constants):
        return lambda programs, *args: launched.append((programs, *constants)), True

    monkeypatch.setattr(KERNELS, "_decoder", decoder)
    memory, tables = torch.zeros(600, dtype=torch.uint8), KERNELS.Tables(CPU)
    begin = -memory.data_ptr() % 16
    table = table_of([{"x": torch.zeros(64)}, {"x": torch.zeros(0)}])
    for first, stride, zero_at in ((0, 256, 0), (4, 256, 0), (0, 256, segments.zero_at(1))):
        messages = memory[begin + first :][: 2 * stride].view(2, stride)
        KERNELS.dequantize("int8", 64, table, messages, 2.0, words(), zero_at, tables)
    assert [(programs, floats) for programs, *_, floats, _, _, _ in launched] == [
        *((1, 16), (1, 4), (2, 16))
    ]
    with pytest.raises(ConfigurationError, match="behind the 252 bytes"):
        KERNELS.dequantize("int8", 64, table, memory[:504].view(2, 252), 2.0, words(), 0, tables)
    KERNELS.quantize("int8", 64, table, memory[:256], words(), 0, tables)
    with pytest.raises(ConfigurationError, match="behind the 252 bytes"):
        KERNELS.quantize("int8", 64, table, memory[:252], words(), 0, tables)
