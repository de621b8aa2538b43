"""Averages of sparse entries by Triton kernels are the CPU's: in Triton's interpreter, and as PTX
that is executed."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pycollective import _core, segments
from pycollective.errors import ConfigurationError
from tests.inputs import dtype_of
from tests.kernels.segments import found_for, table_of
from tests.triton.compiled import module
from tests.triton.executed import MOSTLY_INTERPRETED, address, executed, ways
from tests.triton.test_compiled import needs
from tests.triton.test_index_packing import tail_of
from tests.triton.test_top_k import bits

STORM = pytest.mark.storm
COMPILED = module("sparse_sums", interpreted=False)
kernels = ways("sparse_sums")
ITEMS = 11  # of a header


class Segment(NamedTuple):
    """A parameter's part in a shard."""

    shard: int
    at: int
    count: int
    dtype: str
    item: int = 0


def ranks_of(ranks, size, density, seed=0):
    """Of each rank places and values, whose order of additions shows; some are zeros."""
    found = []
    for rank in range(ranks):
        random = np.random.default_rng([rank, ranks, size, seed])
        places = np.flatnonzero(random.random(size) < density).astype(np.uint32)
        values = random.standard_normal(places.size) * 10.0 ** random.integers(-8, 8, places.size)
        values = values.astype(np.float32)
        values[random.random(places.size) < 0.3] = -0.0
        found.append((places, values))
    return found


