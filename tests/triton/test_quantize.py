"""1-bit and 8-bit quantization in Triton's interpreter gives what the CPU's kernels give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycollective import ConfigurationError, _core
from tests.inputs import dtype_of, from_words, same_bits
from tests.kernels import quantized as cpu
from tests.triton.compiled import module

KERNELS = module("quantize", interpreted=True)
DTYPES = ["float32", "float16", "bfloat16"]
BIT, OTHERS = 1, 6  # of flags: that something is not finite, and what is not touched


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


def quantize(codec, chunk, x, held=None):
    """(payload, left), or None if the flag is set. Nothing else is written."""
    size = _core.quantized_bytes(codec, chunk, len(x))
    payload = torch.full((size + 40,), 0xA5, dtype=torch.uint8)
    left = torch.full((len(x) + 32,), 7.0)
    flags = torch.full((1,), OTHERS, dtype=torch.int32)
    own, errors = payload[17 : 17 + size], left[16 : 16 + len(x)]
    before = None if held is None else tensor(held)
    KERNELS.quantize(codec, chunk, tensor(x), before, errors, own, flags)
    assert (payload[:17] == 0xA5).all()
    assert (payload[17 + size :] == 0xA5).all()
    assert (left[:16] == 7).all()
    assert (left[16 + len(x) :] == 7).all()
    assert flags.item() in (OTHERS, OTHERS | BIT)
    return None if flags.item() & BIT else (own.numpy(), errors.numpy())


def dequantize(codec, chunk, messages, at, dtype, count, divisor):
    out = torch.full((count + 64,), 3, dtype=getattr(torch, dtype))
    own = out[31 : 31 + count]
    KERNELS.dequantize(codec, chunk, torch.from_numpy(messages), at, own, divisor)
    assert (out[:31] == 3).all()
    assert (out[31 + count :] == 3).all()
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
        worse = good.copy()
        worse[at] = bad
        dtype = dtype_of(DTYPES[number % 3])
        assert check_quantized(codec, 64, worse.astype(dtype)) is None
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
    for each, divisor in ((messages, 1.0), (honest, 3 * rows / 7)):
        want = cpu.dequantize(codec, chunk, each, at, dtype, count, divisor)
        assert same_bits(dequantize(codec, chunk, each, at, dtype, count, divisor), want)


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


FLOATS, BYTES = torch.zeros(100), torch.zeros(21, dtype=torch.uint8)
STRIDED = torch.zeros(200)[::2]
QUANTIZE = {"codec": "one_bit", "chunk": 64, "x": FLOATS, "held": FLOATS, "left": torch.zeros(100)}
QUANTIZE |= {"payload": BYTES, "flags": torch.zeros(1, dtype=torch.int32)}
DEQUANTIZE = {"codec": "one_bit", "chunk": 64, "messages": torch.zeros(2, 30, dtype=torch.uint8)}
DEQUANTIZE |= {"at": 9, "out": FLOATS, "divisor": 2.0}


@pytest.mark.parametrize(
    ("good", "why", "bad"),
    [
        (QUANTIZE, "no codec 'two_bit'", {"codec": "two_bit"}),
        (QUANTIZE, "not 96", {"chunk": 96}),
        (QUANTIZE, "not 65600", {"chunk": 65600}),
        (QUANTIZE, "^x must have .* not 100 ones of float64 on cpu", {"x": FLOATS.double()}),
        (QUANTIZE, "^x must have .* not 50 strided ones", {"x": FLOATS[::2]}),
        (QUANTIZE, "^held must have at least 100 contiguous .* not 99", {"held": FLOATS[1:]}),
        (QUANTIZE, "^held must have .* not 100 strided", {"held": STRIDED}),
        (QUANTIZE, "^held must have .* on cpu, not .* on meta", {"held": FLOATS.to("meta")}),
        (QUANTIZE, "^left must have .* of float32 .* of float16", {"left": FLOATS.half()}),
        (QUANTIZE, "^left must have .* not 100 strided", {"left": STRIDED}),
        (QUANTIZE, "^payload must have at least 21", {"payload": BYTES[1:]}),
        (QUANTIZE, "^payload must have .* not 25 strided", {"payload": BYTES.new_zeros(50)[::2]}),
        (QUANTIZE, "^flags must have .* of int32", {"flags": BYTES}),
        (DEQUANTIZE, "no codec 'int4'", {"codec": "int4"}),
        (DEQUANTIZE, "not 0", {"chunk": 0}),
        (DEQUANTIZE, "of 100 elements from byte 10 on", {"at": 10}),
        (DEQUANTIZE, "from byte -1 on", {"at": -1}),
        (DEQUANTIZE, "^messages must .* int8", {"messages": torch.zeros(2, 30).to(torch.int8)}),
        (DEQUANTIZE, "^messages must .* strided", {"messages": BYTES.new_zeros(30, 60)[:2, ::2]}),
        (DEQUANTIZE, "^out must .* strided", {"out": STRIDED}),
        (DEQUANTIZE, "1 to 32768 ranks, not 0", {"messages": BYTES.new_zeros(0, 30)}),
        (DEQUANTIZE, "^out must have .* of int32", {"out": FLOATS.int()}),
    ],
)
def test_what_is_refused(good, why, bad):
    call = KERNELS.quantize if good is QUANTIZE else KERNELS.dequantize
    call(**good)
    with pytest.raises(ConfigurationError, match=why):
        call(**good | bad)
