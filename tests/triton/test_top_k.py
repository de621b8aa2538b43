"""Top-k by Triton kernels has the CPU kernels' places, values and residuals, bit for bit: in
Triton's interpreter, and as PTX that is executed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycollective import _core
from pycollective.errors import ConfigurationError
from tests.inputs import dtype_of, from_words
from tests.kernels.test_sparse import INPUTS, make, subnormals
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module
from tests.triton.executed import MOSTLY_INTERPRETED, executed, ways
from tests.triton.test_compiled import needs

STORM = pytest.mark.storm
COMPILED = module("top_k", interpreted=False)
kernels = ways("top_k")
# Types of gradients and values, and whether something is held.
TYPES = [
    ("float32", "float32", True),
    ("bfloat16", "float16", False),
    ("float16", "bfloat16", True),
    ("bfloat16", "bfloat16", True),
]
NUMPY = {"bfloat16": np.int16}  # as which the CPU's kernels take its words
BEFORE = 3  # entries that there are already
PLACE = 3_000_000_000


def tensor(array):
    """A copy of an array's bits; ml_dtypes' types are not torch's."""
    kind = getattr(torch, array.dtype.name)
    if array.size == 0:
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(array.view(np.uint8).copy()).view(kind)


def bits(values):
    return values.view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)


class Selection:
    """What a selection has written, on a device or by the CPU's kernels."""

    def __init__(self, x, held, values):
        self.x, self.held, self.values = x, held, values
        self.room = torch.full((len(x) + 4,), 7.0)
        self.left = self.room[: len(x)]

    def run(self, kernels, k, chunk=0):
        """By the kernels; nothing beyond what is selected is written."""
        self.kernels = kernels
        self.entries = kernels.Entries.empty(len(self.x) + 8, getattr(torch, self.values), "cpu")
        self.entries.places.fill_(7)
        self.entries.values.fill_(7)
        self.entries.count.fill_(BEFORE)
        self.bad = torch.zeros(1, dtype=torch.int32)
        held = None if self.held is None else tensor(self.held)
        given = tensor(self.x), held, self.left, k
        if chunk:
            kernels.top_k_chunks(*given, chunk, self.entries, self.bad, PLACE)
        else:
            kernels.top_k(*given, self.entries, self.bad, PLACE)

    def check(self, kernels, k, chunk=0):
        """That it is what the CPU's kernels write."""
        self.run(kernels, k, chunk)
        left = np.empty(len(self.x), np.float32)
        places = np.empty(len(self.x), np.uint32)
        given = self.x, self.held, left, k
        found = _core.top_k_chunks(*given, chunk, places) if chunk else _core.top_k(*given, places)
        assert int(self.bad) == (found < 0)
        if found < 0:
            return
        places = places[:found]
        values = np.empty(found, dtype_of(self.values))
        _core.sparse_take(left, places, values.view(NUMPY.get(self.values, values.dtype)))
        self.is_written(places + np.uint32(PLACE), values, left)

    def is_written(self, places, values, left):
        end = BEFORE + len(places)
        assert int(self.entries.count) == end
        assert np.array_equal(self.entries.places[BEFORE:end].numpy().view(np.uint32), places)
        assert np.array_equal(bits(self.entries.values[BEFORE:end]), values.view(np.uint8))
        assert np.array_equal(bits(self.left), left.view(np.uint8))
        assert (self.room[len(left) :] == 7).all()
        for each in self.entries[:2]:
            assert (each[:BEFORE] == 7).all()
            assert (each[end:] == 7).all()


def selection(kind, count, types):
    dtype, values, holds = types
    held = make(kind, "float32", count, seed=1) * np.float32(1e-3) if holds else None
    return Selection(make(kind, dtype, count), held, values)


def in_turns(kinds, cases, usual=1):
    """Each kind with each case; the usual run has `usual` of the cases of each kind, in turns."""
    return [
        pytest.param(kind, *case, marks=() if (row + column) % len(cases) < usual else STORM)
        for row, kind in enumerate(kinds)
        for column, case in enumerate(cases)
    ]


