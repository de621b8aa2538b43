"""1-bit and 8-bit quantization against docs/wire.md, as NumPy alone reads it, bit for bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import ConfigurationError, _core, compression, reference
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
from tests.kernels.refusals import read_only

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
        got = np.empty(len(payload), np.uint8)
        assert _core.quantize(codec, chunk, x, held, room[start : start + count], got, level)
        assert same_bits(got, payload)
        assert same_bits(room[start : start + count], left)
        assert (room[:start] == 7).all()
        assert (room[start + count :] == 7).all()
        both = np.stack([payload, payload])
        assert same_bits(dequantize(codec, chunk, both, 0, dtype, count, 2, level), total)
        room = np.full(count + 128, 7, dtype_of(dtype))
        start = (-room.ctypes.data // room.itemsize) % (64 // room.itemsize)
        out = room[start : start + count]
        _core.dequantize(codec, chunk, payload[None], 0, out, 1.0, level)
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
    expected = encode(codec, 128, x)
    assert (quantize(codec, 128, x, None, level) is None) == (expected is None)


def test_a_sum_of_magnitudes_that_overflows_is_one_bits():
    assert encode("one_bit", 128, np.full(70, FLOAT.max)) is None
    assert encode("int8", 128, np.full(70, FLOAT.max)) is not None


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


def test_the_document_has_every_codec_and_python_a_state_of_each():
    assert set(_core.quantize_codecs()) == set(CODECS)
    assert set(compression.CODECS) - set(CODECS) == {"top_k"}


def test_bytes():
    assert _core.quantized_bytes("one_bit", 1024, 1 << 22) * 31 < 4 << 22
    for codec in CODECS:
        for chunk in (64, 1024, 65536):
            for count in (0, 1, 7, 9, 63, 64, 65, 1024, 65537, 200_000):
                expected = payload_bytes(codec, chunk, count)
                assert _core.quantized_bytes(codec, chunk, count) == expected


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.randn(3000, dtype=torch.bfloat16)
    held, left = torch.randn(3000), torch.empty(3000)
    payload = torch.empty(_core.quantized_bytes("one_bit", 1024, 3000), dtype=torch.uint8)
    assert _core.quantize("one_bit", 1024, x, held, left, payload)
    expected = encode("one_bit", 1024, (x.float() + held).numpy())
    assert same_bits(payload.numpy(), expected[0])
    assert same_bits(left.numpy(), expected[1])
    out = torch.empty(3000, dtype=torch.bfloat16)
    _core.dequantize("one_bit", 1024, payload[None], 0, out, 1.0)
    narrow = decode("one_bit", 1024, expected[0], 3000).astype(dtype_of("bfloat16"))
    assert same_bits(out.view(torch.int16).numpy(), narrow.view(np.int16))


def arguments(**changed):
    x = np.zeros(100, np.float32)
    given = {
        "codec": "one_bit",
        "chunk": 64,
        "x": x,
        "held": np.zeros(100, np.float32),
        "left": np.zeros(100, np.float32),
        "payload": np.zeros(4 + 8 + 4 + 5, np.uint8),
    }
    return {**given, **changed}


SHARED = np.zeros(200, np.float32)
REFUSED = {
    "no codec": {"codec": "two_bit"},
    "a chunk": {"chunk": 96},
    "a chunk is": {"chunk": 65536 + 64},
    "not 0": {"chunk": 0},
    "not -64": {"chunk": -64},
    "no quantization of float64": {"x": np.zeros(100)},
    "x must be contiguous": {"x": np.zeros(200, np.float32)[::2]},
    "held must be of float32": {"held": np.zeros(100, np.float16)},
    "held must have as many elements as x: 100": {"held": np.zeros(99, np.float32)},
    "left must be of float32": {"left": np.zeros(100)},
    "left must have as many elements as x: 100": {"left": np.zeros(101, np.float32)},
    "read-only": {"left": read_only(np.zeros(100, np.float32))},
    "payload.*read-only": {"payload": read_only(np.zeros(30, np.uint8))},
    "payload must be of uint8": {"payload": np.zeros(30, np.int8)},
    "payload must have room for 21": {"payload": np.zeros(20, np.uint8)},
    "left must not overlap held": {"left": SHARED[:100], "held": SHARED[99:199]},
    "left must not overlap x": {"left": SHARED[:100], "x": SHARED[:100]},
    "left must not overlap payload": {"left": SHARED[:100], "payload": SHARED.view(np.uint8)[399:]},
    "payload must not overlap x": {"x": SHARED[:100], "payload": SHARED.view(np.uint8)},
    "payload must not overlap held": {"held": SHARED[:100], "payload": SHARED.view(np.uint8)},
    "no SIMD level": {"simd": "avx1024"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_quantize_refuses(message):
    assert _core.quantize(**arguments())
    with pytest.raises(ConfigurationError, match=message):
        _core.quantize(**arguments(**REFUSED[message]))


def test_an_unknown_codec_is_refused_with_the_names_there_are():
    for name in ("two_bit", "one_bit ", "", "INT8"):
        with pytest.raises(ConfigurationError) as caught:
            _core.quantized_bytes(name, 64, 1)
        *first, last = CODECS
        there_are = f"no codec '{name}'; there are {', '.join(first)} and {last}"
        assert str(caught.value).endswith(there_are)


BYTES = np.zeros((3, 30), np.uint8)
REFUSED_SUMS = {
    "no codec": {"codec": "int4"},
    "a chunk": {"chunk": 1},
    "messages must be of uint8": {"messages": BYTES.view(np.int8)},
    "messages must be contiguous": {"messages": BYTES[:, :29]},
    "a row for each rank": {"messages": BYTES[0]},
    "1 to 32768": {"messages": BYTES[:0]},
    "row for each rank, 1 to 32768": {"messages": np.zeros((32769, 21), np.uint8), "at": 0},
    "30 bytes do not hold 21 from byte 10 on": {"at": 10},
    "from byte -1": {"at": -1},
    "from byte 31": {"at": 31, "out": np.zeros(0, np.float32)},
    "no quantization of int32": {"out": np.zeros(100, np.int32)},
    "out must be contiguous": {"out": np.zeros(200, np.float32)[::2]},
    "read-only": {"out": read_only(np.zeros(100, np.float32))},
    "divisor": {"divisor": 0.0},
    "a finite": {"divisor": 1e39},
    "above 0": {"divisor": float("nan")},
    "out must not overlap messages": {
        "messages": SHARED.view(np.uint8).reshape(10, -1),
        "out": SHARED[100:200],
    },
}


@pytest.mark.parametrize("message", REFUSED_SUMS)
def test_dequantize_refuses(message):
    given = {"codec": "one_bit", "chunk": 64, "messages": BYTES, "at": 9, "divisor": 3.0}
    given["out"] = np.zeros(100, np.float32)
    _core.dequantize(**given)
    with pytest.raises(ConfigurationError, match=message):
        _core.dequantize(**{**given, **REFUSED_SUMS[message]})


def test_neighbours_do_not_overlap():
    """Arrays one behind the other, in any order."""
    for first in range(3):
        room = np.zeros(3 * 64, np.float32)
        x, left, held = (room[(first + i) % 3 * 64 :][:64] for i in range(3))
        x[:] = held[:] = np.arange(64)
        assert _core.quantize("int8", 64, x, held, left, np.zeros(68, np.uint8))
    room = np.zeros(68 + 256, np.uint8)
    assert _core.quantize("int8", 64, x, None, room[:256].view(np.float32), room[256:])
    _core.dequantize("int8", 64, room[256:][None], 0, room[:256].view(np.float32), 1.0)


def test_no_bytes_of_what_is_no_array():
    others = [("int8", 64, -1), ("int8", 64, 2**63 - 1), ("one_bit", 64, 2**57)]
    for codec, chunk, count in [("int8", 100, 1), ("zip", 64, 1), *others]:
        with pytest.raises(ConfigurationError):
            _core.quantized_bytes(codec, chunk, count)
