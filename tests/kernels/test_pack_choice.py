"""Which payload an encoder makes: wire.md's choice of mode, window, depth and drop, by NumPy.

All that a decoder takes would come back right; but encoders make one payload on every processor,
and the shortest that the document describes.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.native_parts import pack_into
from pycollective import _core
from tests.inputs import dtype_of, from_words

LEVELS = _core.simd_levels()
BLOCK = 128
EXPONENT = {"float16": 5, "bfloat16": 8, "float32": 8}
FAR = 1 << 20  # deeper, or lower, than all that fits
RAW = (0, 0xFF, 0, 0)


def window(words, dtype):
    """Bytes and header of the best exponent window."""
    bits = 8 * words.itemsize
    exponent = EXPONENT[dtype]
    stored = words.astype(np.int64) >> bits - 1 - exponent & 2**exponent - 1
    base = int(stored.max())
    rows = 16 * (bits - exponent)
    choices = [(rows, 0, 0)] if (stored == base).all() else []
    for planes in range(1, exponent):
        escaped = int((base - stored >= 2**planes - 1).sum())
        choices.append((rows + 16 * planes + escaped, planes, escaped))
    size, planes, escaped = min(choices)
    return size, (base, 32 + planes, escaped, 0)


def fixed(words):
    """The same of fixed point."""
    exponent = words.astype(np.int64) >> 23 & 255
    number = (exponent > 0) & (exponent < 255)
    top = int(exponent[number].max(initial=0))
    mantissa = words.astype(np.int64) & 0x7FFFFF | 0x800000
    lowest = np.log2(mantissa & -mantissa).astype(np.int64)
    drop = np.where(number, top - exponent, FAR)
    depth = np.where(number, drop + 23 - lowest, np.where(words == 0, -1, FAR))

    deeper = (depth[:, None] > np.arange(30)).sum(0).tolist()
    alone = [(128 * x + 32 * deeper[x], False, x) for x in range(26)]
    in_two = [
        (128 * (x + 1) + 4 * (deeper[x] - deeper[x + 4]) + 32 * deeper[x + 4], True, x)
        for x in range(26)
    ]
    _, marks, x = min(alone + in_two)
    drops = np.arange(max(1, min(x + 1, top)))
    y = int(np.argmax(128 * drops - 32 * (drop[:, None] < drops).sum(0)))
    escaped = (depth > x + 4 * marks) | (drop < y)
    marked = int(((depth > x) & ~escaped).sum())
    header = (top - y, x - y + 2, int(escaped.sum()), marked)
    size = 16 * (header[1] + (marked > 0)) + -(-marked // 2) + 4 * header[2]
    return size, header


def chosen(words, dtype):
    """A block's header."""
    if not words.any():
        return (0, 0, 0, 0)
    choices = [(words.nbytes, RAW), *([fixed(words)] if dtype == "float32" else [])]
    return min([*choices, window(words, dtype)], key=lambda choice: choice[0])[1]


def windows(dtype, blocks, random):
    """Exponents some way below a largest one; of a few blocks some are of any kind."""
    word = np.dtype(f"u{dtype_of(dtype).itemsize}")
    bits, exponent = 8 * word.itemsize, EXPONENT[dtype]
    words = random.integers(0, 2**bits, (blocks, BLOCK), np.uint64)
    top = random.integers(0, 2**exponent, (blocks, 1))
    within = random.choice([1, 2, 3, 4, 7, 8, 15, 30, 64, 126], (blocks, 1))
    often = random.choice([0.02, 0.13, 0.25, 0.5, 1], (blocks, 1))
    below = random.integers(0, within + 1) * (random.random(words.shape) < often)
    stored = np.maximum(top - below, 0).astype(np.uint64) << np.uint64(bits - 1 - exponent)
    keep = ~np.uint64(2**exponent - 1 << bits - 1 - exponent)
    any_at_all = (random.random(words.shape) < 0.02) & (random.random((blocks, 1)) < 0.3)
    return np.where(any_at_all, words, words & keep | stored).astype(word)


def multiples(blocks, random):
    """Multiples of a power of two; of a few blocks some lie deeper, are zeros or no numbers."""
    width = random.integers(1, 28, (blocks, 1))
    integers = random.integers(-(1 << width), (1 << width) + 1, (blocks, BLOCK))
    small = random.random(integers.shape) < random.choice([0, 0.3, 0.9], (blocks, 1))
    integers = np.where(small, integers >> random.integers(1, 12, (blocks, 1)), integers)
    deeper = random.random(integers.shape) < random.choice([0, 0.05, 0.3], (blocks, 1))
    fractions = np.where(deeper, random.integers(0, 64, integers.shape), 0)
    values = (64.0 * integers + fractions).astype(np.float32)
    scale = random.integers(-165, 90, (blocks, 1))
    words = np.ldexp(values, scale).astype(np.float32).view(np.uint32)
    special = np.array([0x80000000, 0x7F800000, 1, 0x7FC12345, 0xFF800000, 0], np.uint32)
    rare = random.random(words.shape) < random.choice([0, 0, 0.02, 0.6], (blocks, 1))
    return np.where(rare, random.choice(special, words.shape), words)


@pytest.mark.parametrize("dtype", EXPONENT)
def test_headers_are_what_the_document_chooses(dtype):
    random = np.random.default_rng(5)
    words = windows(dtype, 1000, random)
    if dtype == "float32":
        words = np.concatenate([words, multiples(1500, random)])
    want = [chosen(block, dtype) for block in words]
    # Zeros behind them, so that no payload is raw as a whole.
    words = np.concatenate([words, np.zeros((len(words) // 16, BLOCK), words.dtype)])
    x = from_words(words.reshape(-1), dtype)
    for level in LEVELS:
        payload = np.empty(x.nbytes, np.uint8)
        assert pack_into(x, payload, level) < x.nbytes
        size = 4 if dtype == "float32" else 3
        headers = payload[: size * len(words)].reshape(-1, size).tolist()
        assert [tuple([*header, 0][:4]) for header in headers[: len(want)]] == want
