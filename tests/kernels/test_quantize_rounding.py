"""How sums of quantized payloads are divided and rounded: once, to nearest, ties to even."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _core
from tests.inputs import same_bits
from tests.kernels.quantized import (
    FLOAT,
    decode,
    dequantize,
    encode,
    lognormal,
    quantize,
    rounded,
)

LEVELS = _core.simd_levels()


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
