"""Exact packing as a payload's reader sees it: wire.md's format, read here by plain Python.

The native tests (csrc/tests/test_kernels.cpp) feed the codecs all that could break them; here
payloads are taken apart by a second decoder, which knows the document alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.native_parts import pack_into, unpack_into
from pycollective import _core, reference
from tests.inputs import awkward, dtype_of, from_words, order_sensitive, same_bits

LEVELS = _core.simd_levels()
TYPES = ["float16", "bfloat16", "float32"]
EXPONENT = {"float16": 5, "bfloat16": 8, "float32": 8}
HEADER = {"float16": 3, "bfloat16": 3, "float32": 4}
BLOCK = 128


def pack(x, simd=""):
    out = np.empty(x.nbytes, np.uint8)
    return out[: pack_into(x, out, simd)].copy()


def unpack(payload, dtype, count, simd=""):
    out = np.empty(count, dtype_of(dtype))
    unpack_into(payload, out, simd)
    return out


def bits_of(row):
    return np.unpackbits(row, bitorder="little")


def window_block(base, planes, exceptions, body, escaped_bytes, dtype):
    """The words of a block in window mode."""
    size = dtype_of(dtype).itemsize
    rest_bits = 8 * size - EXPONENT[dtype]
    turned = np.zeros(BLOCK, np.uint64)
    for byte in range(rest_bits // 8):
        turned |= body[byte * BLOCK :][:BLOCK].astype(np.uint64) << np.uint64(8 * byte)
    rows = body[rest_bits // 8 * BLOCK :].reshape(-1, 16)
    for bit in range(rest_bits % 8):
        turned |= bits_of(rows[bit]).astype(np.uint64) << np.uint64(rest_bits // 8 * 8 + bit)
    codes = np.zeros(BLOCK, int)
    for bit, row in enumerate(rows[rest_bits % 8 :]):
        codes |= bits_of(row).astype(int) << bit
    exponents = base - codes
    if planes:
        escaped = codes == 2**planes - 1
        assert escaped.sum() == exceptions
        exponents[escaped] = escaped_bytes
    turned |= exponents.astype(np.uint64) << np.uint64(rest_bits)
    return turned >> np.uint64(1) | (turned & np.uint64(1)) << np.uint64(8 * size - 1)


def fixed_block(header, body, apart):
    """The words of a block in fixed-point mode; `apart` is its part of the payload's end."""
    base, width, escaped, marked = header
    fields = np.empty(BLOCK, np.int64)
    for lane in range(4):
        string = bits_of(body[: 16 * width].reshape(width, 4, 4)[:, lane].reshape(-1))
        fields[lane::4] = string.reshape(BLOCK // 4, width) @ (1 << np.arange(width))
    marks = bits_of(body[16 * width :] if marked else np.zeros(16, np.uint8)) > 0
    assert marks.sum() == marked
    halves = (marked + 1) // 2
    lower = np.stack([apart[:halves] & 15, apart[:halves] >> 4], axis=1).reshape(-1)
    assert not lower[marked:].any()
    sign, magnitude = fields & 1, fields >> 1 << 4
    whole = (fields == 1) & ~marks
    assert whole.sum() == escaped
    magnitude[marks] += lower[:marked]
    # The magnitude's highest bit, number `width + 2`, is worth 2^(base - 127).
    values = np.ldexp(magnitude.astype(np.float64), base - 127 - width - 2)
    found = np.where(sign, -values, values).astype(np.float32).view(np.uint32)
    found[whole] = apart[halves:].view(np.uint32)
    return found.astype(np.uint64)


def read(payload, dtype, count):
    """What a payload holds, by docs/inside/wire.md; and the modes of its blocks."""
    kind = dtype_of(dtype)
    word = np.dtype(f"u{kind.itemsize}")
    if len(payload) == count * kind.itemsize:
        return payload.view(kind), {"whole"}
    blocks, header_bytes = count // BLOCK, HEADER[dtype]
    at, end = header_bytes * blocks, len(payload)
    found, modes = [], set()
    for header in payload[:at].reshape(-1, header_bytes).tolist():
        base, mode, escaped, marked = [*header, 0][:4]
        apart = escaped
        if mode == 0:
            rows = 0
        elif mode == 0xFF:
            rows = BLOCK * kind.itemsize
        elif mode < 32:
            assert dtype == "float32"
            rows, apart = 16 * (mode + (marked > 0)), (marked + 1) // 2 + 4 * escaped
        else:
            assert mode - 32 < EXPONENT[dtype]
            rows = 16 * (8 * kind.itemsize - EXPONENT[dtype] + mode - 32)
        body, tail = payload[at : at + rows], payload[end - apart : end]
        at, end = at + rows, end - apart
        if mode == 0:
            found.append(np.zeros(BLOCK, np.uint64))
        elif mode == 0xFF:
            found.append(body.view(word).astype(np.uint64))
        elif mode < 32:
            found.append(fixed_block((base, mode, escaped, marked), body, tail))
        else:
            found.append(window_block(base, mode - 32, escaped, body, tail, dtype))
        modes.add((mode, marked > 0) if mode < 32 else mode)
    assert end - at == count % BLOCK * kind.itemsize
    found.append(payload[at:end].view(word).astype(np.uint64))
    return from_words(np.concatenate(found).astype(word), dtype), modes


def gradients(dtype, count, leaves, seed):
    """Gaussian bf16 leaves' sums, or one leaf of any other type."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal((leaves, count), np.float32)
    if dtype == "float32":
        rounded = [leaf.astype(dtype_of("bfloat16")).astype(np.float32) for leaf in normal]
        return reference.tree(rounded, np.add)
    return normal[0].astype(dtype_of(dtype))


INPUTS = {
    "gradients": lambda dtype, count, seed: gradients(dtype, count, 2 + seed % 7, seed),
    "leaves": lambda dtype, count, seed: (
        np.random.default_rng(seed).standard_normal(count).astype(dtype_of(dtype))
    ),
    "order sensitive": lambda dtype, count, seed: order_sensitive(dtype, 3, count, seed)[0],
    "awkward": lambda dtype, count, seed: awkward(dtype, 3, count, seed)[0],
    "zeros": lambda dtype, count, seed: np.zeros(count, dtype_of(dtype)),
}


@settings(deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from(list(INPUTS)),
    count=st.sampled_from([0, 1, 127, 128, 129, 256, 640, 1000]) | st.integers(0, 1500),
    seed=st.integers(0, 1000),
)
def test_round_trip_and_one_payload_at_all_levels(dtype, kind, count, seed):
    x = INPUTS[kind](dtype, count, seed)
    payload = pack(x, "portable")
    assert len(payload) <= x.nbytes
    for level in LEVELS:
        assert same_bits(pack(x, level), payload)
        assert same_bits(unpack(payload, dtype, count, level), x)
    assert same_bits(read(payload, dtype, count)[0], x)


def test_the_document_is_read_in_every_mode():
    """Each mode that the document names is met, so that the reader above has proved it."""
    seen = {dtype: set() for dtype in TYPES}
    random = np.random.default_rng(0)
    for dtype in TYPES:
        size, exponent = dtype_of(dtype).itemsize, EXPONENT[dtype]
        word = np.dtype(f"u{size}")
        for spread, often in itertools.product([*range(16), 30, 60, 126, 255], [1, 0.03]):
            bits = random.integers(0, 2 ** (8 * size), 1280, dtype=np.uint64).astype(word)
            shift = word.type(8 * size - 1 - exponent)
            top = word.type(2**exponent - 1 - 2)
            below = random.integers(0, spread + 1, 1280).astype(word)
            below *= random.random(1280) < often
            exponents = np.maximum(top, below) - below
            bits = bits & ~(word.type(2**exponent - 1) << shift) | exponents << shift
            bits[128:256] = 0
            x = from_words(bits, dtype)
            got, modes = read(pack(x), dtype, 1280)
            assert same_bits(got, x)
            seen[dtype] |= modes
        for wide in range(1, 30) if dtype == "float32" else ():
            x = random.integers(-(2**wide) + 1, 2**wide, 256).astype(np.float32)
            for deeper in (0, 0.2):
                few = random.random(256) < deeper
                x[few] += np.ldexp(random.integers(1, 8, few.sum()), -3).astype(np.float32)
                got, modes = read(pack(x), dtype, 256)
                assert same_bits(got, x)
                seen[dtype] |= modes
    # Wider fields than 24 bits are rare: an exponent window mostly takes less.
    zero, fields = (0, False), range(3, 25)
    assert seen["float16"] == {zero, 0xFF, *range(32, 37)}
    assert seen["bfloat16"] == {zero, 0xFF, *range(32, 40)}
    assert seen["float32"] >= {zero, 0xFF, *range(32, 39), *((width, False) for width in fields)}
    assert seen["float32"] >= {(width, True) for width in range(4, 22)}


# What no encoder makes, one fault each: (dtype, header, bytes of the body and of what is apart).
REFUSED = {
    "an unknown mode": ("float32", (0, 28, 0, 0), 0),
    "a mode of another type": ("bfloat16", (0, 9, 0), 0),
    "an escaped element in a zero block": ("bfloat16", (0, 0, 1), 0),
    "a base of a raw block": ("bfloat16", (1, 0xFF, 0), 256),
    "a window of all of the exponent": ("float16", (15, 37, 0), 128 + 8 * 16),
    "a base above fp16's exponents": ("float16", (32, 33, 0), 128 + 4 * 16),
    "an exponent above fp16's": ("float16", (15, 33, 1), 128 + 4 * 16 + 1),
    "fewer escaped than are said to be": ("bfloat16", (127, 33, 2), 128 + 16 + 2),
    "escaped that are not said": ("bfloat16", (127, 33, 0), 128 + 16),
    "marked ones in a window": ("float32", (127, 33, 0, 1), 384 + 16),
    "fewer marked than are said": ("float32", (127, 9, 0, 2), 160 + 1),
    "fewer fp32 escaped than are said": ("float32", (127, 9, 1, 0), 144 + 4),
}


def refused_payload(fault):
    """(type, payload) of two blocks."""
    dtype, header, rest = REFUSED[fault]
    body = np.zeros(rest, np.uint8)
    if fault in ("escaped that are not said", "an exponent above fp16's"):
        body[128 + 16 * (dtype == "float16") * 3] = 1  # the one window plane
    if fault == "an exponent above fp16's":
        body[-1] = 32
    # Two blocks, of which the second is zeros: short enough not to be taken for raw.
    second = np.zeros(HEADER[dtype], np.uint8)
    return dtype, np.concatenate([np.array(header, np.uint8), second, body])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fault", REFUSED)
def test_what_no_encoder_makes_is_refused(fault, level):
    dtype, payload = refused_payload(fault)
    with pytest.raises(ValueError, match="no payload"):
        unpack(payload, dtype, 256, level)


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_without_the_fault_is_taken(level):
    """So that the test above is of its faults alone."""
    for dtype, header, rest, plane in [
        ("bfloat16", (127, 33, 1), 128 + 16 + 1, 128),
        ("float16", (15, 33, 1), 128 + 4 * 16 + 1, 128 + 48),
        ("float32", (127, 9, 0, 1), 160 + 1, 144),
    ]:
        body = np.zeros(rest, np.uint8)
        body[plane] = 1
        second = np.zeros(HEADER[dtype], np.uint8)
        payload = np.concatenate([np.array(header, np.uint8), second, body])
        out = unpack(payload, dtype, 256, level)
        assert same_bits(out, read(payload, dtype, 256)[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_worst_case_is_what_the_elements_take(dtype, level):
    size = dtype_of(dtype).itemsize
    x = np.random.default_rng(0).integers(0, 256, 10_000 * size, np.uint8).view(dtype_of(dtype))
    assert len(pack(x, level)) == x.nbytes


@pytest.mark.parametrize("level", LEVELS)
def test_what_gradients_take(level):
    """Bits an element of Gaussian data, as the document says."""
    most = {("bfloat16", 1): 11.5, ("float16", 1): 14.5, ("float32", 1): 27.5}
    sums = {("float32", 2): 15.3, ("float32", 4): 16.9, ("float32", 8): 18.1}
    for (dtype, leaves), bits in (most | sums).items():
        x = gradients(dtype, 128_000, leaves, 0)
        if (dtype, leaves) == ("float32", 1):
            x = np.random.default_rng(0).standard_normal(128_000, np.float32)
        assert 8 * len(pack(x, level)) / len(x) < bits, (dtype, leaves)
