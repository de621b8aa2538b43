"""What the bindings of the sparse kernels refuse: what is too short, or lies where it must not.

Each refusal has its like beside it that is taken, one element or one byte further.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError, _core
from tests.inputs import same_bits

LEVELS = _core.simd_levels()


def refused(match, function, *arguments):
    with pytest.raises(ConfigurationError, match=match):
        function(*arguments)


def floats(count):
    return np.zeros(count, np.float32)


def places(*indices):
    return np.array(indices, np.uint32)


def read_only(array):
    array.flags.writeable = False
    return array


def test_lengths_and_room():
    at, out, values = places(1, 5), floats(10), floats(2)
    _core.sparse_sum([at], [values], places(0, 0), floats(2))
    refused("values must have room for 2", _core.sparse_sum, [at], [values], at.copy(), floats(1))
    refused("indices must have room for 2", _core.sparse_sum, [at], [values], at[:1] + 0, floats(2))
    refused("as many elements", _core.sparse_sum, [at], [floats(1)], at.copy(), floats(2))
    refused("as many elements", _core.sparse_sum, [at], [floats(3)], at.copy(), floats(2))
    refused("as many, one a rank", _core.sparse_sum, [at, at], [values], at.copy(), floats(2))
    _core.sparse_scatter(at, values, out, 1)
    refused("as many elements", _core.sparse_scatter, at, floats(1), out, 1)
    refused("below 5", _core.sparse_scatter, at, values, floats(5), 1)
    _core.sparse_scatter(at, values, floats(6), 1)
    refused("as many elements", _core.sparse_take, out, at, floats(3))
    refused("below 5", _core.sparse_take, floats(5), at, values)
    _core.sparse_take(floats(6), at, values)


def test_values_are_all_of_one_type():
    at, narrow = places(1, 5), np.zeros(2, np.float16)
    _core.sparse_sum([at, at], [narrow, narrow], np.zeros(4, np.uint32), floats(4))
    for values in ([narrow, floats(2)], [floats(2), narrow]):
        refused(
            "values must be of",
            _core.sparse_sum,
            [at, at],
            values,
            np.zeros(4, np.uint32),
            floats(4),
        )


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


def test_sizes_and_prefixes():
    _core.pack_indices_bound(10, 2**32)
    refused("size must be", _core.pack_indices_bound, 10, 2**32 + 1)
    refused("size must be", _core.pack_indices_bound, 10, -1)
    refused("count must be", _core.pack_indices_bound, -1, 10)
    refused("size must be", _core.pack_indices, places(1), 2**32 + 1, np.zeros(99, np.uint8))
    refused("size must be", _core.unpack_indices, np.zeros(9, np.uint8), 2**32 + 1, places(1))
    bins = np.zeros(2, np.int64)
    _core.sparse_histogram(floats(1), 0, 1, 2**31 - 1, bins)
    for prefix in (-1, 2**31, 2**32):
        refused("prefix must be", _core.sparse_histogram, floats(1), 0, 1, prefix, bins)


def test_what_is_read_only_is_not_written():
    at, values, x = places(1, 5), floats(2), floats(100)
    frozen_at, frozen = read_only(places(0, 0)), read_only(floats(100))
    refused("read-only", _core.top_k, x, None, floats(100), 2, frozen_at)
    refused("read-only", _core.top_k_chunks, x, None, floats(100), 1, 64, frozen_at)
    refused("read-only", _core.sparse_add, x, None, frozen)
    refused("read-only", _core.sparse_histogram, x, 0, 1, 0, read_only(np.zeros(2, np.int64)))
    refused("read-only", _core.sparse_select, x, 1, 1, frozen_at)
    refused("read-only", _core.sparse_take, frozen, at, values)
    refused("read-only", _core.sparse_take, x, at, read_only(floats(2)))
    refused("read-only", _core.pack_indices, at, 10, read_only(np.zeros(99, np.uint8)))
    refused("read-only", _core.unpack_indices, np.ones(3, np.uint8), 10, frozen_at)
    refused("read-only", _core.sparse_sum, [at], [values], frozen_at, floats(2))
    refused("read-only", _core.sparse_sum, [at], [values], places(0, 0), read_only(floats(2)))
    refused("read-only", _core.sparse_scatter, at, values, frozen, 1)