class Messages:
    """Messages of ranks about shards, at odd bytes, with other bytes between.

    Attributes:
        bytes: all of them, which a test may damage.
        parts: as `average` takes them.
    """

    def __init__(self, shards, sizes, spare=3):
        """`shards`: of each the ranks' places and values."""
        self.shards, self.sizes = shards, sizes
        random, pieces, rows, at = np.random.default_rng(1), [], [], 1
        for shard, (ranks, size) in enumerate(zip(shards, sizes, strict=True)):
            for places, values in ranks:
                header = random.integers(0, 256, 24 + -(-ITEMS // 8) + 4, np.uint8)
                header[24:26] = 0
                tail = tail_of(places, size, values)
                row = (at, at + len(header), len(tail) + 2, size, len(places) + spare, shard)
                rows.append(row)
                pieces += [header, tail, random.integers(0, 256, 2 + shard, np.uint8)]
                at += sum(map(len, pieces[-3:]))
        self.bytes = np.concatenate([np.zeros(1, np.uint8), *pieces])
        self.parts = np.array(rows, np.int64)

    def say_zero(self, message, item):
        """Set an item's bit in a header."""
        self.bytes[self.parts[message, 0] + 24 + item // 8] |= 1 << item % 8

    def expected(self, segment, divisor):
        """The CPU's average."""
        ranks = self.shards[segment.shard]
        places = np.empty(sum(len(each) for each, _ in ranks), np.uint32)
        values = np.empty(len(places), np.float32)
        every = [each for each, _ in ranks], [each.astype(np.float32) for _, each in ranks]
        count = _core.sparse_sum(*every, places, values)
        out = np.empty(segment.count, dtype_of(segment.dtype))
        table = table_of([{"x": out, "at": segment.at, "k": 1}])
        entries = places[:count], values[:count]
        _core.sparse_scatter(table, *entries, divisor, found_for(1), np.zeros(1, np.uint8))
        return out


def averages(kernels, messages, parts, divisor=3.0, values="float32", skew=0):
    """(the averages of segments, what is found); nothing beside them is written."""
    spaces = [torch.full((each.count + skew + 2,), 7.0) for each in parts]
    spaces = [x.to(getattr(torch, each.dtype)) for x, each in zip(spaces, parts, strict=True)]
    outs = [x[skew : skew + each.count] for x, each in zip(spaces, parts, strict=True)]
    table = table_of(
        [
            {"x": x, "at": each.at, "k": 1, "item": each.item, "entry": each.shard}
            for x, each in zip(outs, parts, strict=True)
        ]
    )
    for x in outs:
        address(x)
    came, found = torch.from_numpy(messages.bytes.copy()), torch.zeros(4, dtype=torch.int32)
    tables = kernels.Tables(torch.device("cpu"))
    dtype = getattr(torch, values)
    kernels.average(came, messages.parts, dtype, table, divisor, found, tables)
    for x, each in zip(spaces, parts, strict=True):
        assert (x[:skew] == 7).all()
        assert (x[skew + each.count :] == 7).all()
    return outs, found.tolist()


def check(messages, made, parts, divisor=3.0):
    for out, each in zip(made, parts, strict=True):
        assert np.array_equal(bits(out), messages.expected(each, divisor).view(np.uint8)), each


SUMS = [
    *((1, 100, 0.1), (2, 5000, 0.05), (3, 3000, 0.3), (5, 1500, 0.9), (8, 2048, 0.1)),
    *((2, 31, 1.0), (2, 1, 1.0), (3, 70, 0.0), pytest.param(17, 1100, 0.2, marks=STORM)),
]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("ranks", "size", "density"), SUMS)
def test_sums(kernels, ranks, size, density):
    messages = Messages([ranks_of(ranks, size, density)], [size])
    parts = [Segment(0, 0, size, "float32"), Segment(0, 0, size, "bfloat16")]
    made, found = averages(kernels, messages, parts, float(ranks))
    check(messages, made, parts, float(ranks))
    assert found == [0, 0, 0, 0]


@MOSTLY_INTERPRETED
def test_sums_of_a_few_ranks(kernels):
    messages = Messages([ranks_of(3, 2100, 0.2)], [2100])
    parts = [Segment(0, 0, 2100, "float32")]
    made, _ = averages(kernels, messages, parts, 1.0)
    check(messages, made, parts, 1.0)


def cut(shard, bounds, dtypes, item=0):
    """Segments one behind another, whose types come in turns."""
    return [
        Segment(shard, at, stop - at, dtypes[number % len(dtypes)], item + number)
        for number, (at, stop) in enumerate(itertools.pairwise(bounds))
    ]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("values", ["float32", "bfloat16", "float16"])
def test_segments_of_shards(kernels, values):
    """They begin and end at any bit, some are empty, and shards have different sizes."""
    sizes = [2300, 1500, 2400]
    densities = (0.02, 0.2, 0.05)
    shards = [ranks_of(2, *each) for each in zip(sizes, densities, strict=True)]
    shards = [[(at, np.clip(x, -9, 9).astype(dtype_of(values))) for at, x in two] for two in shards]
    messages = Messages(shards, sizes)
    parts = [
        *cut(0, [0, 33, 33, 1060, 1061, 2300], ["float32", "bfloat16", "float16"]),
        *cut(1, [0, 1400, 1500], ["bfloat16", "float32"]),
        *cut(2, [0, 31, 64, 2399, 2399], ["float32"]),
    ]
    made, found = averages(kernels, messages, parts, 2.0, values, skew=1)
    check(messages, made, parts, 2.0)
    assert found == [0, 0, 0, 0]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    ("number", "dtype", "bad"),
    [(np.nan, "float32", 1), (-np.inf, "float32", 1), (1e38, "bfloat16", 0), (1e5, "float16", 1)],
)
def test_what_is_not_finite(kernels, number, dtype, bad):
    """A NaN is the contract's; of an infinity, or where a number becomes one, it says so, too."""
    [(places, values)] = ranks_of(1, 70, 0.5)
    values = np.clip(values, -1, 1)
    values[-1] = number
    messages = Messages([[(places, values)]], [70])
    parts = [Segment(0, 0, 70, dtype)]
    made, found = averages(kernels, messages, parts, 1.0)
    check(messages, made, parts, 1.0)
    assert found == [bad, 0, 0, 0]
    # Of a segment that ends before it nothing is found.
    parts = [Segment(0, 0, int(places[-1]), dtype)]
    assert averages(kernels, messages, parts, 1.0)[1] == [0, 0, 0, 0]


@MOSTLY_INTERPRETED
def test_what_all_ranks_say_is_zero_becomes_zero(kernels):
    """Of item 3 and 10 all ranks of the first shard say it, of 4 one, of 5 those of the other."""
    sizes = [400, 400]
    messages = Messages([ranks_of(2, size, 1.0, seed) for seed, size in enumerate(sizes)], sizes)
    for message, item in ((0, 3), (1, 3), (0, 10), (1, 10), (1, 4), (2, 5), (3, 5)):
        messages.say_zero(message, item)
    parts = [
        Segment(shard, 100 * number, 100, "float32", item)
        for shard in (0, 1)
        for number, item in enumerate((3, 4, 5, 10))
    ]
    made, _ = averages(kernels, messages, parts)
    for out, each in zip(made, parts, strict=True):
        if (each.shard, each.item) in ((0, 3), (0, 10), (1, 5)):
            assert not bits(out).any()
        else:
            check(messages, [out], [each])


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("damage", ["mode", "bits", "size"])
def test_a_damaged_message_adds_nothing(kernels, damage):
    """And the others of its shard are added up."""
    size = 1300
    shards = [ranks_of(3, size, 0.1), ranks_of(3, size, 0.1, 1)]
    messages = Messages(shards, [size, size])
    tail = messages.parts[1, 1]
    stream = int(messages.bytes[tail + 4 : tail + 8].view(np.uint32)[0])
    if damage == "mode":
        messages.bytes[tail + 8] = 2
    elif damage == "bits":  # one more 1 in the unary part of the last block
        messages.bytes[tail + 8 + stream - 1] ^= 255
    else:
        messages.parts[1, 3] = shards[0][1][0][-1]
    shards[0][1] = shards[0][1][0][:0], shards[0][1][1][:0]
    parts = [Segment(0, 0, 1000, "float32"), Segment(1, 0, size, "float32")]
    made, found = averages(kernels, messages, parts)
    check(messages, made, parts)
    assert found == [1, 1, 0, 0]


def to_average(change=None, **others):
    few = Messages([ranks_of(2, size, 0.5) for size in (40, 50)], [40, 50])
    table = np.zeros((1, segments.COLUMNS), np.int64)
    table[0, [segments.COUNT, segments.AT, segments.ENTRY]] = 10, 40, 1
    given = {"came": torch.from_numpy(few.bytes), "parts": few.parts, "values": torch.float32}
    given |= {"table": table, "divisor": 2.0, "found": torch.zeros(4, dtype=torch.int32)}
    if change:
        name, row, column, number = change
        given[name][row, column] = number
    return {**given, "tables": COMPILED.Tables(torch.device("cpu")), **others}


@pytest.mark.parametrize(
    "change",
    [
        *(("parts", 1, 5, 1), ("parts", 3, 5, 0), ("parts", 3, 5, -1), ("parts", 3, 5, 2)),
        *(("table", 0, segments.AT, 41), ("table", 0, segments.ENTRY, 0)),
        ("table", 0, segments.ITEM, 48),
    ],
)
def test_what_is_refused(change):
    with executed(execute=False), pytest.raises(ConfigurationError):
        COMPILED.average(**to_average(change))


def test_more_ranks_than_a_kernel_adds_up_are_refused():
    rows = np.zeros((65, 6), np.int64)
    with pytest.raises(ConfigurationError, match="64"):
        COMPILED.average(**to_average(parts=rows))


class Operations(TorchDispatchMode):
    """Counts torch's operations but views and allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in ("empty", "view", "detach")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parameters", [1, 48])
def test_launches(parameters):
    """Two to pack, and four to average, whatever ranks, shards and parameters; one more for one
    more dtype. Tables that come again are not uploaded."""
    size = 20 * parameters
    shards = [ranks_of(3, size, 0.5, shard) for shard in range(2)]
    messages = Messages(shards, [size, size])
    dtypes = ["float32", "bfloat16"][: min(parameters, 2)]
    bounds = list(range(0, size + 1, 20))
    parts = [each._replace(item=0) for shard in (0, 1) for each in cut(shard, bounds, dtypes)]
    outs = [torch.empty(each.count, dtype=getattr(torch, each.dtype)) for each in parts]
    table = table_of(
        [
            {"x": x, "at": e.at, "entry": e.shard, "item": 0}
            for x, e in zip(outs, parts, strict=True)
        ]
    )
    given = to_average(came=torch.from_numpy(messages.bytes), parts=messages.parts, table=table)
    index_packing = module("index_packing", interpreted=False)
    rooms = np.full(6, size)
    to_pack = np.stack([size * np.arange(6), rooms, rooms, 9 * size * np.arange(6)], axis=1)
    entries = torch.zeros(6 * size, dtype=torch.int32), torch.zeros(6 * size)
    message = torch.zeros(9 * 6 * size, dtype=torch.uint8)
    counted = []
    for _ in range(2):
        with executed(execute=False) as launches, Operations() as operations:
            COMPILED.average(**given)
            averaging = sum(map(len, launches.kernels.values()))
            index_packing.pack(*entries, to_pack, None, message, given["found"], given["tables"])
            packing = sum(map(len, launches.kernels.values())) - averaging
        counted.append(operations.count)
    assert averaging == 3 + len(dtypes)
    assert packing == 2
    assert counted[0] > 0
    assert counted[1] == 0


@pytest.mark.storm
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_registers(tmp_path, architecture, ranks):
    messages = Messages([ranks_of(ranks, 3000, 0.1)], [3000])
    with executed(architecture, execute=False) as launches:
        averages(COMPILED, messages, [Segment(0, 0, 3000, "float32")])
    for made in launches.kernels.values():
        assert needs(made[-1], tmp_path)[1] == 0


@pytest.mark.storm
def test_whole_tiles_are_stored_by_16_bytes():
    messages = Messages([ranks_of(2, 2100, 0.1)], [2100])
    with executed() as launches:
        averages(COMPILED, messages, [Segment(0, 40, 2048, "float32")])
    assert launches.accesses["_average"][16] >= 512