# Elements, k, chunk: with a chunk that is no power of two, tails of each kind, and long chunks.
CHUNKS = [
    *((1, 1, 64), (63, 5, 64), (64, 64, 64), (1000, 10, 320), (5000, 41, 4096), (2049, 20, 1024)),
]
LONG_CHUNKS = [(30_000, 200, 20_032), (70_001, 655, 65_536)]
USUAL = [("gaussian", 33_000, 300), ("few values", 9000, 6000)]
TENSORS = [(1, 1), (777, 8), (4096, 41), (4097, 40), (9000, 0), (9000, 6000), (33_000, 300)]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "count", "k", "chunk"), in_turns(INPUTS, CHUNKS))
def test_chunks(kernels, kind, count, k, chunk):
    selection(kind, count, TYPES[k % 4]).check(kernels, k, chunk)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "count", "k"), [*USUAL, *in_turns(INPUTS, TENSORS, 0)])
def test_tensors(kernels, kind, count, k):
    selection(kind, count, TYPES[count % 4]).check(kernels, k)


@pytest.mark.parametrize(("kind", "count", "k", "chunk"), in_turns(INPUTS, LONG_CHUNKS, 0))
def test_long_chunks(kernels, kind, count, k, chunk):
    selection(kind, count, TYPES[count % 4]).check(kernels, k, chunk)


@pytest.mark.parametrize(
    ("kind", "chunk"), [("few values", 640), pytest.param("gaussian", 4096, marks=STORM)]
)
def test_a_whole_chunk_and_a_tail(kernels, kind, chunk):
    selection(kind, chunk + 70, TYPES[0]).check(kernels, chunk // 50, chunk)


@MOSTLY_INTERPRETED
def test_a_long_chunk_and_a_tail(kernels):
    selection("gaussian", 21_000, TYPES[0]).check(kernels, 200, 20_032)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("types", TYPES)
def test_types(kernels, types):
    """With what is subnormal, or becomes so in a narrower type, or too large for one."""
    dtype, values, _ = types
    wide = np.concatenate(
        [
            *(subnormals(200), subnormals(200, 1) * np.float32(2.0**100)),
            *(make("gaussian", "float32", 400), make("lognormal", "float32", 400) * 1e5),
        ]
    )
    wide = wide.astype(dtype_of(dtype))
    x = np.where(np.isfinite(wide.astype(np.float32)), wide, np.zeros_like(wide))
    Selection(x, None, values).check(kernels, 500, 640)
    Selection(x, subnormals(1200, 2), values).check(kernels, 1100)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("where", "value"), [(0, "nan"), (4099, "-inf"), (8999, "inf")])
def test_what_is_not_finite_is_told(kernels, value, where):
    x = make("gaussian", "float32", 9000)
    x[where] = float(value)
    Selection(x, None, "float32").check(kernels, 41, 4096)
    Selection(x, None, "float32").check(kernels, 100)


@MOSTLY_INTERPRETED
def test_a_sum_that_overflows_is_told(kernels):
    x = make("gaussian", "float32", 100)
    held = x.copy()
    x[50] = held[50] = 3e38
    Selection(x, held, "float32").check(kernels, 10, 64)


@MOSTLY_INTERPRETED
def test_no_elements(kernels):
    selection("gaussian", 0, TYPES[0]).check(kernels, 5, 64)
    selection("gaussian", 0, TYPES[0]).check(kernels, 0)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("shift", [*(pytest.param(n, marks=STORM) for n in (0, 20)), 10])
def test_edges_of_bins(kernels, shift):
    """The k-th magnitude is at a bin's edge, or beside it."""
    edge = 0x3FC00000
    random = np.random.default_rng(shift)
    words = edge + (random.integers(-1, 2, 9000) << shift) + random.integers(-1, 2, 9000)
    x = from_words(words | random.integers(0, 2, 9000) << 31, "float32")
    keys = np.sort(words)[::-1]
    reached = int((keys >= edge).sum())
    for k in (reached, reached + 1):
        Selection(x, None, "float32").check(kernels, k)


