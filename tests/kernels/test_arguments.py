"""What the kernels' bindings refuse: what is too short, or lies where it must not.

Each refusal has its like that is taken, one element or one byte further, here or in the tests of
bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError, _core, segments
from tests.inputs import read_only, same_bits
from tests.kernels.segments import table_of


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


# What is called with two arrays of which one is written, of 4-byte elements, and none may be the
# other's: all else is their own.
PAIRS = {
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


LEFT, OUT = floats(100), floats(100)
AT, VALUES, NARROW = places(1, 5), floats(2), np.zeros(2, np.float16)
ROOM, BYTES = places(*[0] * 100), octets(99)
FROZEN, FROZEN_AT = read_only(floats(100)), read_only(places(0, 0))

X = floats(100)
TABLE = table_of(
    [
        {"x": X, "left": LEFT, "k": 1, "at": 9, "item": 0, "entry": 0},
        {"x": X[:30], "left": LEFT, "k": 1, "at": 30, "item": 1, "entry": 2},
        {"x": X[:0], "left": LEFT, "k": 1, "at": 30, "item": 1, "entry": 3},
    ]
)
COPIED = TABLE.copy()  # rows that are not compressed
COPIED[:, segments.K] = 0


def table(row, column, value, of=TABLE):
    """The table with another number in it."""
    changed = of.copy()
    changed[row, column] = value
    return changed


FOUND = np.zeros(6, np.int32)
NO_SEGMENT = [
    *((column, -1) for column in (segments.DTYPE, segments.COUNT, segments.ITEM)),
    *((column, -1) for column in (segments.AT, segments.K, segments.ENTRY)),
    *((segments.DTYPE, 3), (segments.COUNT, 2**56 + 1), (segments.ADDRESS, 0)),
]
# What each function is called with; a 1-bit payload of 100 elements has 21 bytes, of 30 it has 8.
GOOD = {
    _core.quantize: {"codec": "one_bit", "chunk": 64, "table": TABLE}
    | {"messages": octets(38), "found": FOUND},
    _core.dequantize: {"codec": "one_bit", "chunk": 64, "table": TABLE}
    | {"messages": np.zeros((3, 38), np.uint8), "divisor": 3.0, "found": FOUND},
    _core.top_k: {"table": TABLE, "chunk": 64, "places": places(0, 0, 0)}
    | {"values": floats(3), "messages": octets(0), "found": FOUND},
    _core.sparse_add: {"table": TABLE, "messages": octets(0), "found": FOUND},
    _core.sparse_histogram: {"table": TABLE, "shift": 20, "bits": 11}
    | {"prefixes": np.zeros(3, np.int64), "bins": np.zeros((3, 2048), np.int32)},
    _core.sparse_select: {"table": TABLE, "keys": np.zeros(3, np.int64)}
    | {"ties": np.ones(3, np.int64), "places": places(0, 0), "values": floats(2)},
    _core.sparse_scatter: {"table": TABLE, "places": places(9, 2**32 - 1), "values": floats(2)}
    | {"divisor": 1, "found": FOUND, "all_zero": octets(2)},
    _core.fill_nan: {"table": TABLE, "found": FOUND[:4]},
    _core.check_finite: {"table": TABLE, "found": FOUND[:4]},
}


def changed(function, **change):
    return tuple({**GOOD[function], **change}.values())


# By function: what is another than what is good, and what it says.
CHANGED = {
    _core.quantize: [
        ({"codec": "two_bit"}, "no codec 'two_bit'; there are one_bit and int8$"),
        ({"codec": "one_bit "}, "no codec 'one_bit '; there are"),
        ({"codec": ""}, "no codec ''"),
        ({"codec": "INT8"}, "no codec 'INT8'"),
        *(({"chunk": n}, f"a chunk is .* not {n}") for n in (96, 65536 + 64, 0, -64)),
        ({"messages": octets(37)}, "row 1 of table is of bytes that messages do not have"),
        ({"messages": octets(29)}, "row 0 of table is of bytes"),
        ({"table": table(2, segments.AT, 39)}, "row 2 of table is of bytes"),
        ({"table": table(1, segments.K, 0), "messages": octets(149)}, "row 1 of table is of byt"),
        ({"messages": np.zeros(38, np.int8)}, "messages must be of uint8"),
        ({"messages": read_only(octets(38))}, "messages.*read-only"),
        ({"found": FOUND[:5]}, "row 1 of table is of an item for which found has no word"),
        ({"zero_at": 5}, "row 1 of table is of an item for which found has no word"),
        ({"zero_at": 7}, "row 0 of table is of an item for which found has no word"),
        ({"zero_at": -1}, "zero_at"),
        ({"zero_at": 0, "simd": "avx1024"}, "no SIMD level"),
    ],
    _core.dequantize: [
        ({"codec": "int4"}, "no codec"),
        ({"chunk": 1}, "a chunk"),
        ({"messages": np.zeros((3, 38), np.int8)}, "messages must be of uint8"),
        ({"messages": np.zeros((3, 39), np.uint8)[:, :38]}, "messages must be contiguous"),
        ({"messages": octets(38)}, "a row for each rank"),
        ({"messages": np.zeros((0, 38), np.uint8)}, "1 to 32768"),
        ({"messages": np.zeros((32769, 38), np.uint8)}, "rank, 1 to 32768"),
        ({"messages": np.zeros((3, 37), np.uint8)}, "row 1 of table is of bytes that messages"),
        ({"table": table(2, segments.AT, 39)}, "row 2 of table is of bytes that messages"),
        ({"table": COPIED}, "row 0 of table is of bytes that messages"),
        ({"zero_at": 5}, "row 1 of table is of an item for which found has no word"),
        ({"zero_at": -1}, "zero_at"),
        *(({"divisor": by}, "a finite fp32 above 0") for by in (0.0, -1.0, 0.1, 1e39, np.nan)),
    ],
    _core.top_k: [
        *(({"chunk": n}, f"a chunk is .* not {n}") for n in (96, 65536 + 64, -64)),
        ({"table": table(0, segments.K, 65)}, "row 0 of table is of more than all of a chunk"),
        ({"places": places(0, 0), "values": floats(2)}, "row 1 of table is of entries"),
        ({"table": table(2, segments.ENTRY, 4)}, "row 2 of table is of entries that places"),
        ({"table": table(0, segments.ENTRY, 2)}, "row 0 of table is of entries"),
        ({"values": floats(2)}, "values must have as many elements as places"),
        ({"values": np.zeros(3)}, "values must be of float32, float16 or bfloat16, not float64"),
        ({"places": np.zeros(3, np.int64)}, "places must be of uint32"),
        ({"places": read_only(places(0, 0, 0))}, "read-only"),
        ({"values": read_only(floats(3))}, "read-only"),
        ({"table": table(0, segments.AT, 2**32 - 100)}, "row 0 of table is of 2..32 places"),
        ({"table": COPIED}, "row 0 of table is of bytes that messages"),
        ({"table": COPIED, "messages": octets(408)}, "row 0 of table is of bytes that messages"),
        ({"found": FOUND[:5]}, "row 1 of table is of an item for which found has no word"),
    ],
    _core.sparse_add: [
        ({"table": COPIED}, "row 0 of table is of bytes that messages"),
        ({"table": table(0, segments.AT, 2**32 - 100)}, "row 0 of table is of 2..32 places"),
        ({"messages": np.zeros(0, np.int8)}, "messages must be of uint8"),
        ({"found": FOUND[:5]}, "row 1 of table is of an item for which found has no word"),
    ],
    _core.sparse_histogram: [
        *(
            ({"shift": shift, "bits": bits}, "shift")
            for shift, bits in ((-1, 11), (0, 0), (21, 11), (2**31 - 1, 11))
        ),
        ({"bits": 10}, "bins must have"),
        ({"bins": np.zeros((3, 2048), np.int64)}, "bins must be of int32"),
        ({"bins": read_only(np.zeros((3, 2048), np.int32))}, "read-only"),
        ({"table": table(0, segments.AT, 2**32 - 100)}, "row 0 of table is of 2..32 places"),
        ({"prefixes": np.zeros(2, np.int64)}, "prefixes must have one for each row"),
        ({"prefixes": np.zeros(3, np.int32)}, "prefixes must be of int64"),
        *(({"prefixes": np.array([0, 0, n])}, "prefixes must be 0 to") for n in (-1, 2**31)),
    ],
    _core.sparse_select: [
        ({"keys": np.zeros(2, np.int64)}, "keys must have one for each row"),
        ({"ties": np.zeros(4, np.int64)}, "ties must have one for each row"),
        *(({"keys": np.array([0, 0, n])}, "keys must be 0 to") for n in (-1, 2**31)),
        ({"ties": np.array([0, 0, -1])}, "ties must be 0 to"),
        ({"places": places(0), "values": floats(1)}, "places must have room for 2"),
        ({"values": floats(1)}, "values must have as many elements as places"),
        ({"table": table(0, segments.AT, 2**32 - 100)}, "row 0 of table is of 2..32 places"),
        ({"places": FROZEN_AT}, "read-only"),
    ],
    _core.sparse_scatter: [
        ({"places": places(9, 9)}, "places must ascend strictly"),
        ({"places": places(9, 8)}, "places must ascend strictly"),
        ({"values": floats(1)}, "values must have as many elements as places"),
        ({"values": np.zeros(2, np.float16)}, "values must be of float32"),
        ({"all_zero": octets(1)}, "row 1 of table is of an item that all_zero does not have"),
        ({"all_zero": np.zeros(2, np.int8)}, "all_zero must be of uint8"),
        *(({"divisor": by}, "a finite fp32 above 0") for by in (0, -1, np.nan, 0.1, np.inf)),
    ],
    _core.fill_nan: [],
    _core.check_finite: [],
}

REFUSED = {
    _core.quantized_bytes: [
        (("int8", 100, 1), "a chunk"),
        (("int8", 64, -1), "no array"),
        (("int8", 64, 2**63 - 1), "no array has 9"),
        (("one_bit", 64, 2**57), "no array has 1"),
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
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_right_is_refused(function):
    for arguments, match in REFUSED[function]:
        refused(match, function, *arguments)


def test_what_is_just_right_is_taken():
    _core.sparse_sum([AT], [VALUES], places(0, 0), floats(2))
    _core.sparse_sum([AT, AT], [NARROW, NARROW], places(0, 0, 0, 0), floats(4))
    assert _core.pack_indices_bound(10, 2**32) > 0


@pytest.mark.parametrize("function", GOOD, ids=lambda function: function.__name__)
def test_tables_that_cannot_be_are_refused(function):
    """What is just right is taken, and so is a table without rows."""
    function(*changed(function))
    none = {"prefixes": np.zeros(0, np.int64), "bins": np.zeros(0, np.int32)}
    none |= {"keys": none["prefixes"], "ties": none["prefixes"], "table": TABLE[:0]}
    function(*changed(function, **{name: none[name] for name in none.keys() & GOOD[function]}))
    for column, value in NO_SEGMENT:
        refused(
            "row 1 of table is no segment",
            function,
            *changed(function, table=table(1, column, value)),
        )
    for wrong, match in (
        (TABLE[:, :-1].copy(), "table must have 9 columns"),
        (TABLE.reshape(-1), "table must have 9 columns"),
        (TABLE[::2], "table must be contiguous"),
        (TABLE.astype(np.int32), "table must be of int64"),
    ):
        refused(match, function, *changed(function, table=wrong))
    for found, match in (
        (
            (FOUND[:3], "found must have room for 4"),
            (FOUND.astype(np.int64), "found must be of int32"),
            (read_only(FOUND.copy()), "read-only"),
        )
        if "found" in GOOD[function]
        else ()
    ):
        refused(match, function, *changed(function, found=found))
    for change, match in CHANGED[function]:
        with pytest.raises(ConfigurationError, match=match):
            function(**{**GOOD[function], **change})


def test_what_is_just_right_of_other_ways_is_taken():
    """Words and bytes from which one is taken away above."""
    quantize, dequantize, top_k = _core.quantize, _core.dequantize, _core.top_k
    quantize(**{**GOOD[quantize], "zero_at": 4})
    quantize(*changed(quantize, table=table(1, segments.K, 0), messages=octets(150)))
    quantize(*changed(quantize, table=table(2, segments.AT, 38)))
    dequantize(**{**GOOD[dequantize], "zero_at": 4})
    dequantize(*changed(dequantize, table=table(2, segments.AT, 38)))
    dequantize(*changed(dequantize, table=COPIED, messages=np.zeros((1, 409), np.uint8)))
    top_k(*changed(top_k, table=table(2, segments.ENTRY, 3)))
    top_k(*changed(top_k, table=table(0, segments.AT, 2**32 - 101)))
    for function in (top_k, _core.sparse_add):
        function(*changed(function, table=COPIED, messages=octets(409)))
    few = table_of([{"x": X[:n], "item": n} for n in range(9)])
    words = np.zeros(20, np.int32)
    bits = np.zeros((2, 25), np.uint8), np.zeros((2, 26), np.uint8)
    few[:, [segments.COUNT, segments.AT]] = 0
    refused(
        "row 8 of table is of an item for which messages have no bit",
        dequantize,
        "int8",
        64,
        few,
        bits[0],
        1.0,
        words,
        9,
    )
    dequantize("int8", 64, few, bits[1], 1.0, words, 9)
    histogram = _core.sparse_histogram
    histogram(*changed(histogram, prefixes=np.full(3, 2**31 - 1)))
