"""Packed indices as their reader sees them: wire.md's format, read here by plain Python.

The native tests (csrc/tests/test_kernels.cpp) feed the decoder everything that could break it; here
payloads are taken apart by a second one, which knows the document alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError, _core
from tests.inputs import same_bits

LEVELS = _core.simd_levels()
BLOCK = 128
GAPS = 1


def pack(indices, size, simd=""):
    bound = _core.pack_indices_bound(len(indices), size)
    out = np.full(bound + 64, 7, np.uint8)
    many = _core.pack_indices(np.asarray(indices, np.uint32), size, out[:bound], simd)
    assert many <= bound
    assert (out[bound:] == 7).all()
    return out[:many].copy()


def unpack(payload, size, count, simd=""):
    room = np.full(count + 16, 7, np.uint32)
    _core.unpack_indices(payload, size, room[:count], simd)
    assert (room[count:] == 7).all()
    return room[:count]


def read(payload, count):
    """The indices of a payload, by docs/inside/wire.md."""
    assert payload[0] == GAPS
    blocks = -(-count // BLOCK)
    headers = payload[1 : 1 + 2 * blocks].reshape(-1, 2).tolist()
    at, before, found = 1 + 2 * blocks, -1, []
    for number, (width, unary_bytes) in enumerate(headers):
        here = min(BLOCK, count - BLOCK * number)
        if unary_bytes == 0:
            assert width == 0
            found += range(before + 1, before + 1 + here)
            before += here
            continue
        unary = np.unpackbits(payload[at : at + unary_bytes], bitorder="little")
        ones = np.nonzero(unary)[0]
        assert len(ones) == here
        assert len(unary) - 1 - ones[-1] < 8
        at += unary_bytes
        low_bytes = -(-here * width // 8)
        low = np.unpackbits(payload[at : at + low_bytes], bitorder="little")
        assert not low[here * width :].any()
        at += low_bytes
        zeros = np.diff(ones, prepend=-1) - 1
        for i in range(here):
            field = low[i * width : (i + 1) * width].tolist()
            lower = sum(bit << place for place, bit in enumerate(field))
            before += 1 + (int(zeros[i]) << width) + lower
            found.append(before)
    assert at == len(payload)
    return found


def random_places(size, density, seed=0):
    return np.nonzero(np.random.default_rng(seed).random(size) < density)[0].astype(np.uint32)


def far_apart(size):
    """Runs with a wide gap behind each 20: too wide for few bits, too rare to pay for many."""
    places = np.arange(size // 3000)
    places += places // 20 * 50_000
    return places[places < size].astype(np.uint32)


PLACES = {
    "none": lambda: (np.zeros(0, np.uint32), 1000),
    "none of none": lambda: (np.zeros(0, np.uint32), 0),
    "the first": lambda: (np.array([0], np.uint32), 1),
    "the last of all": lambda: (np.array([2**32 - 2], np.uint32), 2**32 - 1),
    "the ends": lambda: (np.array([0, 2**32 - 2], np.uint32), 2**32 - 1),
    "wide gaps": lambda: (np.arange(130, dtype=np.uint32) * np.uint32(33_000_000), 2**32 - 1),
    "all": lambda: (np.arange(200_000, dtype=np.uint32), 200_000),
    "every second": lambda: (np.arange(0, 200_000, 2, dtype=np.uint32), 200_000),
    "a half": lambda: (random_places(100_000, 0.5), 100_000),
    "1 %": lambda: (random_places(1_000_000, 0.01), 1_000_000),
    "0.1 %": lambda: (random_places(10_000_000, 0.001), 10_000_000),
    "0.01 %": lambda: (random_places(10_000_000, 0.0001), 10_000_000),
    "far apart": lambda: (far_apart(6_000_000), 6_000_000),
    "one run": lambda: (np.arange(65536, 131072, dtype=np.uint32), 200_000),
    **{
        f"{n} of 1,000": lambda n=n: (random_places(1000, 1.0)[:n] * np.uint32(3), 3000)
        for n in (1, 2, 127, 128, 129, 255, 256, 257, 1000)
    },
}


@pytest.mark.parametrize("name", PLACES)
def test_a_payload_is_what_the_document_says(name):
    indices, size = PLACES[name]()
    payload = pack(indices, size, LEVELS[0])
    assert read(payload, len(indices)) == indices.tolist()
    for simd in LEVELS:
        assert same_bits(pack(indices, size, simd), payload)
        assert same_bits(unpack(payload, size, len(indices), simd), indices)


def test_widths_are_the_best():
    """The narrowest of those with the fewest bits, in every block."""
    for name, make in PLACES.items():
        indices, size = make()
        gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
        payload = pack(indices, size)
        for number in range(-(-len(indices) // BLOCK)):
            of = gaps[BLOCK * number :][:BLOCK]
            bits = [len(of) * width + int((of >> width).sum()) for width in range(32)]
            assert payload[1 + 2 * number] == bits.index(min(bits)), name


@pytest.mark.parametrize("simd", LEVELS)
def test_what_does_not_ascend_is_refused(simd):
    good = random_places(5000, 0.2)
    for i in (0, 1, 100, len(good) - 2):
        for wrong in (good[i + 1], good[i + 1] + 1, np.uint32(2**32 - 1)):
            bad = good.copy()
            bad[i] = wrong
            with pytest.raises(ConfigurationError, match="ascend"):
                pack(bad, 5000, simd)
    with pytest.raises(ConfigurationError, match="below"):
        pack(good, int(good[-1]), simd)


def test_the_ways_a_payload_is_refused():
    def refused(payload, size, count):
        with pytest.raises(ConfigurationError, match="no payload"):
            unpack(np.array(payload, np.uint8), size, count)

    # One block of three indices, 4, 6 and 7: gaps 4, 1, 0 with one bit apart: 00 1 1 1, 0 1 0.
    good = [GAPS, 1, 1, 0b11100, 0b010]
    assert unpack(np.array(good, np.uint8), 8, 3).tolist() == [4, 6, 7]
    refused([], 8, 3)
    refused([3, *good[1:]], 8, 3)  # no such way
    refused(good, 7, 3)  # an index that is not below the size
    refused(good, 8, 2)  # other numbers of indices
    refused(good, 8, 4)
    refused([*good, 0], 8, 3)  # bytes that nothing uses
    refused(good[:-1], 8, 3)  # too few
    refused([GAPS, 32, 1, 0b11100, *[0] * 12], 8, 3)  # too wide
    assert unpack(np.array([GAPS, 0, 0], np.uint8), 3, 3).tolist() == [0, 1, 2]
    refused([GAPS, 0, 0], 2, 3)
    refused([GAPS, 1, 0, 0b010], 8, 3)  # a width, and no unary parts
    refused([GAPS, 1, 2, 0b11100, 0, 0b010], 8, 3)  # a byte of unary parts without a 1
    refused([GAPS, 1, 49, 0b11100, *[0] * 48, 0b010], 8, 3)  # too many of these
    refused([GAPS, 1, 1, 0b11100, 0b1010], 8, 3)  # a bit behind the last field
