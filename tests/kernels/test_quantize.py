"""1-bit and 8-bit quantization against wire.md, as NumPy alone reads it, bit for bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import _core, compression, reference, segments
from tests.float_environment import flushes, flushing, needs_flushing
from tests.inputs import dtype_of, order_sensitive, same_bits, subnormal
from tests.kernels.quantized import (
    CODECS,
    FINITE,
    FLOAT,
    INPUTS,
    decode,
    dequantize,
    encode,
    lognormal,
    payload_bytes,
    quantize,
    rounded,
    sum_of,
    usual_chunk,
)
from tests.kernels.segments import found_for, table_of

LEVELS = _core.simd_levels()
TYPES = ["float16", "bfloat16", "float32"]
CHUNK = {codec: usual_chunk(codec) for codec in CODECS}


@settings(deadline=None, max_examples=200)
@given(
    codec=st.sampled_from(CODECS),
    chunk=st.sampled_from([64, 128, 256, 320, 1024, 4096]),
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from(list(INPUTS)),
    holds=st.sampled_from([None, *FINITE]),
    count=st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2048])
    | st.integers(0, 3000),
    seed=st.integers(0, 1000),
)
def test_the_bits_are_the_documents(codec, chunk, dtype, kind, holds, count, seed):
    x = INPUTS[kind](dtype, count, seed)
    held = None if holds is None else INPUTS[holds]("float32", count, seed + 1)
    expected = encode(codec, chunk, sum_of(x, held))
    for level in LEVELS:
        got = quantize(codec, chunk, x, held, level)
        assert (got is None) == (expected is None)
        if expected is not None:
            assert same_bits(got[0], expected[0]), level
            assert same_bits(got[1], expected[1]), level


@settings(deadline=None, max_examples=150)
@given(
    codec=st.sampled_from(CODECS),
    chunk=st.sampled_from([64, 192, 256, 1024, 2048]),
    dtype=st.sampled_from(TYPES),
    rows=st.integers(1, 9) | st.sampled_from([12, 16, 17, 31, 40]),
    count=st.sampled_from([0, 1, 32, 63, 65, 1025]) | st.integers(0, 2500),
    average=st.booleans(),
    hostile=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sums_are_the_contracts(codec, chunk, dtype, rows, count, average, hostile, seed):
    random = np.random.default_rng(seed)
    size, at = payload_bytes(codec, chunk, count), int(random.integers(0, 40))
    messages = random.integers(0, 256, (rows, at + size + int(random.integers(0, 9))), np.uint8)
    if not hostile:
        for row in messages:
            x = order_sensitive("float32", 1, count, int(random.integers(1000)))[0]
            row[at : at + size] = encode(codec, chunk, x)[0]
    leaves = [decode(codec, chunk, row[at : at + size], count) for row in messages]
    with np.errstate(all="ignore"):
        total = reference.tree(leaves, np.add)
        if average:
            total = total / np.float32(rows)
    expected = rounded(total, dtype)
    for level in LEVELS:
        divisor = float(rows) if average else 1.0
        got = dequantize(codec, chunk, messages, at, dtype, count, divisor, level)
        assert same_bits(got, expected), level


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("offset", [0, 4, 15])
@pytest.mark.parametrize("dtype", TYPES)
def test_large_arrays_at_any_place(dtype, offset, codec):
    """What goes past the caches: from 1 MiB of output on."""
    count, chunk = 530_037, CHUNK[codec]
    x = lognormal(dtype, count, offset)
    held = lognormal("float32", count, offset + 1)
    payload, left = encode(codec, chunk, sum_of(x, held))
    total = rounded(decode(codec, chunk, payload, count), dtype)
    for level in LEVELS:
        room = np.full(count + 64, 7, np.float32)
        start = (-room.ctypes.data // 4) % 16 + offset  # so far behind a line's first byte
        got, found = np.empty(len(payload), np.uint8), found_for(1)
        table = table_of([{"x": x, "held": held, "left": room[start : start + count], "k": 1}])
        _core.quantize(codec, chunk, table, got, found, simd=level)
        assert found[segments.BAD] == 0
        assert same_bits(got, payload)
        assert same_bits(room[start : start + count], left)
        assert (room[:start] == 7).all()
        assert (room[start + count :] == 7).all()
        both = np.stack([payload, payload])
        assert same_bits(dequantize(codec, chunk, both, 0, dtype, count, 2, level), total)
        room = np.full(count + 128, 7, dtype_of(dtype))
        start = (-room.ctypes.data // room.itemsize) % (64 // room.itemsize)
        out = room[start : start + count]
        table = table_of([{"x": out, "k": 1}])
        _core.dequantize(codec, chunk, table, payload[None], 1.0, found, simd=level)
        assert same_bits(out, total)
        assert (room[:start] == 7).all()
        assert (room[start + count :] == 7).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_anywhere(bad, codec, level):
    count = 3 * CHUNK[codec] + 45
    good = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    for dtype in TYPES:
        assert quantize(codec, CHUNK[codec], good.astype(dtype_of(dtype)), good, level)
    for at in [*range(0, count, 97), count - 1]:
        worse = good.copy()
        worse[at] = bad
        for dtype in TYPES:
            assert quantize(codec, CHUNK[codec], worse.astype(dtype_of(dtype)), None, level) is None
        assert quantize(codec, CHUNK[codec], good, worse, level) is None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_sum_that_overflows_is_not_finite(codec, level):
    x = np.full(70, FLOAT.max)
    assert quantize(codec, 128, x, np.full(70, FLOAT.max * 0.1, np.float32), level) is None
    assert (encode(codec, 128, x) is None) == (codec == "one_bit")  # a sum of magnitudes
    assert (quantize(codec, 128, x, None, level) is None) == (codec == "one_bit")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", FINITE)
def test_what_is_sent_and_what_is_left_are_what_there_was(kind, codec, dtype, level):
    """Within half an ulp of what is left, in exact numbers."""
    x = INPUTS[kind](dtype, 700, 3)
    held = INPUTS[kind]("float32", 700, 4)
    c = sum_of(x, held)
    got = quantize(codec, 320, x, held, level)
    if got is None:
        assert kind in ("huge", "order sensitive")
        return
    sent = dequantize(codec, 320, got[0][None], 0, "float32", 700, 1, level)
    for put, out, left in zip(c.tolist(), sent.tolist(), got[1].tolist(), strict=True):
        error = abs(Fraction(put) - Fraction(out) - Fraction(left))
        assert error <= Fraction(float(np.spacing(np.float32(abs(left))))) / 2
    norms = [np.linalg.norm(each.astype(np.float64)) for each in (got[1], c)]
    assert norms[0] <= norms[1] * (1 + 2**-23)
    for at in range(0, 700, 320) if codec == "one_bit" else ():
        norms = [np.linalg.norm(v[at : at + 320].astype(np.float64)) for v in (got[1], c)]
        assert norms[0] <= norms[1] * (1 + 2**-23)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("most", [float(FLOAT.max), float(np.nextafter(FLOAT.max, 0)), 1.0, 3e-36])
def test_the_error_of_int8_is_bounded(most, level):
    """By half a scale and 2^-14 of it; whole numbers of a scale have none to speak of."""
    random = np.random.default_rng(1)
    x = np.concatenate([(random.uniform(-1, 1, 5000)), np.arange(-254, 255) / 254, [1, -1]])
    x = (x * most).astype(np.float32)
    x[::256] = np.float32(most)
    payload, left = quantize("int8", 256, x, None, level)
    sent = dequantize("int8", 256, payload[None], 0, "float32", len(x), 1, level)
    assert np.isfinite(sent).all()
    assert np.isfinite(left).all()
    for at in range(0, len(x), 256):
        scale = payload[at // 256 * 260 :][:4].view(np.float32)[0]
        error = x[at : at + 256].astype(np.float64) - sent[at : at + 256].astype(np.float64)
        assert np.abs(error).max() <= (0.5 + 2**-14) * np.float64(scale)


@pytest.mark.parametrize("level", LEVELS)
def test_chunks_too_small_for_a_scale_stay_behind(level):
    tiny = np.full(256, 127 * 2.0**-126 * 0.99, np.float32)
    payload, left = quantize("int8", 256, tiny, None, level)
    assert not payload.any()
    assert same_bits(left, tiny)
    payload, left = quantize("int8", 256, np.full(256, 127 * 2.0**-126, np.float32), None, level)
    assert payload.any()
    assert not left.any()
    least = np.full(1024, 0, np.float32)
    least[5] = -FLOAT.smallest_subnormal
    payload, left = quantize("one_bit", 1024, least, None, level)
    assert payload.nonzero()[0].tolist() == [4]  # a sign, of a scale that is 0
    assert same_bits(left, least)


@pytest.mark.parametrize("level", LEVELS)
def test_nan_scales_become_the_types_nan(level):
    for bits in (0x7F800001, 0xFFC12345, 0x7FFFFFFF):
        record = np.full((1, 260), 255, np.uint8)
        record[0, :4] = np.array([bits], np.uint32).view(np.uint8)
        for codec in CODECS:
            for dtype, nan in [("float16", 0x7E00), ("bfloat16", 0x7FC0), ("float32", 0x7FC00000)]:
                out = dequantize(codec, 256, record, 0, dtype, 256, 1, level)
                assert (out.view(f"u{out.dtype.itemsize}") == nan).all()


# How sums are divided and rounded: once, to nearest, ties to even.


def payload_of(scales):
    """A 1-bit payload of one chunk of 64 for each scale, half of its elements negative."""
    records = np.empty((len(scales), 12), np.uint8)
    records[:, :4] = scales[:, None].view(np.uint8)
    records[:, 4:] = 0x5A
    return records.reshape(-1)


# The bits that a type has not, and its numbers' places in fp32: all exponents, subnormals with it.
DROPPED = {"bfloat16": (16, range(0, 0x7F80, 0x7F)), "float16": (13, range(0x1980, 0x2410, 0xF))}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dtype", DROPPED)
def test_ties_go_to_even(dtype, rows, level):
    """Halfway between two numbers of the type, and a step of fp32's to both sides of it."""
    dropped, kept = DROPPED[dtype]
    upper = np.array(kept, np.int64) << dropped
    # fp16's subnormals drop up to ten bits more.
    halves = [1 << bit for bit in range(dropped - 1, min(dropped + 10, 22))]
    ties = [upper & ~(4 * half - 1) | odd * 2 * half | half for half in halves for odd in (0, 1)]
    near = np.concatenate([tie + step for tie in ties for step in (-1, 0, 1)])
    scales = near.astype(np.uint32).view(np.float32)
    payload, count = payload_of(scales), 64 * len(scales)
    expected = rounded(decode("one_bit", 64, payload, count), dtype)
    # As many rows of it, divided by as many: the very same numbers, but where a sum overflows.
    messages = np.repeat(payload[None], rows, axis=0)
    got = dequantize("one_bit", 64, messages, 0, dtype, count, float(rows), level)
    small = np.repeat(scales < FLOAT.max / 8, 64)
    assert same_bits(got[small], expected[small])
    assert rows > 1 or same_bits(got, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divisor", [0.75, 1 / 3, 2.0**-126, float(FLOAT.max)])
def test_any_divisor_divides(divisor, level):
    """Those below 1 too, and once: not by its reciprocal."""
    divisor = np.float32(divisor)
    payload = encode("int8", 64, lognormal("float32", 300, 0))[0]
    with np.errstate(over="ignore"):
        expected = decode("int8", 64, payload, 300) / divisor
    got = dequantize("int8", 64, payload[None], 0, "float32", 300, float(divisor), level)
    assert same_bits(got, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_int8_is_the_integer_nearest_to_the_documents_product(level):
    """c times (127 / a), which near a tie is not c / scale, nor c times (1 / scale)."""
    random = np.random.default_rng(0)
    largest = (1 + random.random((2000, 1))).astype(np.float32) * 2.0 ** random.integers(-80, 80)
    ties = (random.integers(-127, 127, (2000, 64)) + 0.5) / 127 * largest
    c = ties.astype(np.float32)
    for step, toward in ((1, np.inf), (2, -np.inf)):
        c[:, step::3] = np.nextafter(c[:, step::3], np.float32(toward))
    c[:, :1] = largest.astype(np.float32)
    expected = encode("int8", 64, c.reshape(-1))
    got = quantize("int8", 64, c.reshape(-1), None, level)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])


@needs_flushing
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_host_that_flushes_subnormals_changes_nothing(codec, level):
    x = subnormal("float32", 1, 1000)[0]
    expected = encode(codec, 128, x)
    with flushing():
        payload, left = quantize(codec, 128, x, None, level)
        out = dequantize(codec, 128, payload[None], 0, "float32", 1000, 3, level)
        assert flushes()  # the host's state is back
    assert same_bits(payload, expected[0])
    assert same_bits(left, expected[1])
    assert same_bits(out, decode(codec, 128, payload, 1000) / np.float32(3))


def test_codecs_and_their_bytes():
    assert set(_core.quantize_codecs()) == set(CODECS)
    assert set(compression.CODECS) - set(CODECS) == {"top_k"}
    for codec in CODECS:
        for chunk in (64, 1024, 65536):
            for count in (0, 1, 7, 9, 63, 64, 65, 1024, 65537, 200_000):
                expected = payload_bytes(codec, chunk, count)
                assert _core.quantized_bytes(codec, chunk, count) == expected
