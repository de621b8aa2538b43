"""What the bindings of the sparse kernels refuse: what is too short, or lies where it must not.

Each refusal has its like that is taken, one element or one byte further, here or in the tests of
bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError, _core
from tests.inputs import read_only, same_bits


def floats(count):
    return np.zeros(count, np.float32)


def refused(match, function, *arguments):
    with pytest.raises(ConfigurationError, match=match):
        function(*arguments)


def places(*indices):
    return np.array(indices, np.uint32)


def halves(array):
    """Its first part, a part that shares the last element of that, and one that shares none."""
    middle = len(array) // 2
    return array[:middle], array[middle - 1 : 2 * middle - 1], array[middle : 2 * middle]


def as_places(array):
    return array.view(np.uint32)


# What is called with two arrays of which one is written, of 4-byte elements, and none may be the
# other's: all else is their own.
PAIRS = {
    "take: left and indices": lambda a, b: _core.sparse_take(a, as_places(b), floats(len(b))),
    "take: left and values": lambda a, b: _core.sparse_take(a, places(*range(len(b))), b),
    "take: indices and values": lambda a, b: _core.sparse_take(floats(100), as_places(a), b),
    "scatter: indices and out": lambda a, b: _core.sparse_scatter(
        as_places(a), floats(len(a)), b, 1
    ),
    "scatter: values and out": lambda a, b: _core.sparse_scatter(places(*range(len(a))), a, b, 1),
    "sum: places and sums": lambda a, b: _core.sparse_sum(
        [places(1)], [floats(1)], as_places(a), b
    ),
    "sum: indices and places": lambda a, b: _core.sparse_sum(
        [as_places(a)], [floats(len(a))], as_places(b), floats(len(a))
    ),
    "sum: indices and sums": lambda a, b: _core.sparse_sum(
        [as_places(a)], [floats(len(a))], as_places(floats(len(a))), b
    ),
    "sum: values and places": lambda a, b: _core.sparse_sum(
        [places(*range(len(a)))], [a], as_places(b), floats(len(a))
    ),
    "sum: values and sums": lambda a, b: _core.sparse_sum(
        [places(*range(len(a)))], [a], as_places(floats(len(a))), b
    ),
    "add: held and left": lambda a, b: _core.sparse_add(floats(len(a)), a, b),
    "histogram: left and bins": lambda a, b: _core.sparse_histogram(
        a, 26, 4, 0, b[: len(b) // 32 * 32].view(np.int64)
    ),
    "select: left and places": lambda a, b: _core.sparse_select(a, 0, 0, as_places(b)),
    "add: x and left": lambda a, b: _core.sparse_add(a, None, b),
    **{
        f"{name}: {which} and places": (lambda a, b, run=run, at=at: run(at(a), as_places(b)))
        for name, run in {
            "top_k": lambda gradient, out: _core.top_k(*gradient, 1, out),
            "top_k_chunks": lambda gradient, out: _core.top_k_chunks(*gradient, 1, 64, out),
        }.items()
        for which, at in {
            "x": lambda a: (a, None, floats(len(a))),
            "held": lambda a: (floats(len(a)), a, floats(len(a))),
            "left": lambda a: (floats(len(a)), None, a),
        }.items()
    },
}


@pytest.mark.parametrize("pair", PAIRS)
def test_arrays_share_no_element(pair):
    """In either order in memory; what lies beside each other is taken."""
    for swapped in (False, True):
        room = np.arange(64, dtype=np.uint32).view(np.float32)
        first, over, beside = halves(room)
        refused("overlap", PAIRS[pair], *((over, first) if swapped else (first, over)))
        assert same_bits(room, np.arange(64, dtype=np.uint32).view(np.float32))
        if "indices" in pair:  # which ascend strictly, and are below what they are for
            beside.view(np.uint32)[:] = first.view(np.uint32)[:] = np.arange(32)
        PAIRS[pair](*((beside, first) if swapped else (first, beside)))


def test_packed_indices_share_nothing_with_the_indices():
    at = np.arange(0, 300, 3, dtype=np.uint32)
    bound = _core.pack_indices_bound(len(at), 300)
    room = np.zeros(400 + bound, np.uint8)
    room[:400] = at.view(np.uint8)
    before, behind = room[:400].view(np.uint32), room[400:]
    refused("overlap", _core.pack_indices, before, 300, room[399:][:bound])
    refused(f"room for {bound}", _core.pack_indices, before, 300, behind[: bound - 1])
    payload = behind[: _core.pack_indices(before, 300, behind)]
    refused("overlap", _core.unpack_indices, payload, 300, room[4:404].view(np.uint32))
    _core.unpack_indices(payload, 300, before)
    assert same_bits(before, at)


X, HELD, LEFT, OUT = (floats(100) for _ in range(4))
AT, BINS, VALUES, NARROW = places(1, 5), np.zeros(2, np.int64), floats(2), np.zeros(2, np.float16)
ROOM, BYTES = places(*[0] * 100), np.zeros(99, np.uint8)
FROZEN, FROZEN_AT = read_only(floats(100)), read_only(places(0, 0))

# By function: what it is called with, and what it says.
REFUSED = {
    _core.top_k: [
        ((X, LEFT, LEFT, 1, ROOM), "overlap held"),
        ((OUT[:99], None, OUT[1:], 1, ROOM), "overlap x"),
        ((X, HELD[:99], LEFT, 1, ROOM), "as many elements"),
        ((X, HELD, LEFT[:99], 1, ROOM), "as many elements"),
        ((X, HELD, FROZEN, 1, ROOM), "read-only"),
        ((X, None, LEFT, 2, FROZEN_AT), "read-only"),
        ((floats(200)[::2], HELD, LEFT, 1, ROOM), "contiguous"),
        ((X, HELD, LEFT.astype(np.float16), 1, ROOM), "float32"),
        ((X.astype(np.float64), HELD, LEFT, 1, ROOM), "float32"),
        ((X, HELD, LEFT, 1, ROOM.astype(np.int64)), "uint32"),
        ((X, HELD, LEFT, 11, ROOM[:10]), "room for 11"),
        ((X, HELD, LEFT, 101, ROOM), "k must be"),
        ((X, HELD, LEFT, -1, ROOM), "k must be"),
        ((X, HELD, LEFT, 1, ROOM, "none"), "no SIMD level"),
    ],
    _core.top_k_chunks: [
        ((X, HELD, LEFT, 2, 64, ROOM[:2]), "room for 4"),
        ((X, HELD, LEFT, 0, 64, ROOM), "k must be"),
        ((X, HELD, LEFT, 65, 64, ROOM), "k must be"),
        *(((X, HELD, LEFT, 1, chunk, ROOM), "chunk must be") for chunk in (0, 63, -64, 65_600)),
        ((X, None, LEFT, 1, 64, FROZEN_AT), "read-only"),
    ],
    _core.sparse_add: [((X, None, FROZEN), "read-only")],
    _core.sparse_histogram: [
        *(
            ((LEFT, shift, bits, 0, np.zeros(2048, np.int64)), "shift")
            for shift, bits in ((-1, 11), (0, 0), (21, 11), (2**31 - 1, 11))
        ),
        ((LEFT, 20, 10, 0, np.zeros(2048, np.int64)), "bins"),
        *(((X, 0, 1, prefix, BINS), "prefix must be") for prefix in (-1, 2**31, 2**32)),
        ((X, 0, 1, 0, read_only(np.zeros(2, np.int64))), "read-only"),
    ],
    _core.sparse_select: [
        ((LEFT, 1 << 31, 0, ROOM), "key"),
        ((LEFT, 0, -1, ROOM), "ties"),
        ((X, 1, 1, FROZEN_AT), "read-only"),
    ],
    _core.sparse_take: [
        ((LEFT, places(100), OUT[:1]), "below 100"),
        ((LEFT, ROOM[:2], OUT[:1]), "as many"),
        ((OUT, AT, floats(3)), "as many elements"),
        ((floats(5), AT, VALUES), "below 5"),
        ((FROZEN, AT, VALUES), "read-only"),
        ((X, AT, read_only(floats(2))), "read-only"),
    ],
    _core.pack_indices: [
        ((places(1), 2**32 + 1, BYTES), "size must be"),
        ((AT, 10, read_only(np.zeros(99, np.uint8))), "read-only"),
    ],
    _core.unpack_indices: [
        ((np.zeros(9, np.uint8), 2**32 + 1, places(1)), "size must be"),
        ((np.ones(3, np.uint8), 10, FROZEN_AT), "read-only"),
    ],
    _core.pack_indices_bound: [
        ((10, 2**32 + 1), "size must be"),
        ((10, -1), "size must be"),
        ((-1, 10), "count must be"),
    ],
    _core.sparse_sum: [
        (([AT], [VALUES], ROOM[:2], floats(1)), "values must have room for 2"),
        (([AT], [VALUES], ROOM[:1], floats(2)), "indices must have room for 2"),
        (([AT], [floats(1)], ROOM[:2], floats(2)), "as many elements"),
        (([AT], [floats(3)], ROOM[:2], floats(2)), "as many elements"),
        (([AT, AT], [VALUES], ROOM[:2], floats(2)), "as many, one a rank"),
        (([AT, AT], [NARROW, floats(2)], ROOM[:4], floats(4)), "values must be of"),
        (([AT, AT], [floats(2), NARROW], ROOM[:4], floats(4)), "values must be of"),
        (([AT[:1], places(0, 0)], [OUT[:1], OUT[:2]], ROOM[50:], LEFT), "rank 1's"),
        (([places(0, 1, 2)], [OUT[:3]], ROOM[98:], LEFT), "room for 3"),
        (([], [], ROOM, LEFT), "not none"),
        (([AT], [VALUES], FROZEN_AT, floats(2)), "read-only"),
        (([AT], [VALUES], ROOM[:2], read_only(floats(2))), "read-only"),
    ],
    _core.sparse_scatter: [
        ((places(0, 0), OUT[:2], LEFT, 1), "ascend"),
        ((places(100), OUT[:1], LEFT, 1), "below 100"),
        ((AT, floats(1), OUT, 1), "as many elements"),
        ((AT, VALUES, floats(5), 1), "below 5"),
        *(((AT[:1], OUT[:1], LEFT, divisor), "divisor") for divisor in (0, -1, np.nan, 0.1)),
        ((AT, VALUES, FROZEN, 1), "read-only"),
    ],
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_right_is_refused(function):
    for arguments, match in REFUSED[function]:
        refused(match, function, *arguments)


def test_what_is_just_right_is_taken():
    _core.sparse_sum([AT], [VALUES], places(0, 0), floats(2))
    _core.sparse_sum([AT, AT], [NARROW, NARROW], places(0, 0, 0, 0), floats(4))
    _core.sparse_scatter(AT, VALUES, floats(6), 1)
    _core.sparse_take(floats(6), AT, floats(2))
    _core.sparse_histogram(X, 0, 1, 2**31 - 1, np.zeros(2, np.int64))
    assert _core.pack_indices_bound(10, 2**32) > 0