def sampled(count):
    """Where `_begin` looks."""
    number = np.arange(4096, dtype=np.uint64)
    mixed = (number + 1) * np.uint64(0x1E3779B9) & np.uint64(0xFFFFFFFF)
    piece = np.uint64(count // 4096)
    return (number * piece + (mixed * piece >> np.uint64(32))).astype(np.int64)


@MOSTLY_INTERPRETED
@STORM
def test_a_guess_that_is_too_high_is_given_up(kernels):
    """The sample alone has large elements, fewer than k."""
    x = make("gaussian", "float32", 33_000)
    x[sampled(len(x))[::40]] *= np.float32(1e10)
    chosen = Selection(x, None, "float32")
    chosen.check(kernels, 300)


@MOSTLY_INTERPRETED
def test_a_block_with_more_candidates_than_room(kernels):
    """Its elements are read, and those of the others' candidates."""
    x = make("gaussian", "float32", 33_000) * np.float32(1e-3)
    x[4000:5600] = make("gaussian", "float32", 1600, 1)
    Selection(x, None, "float32").check(kernels, 1500)


def merged(histograms, wanted):
    """The bin in which the wanted elements end, and how many are wanted of it."""
    above = np.cumsum(sum(histograms)[::-1])[::-1]
    place = int(np.flatnonzero(above >= wanted)[-1])
    return place, wanted - int(above[place] - sum(histograms)[place])


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    "kind", ["few values", *(pytest.param(kind, marks=STORM) for kind in ("gaussian", "zeros"))]
)
def test_steps_over_several_ranks(kernels, kind):
    """Sum, histograms, selection: each step is that of the CPU's kernels."""
    parts = [selection(kind, count, TYPES[0]) for count in (5000, 8192, 30)]
    wanted, prefix = 700, 0
    lefts = [np.empty(len(each.x), np.float32) for each in parts]
    bad = torch.zeros(1, dtype=torch.int32)
    for part, left in zip(parts, lefts, strict=True):
        assert _core.sparse_add(part.x, part.held, left)
        kernels.add(tensor(part.x), tensor(part.held), part.left, bad)
        assert np.array_equal(bits(part.left), left.view(np.uint8))
    assert int(bad) == 0
    for shift, n in kernels.ROUNDS:
        found = []
        for part, left in zip(parts, lefts, strict=True):
            want = np.ones(1 << n, np.int64)
            _core.sparse_histogram(left, shift, n, prefix, want)
            got = torch.ones(1 << n, dtype=torch.int64)
            kernels.histogram(part.left, shift, n, torch.tensor([prefix]), got)
            assert np.array_equal(got.numpy(), want)
            found.append(want - 1)
        place, wanted = merged(found, wanted)
        prefix = prefix << n | place
    for part, left in zip(parts, lefts, strict=True):
        ties = min(wanted, len(left) // 20)
        places = np.empty(len(left), np.uint32)
        places = places[: _core.sparse_select(left, prefix, ties, places)]
        values = np.empty(len(places), np.float32)
        _core.sparse_take(left, places, values)
        part.entries = kernels.Entries.empty(len(left) + 8, torch.float32, "cpu")
        part.entries.places.fill_(7)
        part.entries.values.fill_(7)
        part.entries.count.fill_(BEFORE)
        kernels.select(part.left, torch.tensor([prefix]), torch.tensor([ties]), part.entries, PLACE)
        part.is_written(places + np.uint32(PLACE), values, left)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    ("kind", "key", "ties"),
    [("gaussian", -1, 0), ("gaussian", 0x3F800000, -3), ("zeros", 0, 1 << 40)],
)
def test_no_more_is_selected_than_there_is_room_for(kernels, kind, key, ties):
    """Whatever other ranks say the key and the ties are."""
    x = make(kind, "float32", 5000)
    room, most = BEFORE + 27, 27
    places = torch.full((room + 9,), 7, dtype=torch.int32)
    values, left = torch.full((room + 9,), 7.0), tensor(x)
    entries = kernels.Entries(places[:room], values[:room], torch.tensor([BEFORE]))
    kernels.select(left, torch.tensor([key]), torch.tensor([ties]), entries, PLACE)
    magnitude = x.view(np.int32) & 0x7FFFFFFF
    want = np.flatnonzero(magnitude >= key if ties > 0 else magnitude > key)[:most]
    assert len(want) == most
    assert int(entries.count) == room
    assert np.array_equal(places[BEFORE:room].numpy().view(np.uint32), want + PLACE)
    assert np.array_equal(values[BEFORE:room].numpy(), x[want])
    assert (places[room:] == 7).all()
    assert (values[room:] == 7).all()
    x[want] -= x[want]
    assert np.array_equal(bits(left), x.view(np.uint8))


