"""What the kernels' bindings refuse: what is too short, or lies where it must not.

Each refusal has its like that is taken, one element or one byte further, here or in the tests of
bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError, _core
from tests.inputs import read_only, same_bits


def floats(count=100):
    return np.zeros(count, np.float32)


def octets(count):
    return np.zeros(count, np.uint8)


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


def quantize_into(x, left, payload, held=None):
    """In one chunk of whatever the arrays have."""
    _core.quantize("one_bit", 64, x, held, left, payload.view(np.uint8))


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
    "quantize: x and left": lambda a, b: quantize_into(a, b, octets(99)),
    "quantize: x and payload": lambda a, b: quantize_into(a, floats(len(a)), b),
    "quantize: held and left": lambda a, b: quantize_into(floats(len(a)), b, octets(99), a),
    "quantize: held and payload": lambda a, b: quantize_into(floats(len(a)), floats(len(a)), b, a),
    "quantize: left and payload": lambda a, b: quantize_into(floats(len(a)), a, b),
    "dequantize: messages and out": lambda a, b: _core.dequantize(
        "one_bit", 64, a.view(np.uint8)[None], 0, b, 1.0
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

GOOD = {
    "quantize": {"codec": "one_bit", "chunk": 64, "x": floats(), "held": floats()}
    | {"left": floats(), "payload": octets(4 + 8 + 4 + 5)},
    "dequantize": {"codec": "one_bit", "chunk": 64, "messages": np.zeros((3, 30), np.uint8)}
    | {"at": 9, "out": floats(), "divisor": 3.0},
}


def quantizing(**change):
    return tuple({**GOOD["quantize"], **change}.values())


def dequantizing(**change):
    return tuple({**GOOD["dequantize"], **change}.values())


MESSAGES = GOOD["dequantize"]["messages"]

# By function: what it is called with, and what it says.
REFUSED = {
    _core.quantize: [
        (quantizing(codec="two_bit"), "no codec 'two_bit'; there are one_bit and int8$"),
        (quantizing(codec="one_bit "), "no codec 'one_bit '; there are"),
        (quantizing(codec=""), "no codec ''"),
        (quantizing(codec="INT8"), "no codec 'INT8'"),
        *((quantizing(chunk=n), f"a chunk is .* not {n}") for n in (96, 65536 + 64, 0, -64)),
        (quantizing(x=np.zeros(100)), "no quantization of float64"),
        (quantizing(x=floats(200)[::2]), "x must be contiguous"),
        (quantizing(held=np.zeros(100, np.float16)), "held must be of float32"),
        (quantizing(held=floats(99)), "held must have as many elements as x: 100"),
        (quantizing(left=np.zeros(100)), "left must be of float32"),
        (quantizing(left=floats(101)), "left must have as many elements as x: 100"),
        (quantizing(left=read_only(floats())), "read-only"),
        (quantizing(payload=read_only(octets(30))), "payload.*read-only"),
        (quantizing(payload=np.zeros(30, np.int8)), "payload must be of uint8"),
        (quantizing(payload=octets(20)), "payload must have room for 21"),
        (quantizing(simd="avx1024"), "no SIMD level"),
    ],
    _core.dequantize: [
        (dequantizing(codec="int4"), "no codec"),
        (dequantizing(chunk=1), "a chunk"),
        (dequantizing(messages=MESSAGES.view(np.int8)), "messages must be of uint8"),
        (dequantizing(messages=MESSAGES[:, :29]), "messages must be contiguous"),
        (dequantizing(messages=MESSAGES[0]), "a row for each rank"),
        (dequantizing(messages=MESSAGES[:0]), "1 to 32768"),
        (dequantizing(messages=np.zeros((32769, 21), np.uint8), at=0), "rank, 1 to 32768"),
        (dequantizing(at=10), "30 bytes do not hold 21 from byte 10 on"),
        (dequantizing(at=-1), "from byte -1"),
        (dequantizing(at=31, out=floats(0)), "from byte 31"),
        (dequantizing(out=np.zeros(100, np.int32)), "no quantization of int32"),
        (dequantizing(out=floats(200)[::2]), "out must be contiguous"),
        (dequantizing(out=read_only(floats())), "read-only"),
        (dequantizing(divisor=0.0), "divisor"),
        (dequantizing(divisor=1e39), "a finite"),
        (dequantizing(divisor=float("nan")), "above 0"),
    ],
    _core.quantized_bytes: [
        (("int8", 100, 1), "a chunk"),
        (("int8", 64, -1), "no array"),
        (("int8", 64, 2**63 - 1), "no array has 9"),
        (("one_bit", 64, 2**57), "no array has 1"),
    ],
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
    _core.quantize(*quantizing())
    _core.dequantize(*dequantizing())
    _core.sparse_sum([AT], [VALUES], places(0, 0), floats(2))
    _core.sparse_sum([AT, AT], [NARROW, NARROW], places(0, 0, 0, 0), floats(4))
    _core.sparse_scatter(AT, VALUES, floats(6), 1)
    _core.sparse_take(floats(6), AT, floats(2))
    _core.sparse_histogram(X, 0, 1, 2**31 - 1, np.zeros(2, np.int64))
    assert _core.pack_indices_bound(10, 2**32) > 0