def arguments(**others):
    """Of `top_k`, by their names."""
    x, held, left = torch.zeros(3, 200)
    entries = COMPILED.Entries.empty(20, torch.float32, "cpu")
    given = {"x": x, "held": held, "left": left, "k": 5, "entries": entries}
    return {**given, "bad": torch.zeros(1, dtype=torch.int32), **others}


def entries_for(capacity, dtype=torch.float32):
    return COMPILED.Entries.empty(capacity, dtype, "cpu")


@pytest.mark.parametrize(
    "others",
    [
        *({"x": torch.zeros(400)[::2]}, {"x": torch.zeros(200, dtype=torch.float64)}),
        *({"held": torch.zeros(199)}, {"held": torch.zeros(200, dtype=torch.bfloat16)}),
        *({"left": torch.zeros(199)}, {"left": torch.zeros(200, device="meta")}),
        *({"k": 201}, {"k": -1}, {"entries": entries_for(4)}, {"place": (1 << 32) - 199}),
        *({"entries": entries_for(20, torch.float64)}, {"bad": torch.zeros(1)}),
        {"place": -1},
    ],
)
def test_arguments_that_are_refused(others):
    with pytest.raises(ConfigurationError):
        COMPILED.top_k(**arguments(**others))


@pytest.mark.parametrize("others", [{"chunk": 65}, {"k": 65}, {"k": 0}, {"k": 21}])
def test_chunks_that_are_refused(others):
    with pytest.raises(ConfigurationError):
        COMPILED.top_k_chunks(**{**arguments(), "chunk": 64, **others})


def test_room_for_too_many_is_refused():
    """Numbers of entries are int32."""
    entries = COMPILED.Entries.empty(1 << 31, torch.float32, "meta")
    with pytest.raises(ConfigurationError, match="less than 2\\^31"):
        entries.check("entries", 0, torch.device("meta"))


@STORM
def test_another_length_compiles_nothing():
    """Nor does another place; lengths change from parameter to parameter."""
    with executed(execute=False) as launches:
        found = []
        for count, k in ((33_000, 330), (65_536, 1)):
            selection("zeros", count, TYPES[0]).run(COMPILED, k)
            found.append({id(each) for every in launches.kernels.values() for each in every})
    assert found[0] == found[1]


def moved(launches, count):
    return sum(launches.moved.values()) / count


@pytest.mark.parametrize(
    ("chunk", "held", "most"),
    [
        (4096, True, 12.8),
        *(pytest.param(*each, marks=STORM) for each in [(1024, True, 12.9), (4096, False, 8.8)]),
    ],
)
def test_bytes_by_chunk(record_property, chunk, held, most):
    """Each element is read and written once, in vectors of 16 bytes; a hundredth is written apart.

    (A step has the packing of places beside: `test_index_packing.py`.)
    """
    count = 16 * chunk
    chosen = selection("gaussian", count, ("float32", "float32", held))
    with executed() as launches:
        chosen.check(COMPILED, round(0.01 * chunk), chunk)
    record_property("bytes an element", moved(launches, count))
    assert moved(launches, count) <= most
    assert launches.accesses["chunks_in_registers"][16] == count // 4 * (3 if held else 2)


def test_bytes_by_tensor(record_property):
    count = 40_000
    with executed() as launches:
        selection("gaussian", count, TYPES[0]).check(COMPILED, count // 100)
    record_property("bytes an element", moved(launches, count))
    assert moved(launches, count) <= 18.4  # of which the sample and three sums of bins are 1.8
    assert launches.accesses["_add"][16] >= count // 4096 * 4096 // 4 * 3


def test_offsets_have_64_bits():
    """The last two chunks of 2**31 + 70 elements."""
    chunk, k, tail = 1024, 10, 3
    skipped = (1 << 31) // chunk - 1
    x, held = (make("gaussian", "float32", chunk + 70, seed) for seed in (0, 1))
    constants = {"SIZE": chunk, "WIDE": chunk, "LANES": 32, "HELD": True, "TYPE": "float32"}
    constants |= {"VALUE": "float32", "FORMAT": (23, 0x7F800000, 0x7FC00000)}
    types = {"x": "*i32", "held": "*fp32", "left": "*fp32", "places": "*i32", "values": "*i32"}
    types |= {
        "count": "*i64",
        "bits": "*i32",
        "bad": "*i32",
        "n": "i64",
        "k": "i32",
        "tail": "i32",
        "place": "i32",
    }
    aligned = ("x", "held", "left")
    made = compiled(
        COMPILED.chunks_in_registers,
        types,
        constants,
        {**COMPILED.OPTIONS, "num_warps": 1},
        aligned,
    )
    memory = Memory()
    at = [memory.allocate(name, x.nbytes) for name in ("x", "held", "left")]
    for address, array in zip(at, (x, held), strict=False):
        memory.put(address, array)
    places, values = (memory.allocate(name, 4 * (k + tail)) for name in ("places", "values"))
    count, bad = memory.allocate("count", 8), memory.allocate("bad", 4)
    words = memory.allocate("bits", 8 * chunk // 32)
    memory.put(count, np.array([-skipped * k], np.int64))
    memory.put(bad, np.zeros(1, np.int32))
    start = skipped * chunk
    arguments = [each - 4 * start for each in at]
    arguments += [places, values, count, words - skipped * chunk // 8, bad]
    arguments += [start + len(x), k, tail, 0, 0, 0]
    kernel = parse(made.asm["ptx"])
    Launch(kernel, range(skipped, skipped + 2), memory, arguments, made.metadata.shared).run()
    first = [x[:chunk] + held[:chunk], x[chunk:] + held[chunk:]]
    want = [np.empty(k, np.uint32), np.empty(tail, np.uint32)]
    for c, each in zip(first, want, strict=True):
        _core.top_k(c, None, np.empty_like(c), len(each), each)
    want = np.concatenate([want[0], want[1] + np.uint32(chunk)])
    got = memory.get(places, np.empty(k + tail, np.uint32))
    assert np.array_equal(got, want + np.uint32(start))
    left = memory.get(at[2], np.empty_like(x))
    whole = np.concatenate(first)
    whole[want] -= whole[want]
    assert np.array_equal(left.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("architecture", [*(pytest.param(n, marks=STORM) for n in (80, 100)), 90])
@pytest.mark.parametrize("chunk", [4096, *(pytest.param(n, marks=STORM) for n in (1024, 8192, 0))])
def test_registers(tmp_path, record_property, chunk, architecture):
    """No thread keeps numbers in memory for want of registers."""
    chosen = selection("zeros", 40_000, TYPES[chunk == 8192])
    with executed(architecture, execute=False) as launches:
        chosen.run(COMPILED, 82, chunk)
    for name, made in launches.kernels.items():
        registers, spilled = needs(made[-1], tmp_path)
        record_property(f"registers {name}", registers)
        assert spilled == 0
