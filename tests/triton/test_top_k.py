"""Top-k by Triton kernels has the CPU kernels' places, values and residuals, bit for bit: in
Triton's interpreter, and as PTX that is executed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycollective import _core, segments
from pycollective.errors import ConfigurationError
from tests.inputs import dtype_of, from_words
from tests.kernels.segments import table_of
from tests.kernels.test_sparse import INPUTS, make, run_top_k, subnormals, taken
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module
from tests.triton.executed import MOSTLY_INTERPRETED, address, executed, ways
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


class Row:
    """A segment, with tensors that a table points to; something lies behind what is written."""

    def __init__(self, x, held=None, k=0, item=0, skew=0):
        self.x, self.held, self.k, self.item = x, held, k, item
        n = len(x)
        self.room = torch.full((n + 8,), 7.0)
        self.left = self.room[skew : skew + n]
        wide = torch.cat([torch.zeros(skew, dtype=getattr(torch, x.dtype.name)), tensor(x)])
        self.given = wide[skew:]
        self.had = None if held is None else tensor(held)

    def taken(self, chunk):
        """How many entries it has."""
        if not self.k:
            return 0
        n, tail = divmod(len(self.x), chunk) if chunk else (1, 0)
        return n * self.k + -(-self.k * tail // chunk if chunk else 0)

    def is_left(self, left):
        n, first = len(left), self.left.storage_offset()
        assert np.array_equal(bits(self.left), left.view(np.uint8))
        assert (self.room[:first] == 7).all()
        assert (self.room[first + n :] == 7).all()


class Selection:
    """What a selection has written, on a device or by the CPU's kernels."""

    def __init__(self, rows, values="float32"):
        self.rows, self.values = rows, values
        self.items = max([row.item for row in rows], default=0) + 1

    def table(self, chunk=0):
        """Places, entries and bytes of rows lie apart, bytes at odd places."""
        place, entry, byte, given = PLACE, BEFORE, 5, []
        for row in self.rows:
            more = {"k": row.k, "item": row.item, "entry": entry}
            given.append({"x": row.given, "held": row.had, "left": row.left, **more})
            for each in (row.given, row.had, row.left):
                if each is not None:
                    address(each)
            given[-1]["at"] = place if row.k else byte
            if row.k:
                place += len(row.x) + 10
                entry += row.taken(chunk) + 2
            else:
                byte += 4 * len(row.x) + (1 if byte % 4 else 4)
        self.messages = torch.full((byte,), 7, dtype=torch.uint8)
        self.found = torch.zeros(4 + 2 * self.items, dtype=torch.int32)
        self.room_for(entry)
        return table_of(given)

    def room_for(self, count):
        self.places = torch.full((count,), 7, dtype=torch.int32)
        self.entries = torch.full((count,), 7.0, dtype=getattr(torch, self.values))

    def run(self, kernels, chunk=0):
        self.select(kernels, self.table(chunk), chunk, kernels.Tables(torch.device("cpu")))

    def select(self, kernels, table, chunk, tables):
        given = self.places, self.entries, self.messages, self.found
        kernels.top_k(table, chunk, *given, tables)

    def check(self, kernels, chunk=0, tables=None):
        """That it is what the CPU's kernel writes, and nothing else is written."""
        table = self.table(chunk)
        given = self.places.numpy().view(np.uint32), self.entries, self.messages, self.found
        want = self.of_cpu(_core.top_k, table, chunk, *given)
        self.select(kernels, table, chunk, tables or kernels.Tables(torch.device("cpu")))
        self.is_same(want)

    def written(self):
        rooms = (row.room for row in self.rows)
        return [self.found, self.messages, self.places, self.entries, *rooms]

    def of_cpu(self, call, *given):
        """All that may be written, as a CPU's kernel leaves it. Afterwards it is as it was."""
        before = [each.clone() for each in self.written()]
        call(*given)
        made = [each.clone() for each in self.written()]
        for each, was in zip(self.written(), before, strict=True):
            each.copy_(was)
        return made

    def is_same(self, want):
        """Where something is not finite, no more than what is found."""
        assert torch.equal(self.found, want[0])
        if not self.found[segments.BAD]:
            for each, wanted in zip(self.written(), want, strict=True):
                assert np.array_equal(bits(each), bits(wanted))


def row_of(kind, count, types, k=0, **more):
    dtype, _, holds = types
    held = make(kind, "float32", count, seed=1) * np.float32(1e-3) if holds else None
    return Row(make(kind, dtype, count), held, k, **more)


def selection(kind, count, types, k):
    return Selection([row_of(kind, count, types, k)], types[1])


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
TENSORS = [(1, 1), (777, 8), (4096, 41), (4097, 40), (9000, 6000), (33_000, 300)]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "count", "k", "chunk"), in_turns(INPUTS, CHUNKS))
def test_chunks(kernels, kind, count, k, chunk):
    selection(kind, count, TYPES[k % 4], k).check(kernels, chunk)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "count", "k"), [*USUAL, *in_turns(INPUTS, TENSORS, 0)])
def test_tensors(kernels, kind, count, k):
    selection(kind, count, TYPES[count % 4], k).check(kernels)


@pytest.mark.parametrize(("kind", "count", "k", "chunk"), in_turns(INPUTS, LONG_CHUNKS, 0))
def test_long_chunks(kernels, kind, count, k, chunk):
    selection(kind, count, TYPES[count % 4], k).check(kernels, chunk)


@pytest.mark.parametrize(
    ("kind", "chunk"), [("few values", 640), pytest.param("gaussian", 4096, marks=STORM)]
)
def test_a_whole_chunk_and_a_tail(kernels, kind, chunk):
    selection(kind, chunk + 70, TYPES[0], chunk // 50).check(kernels, chunk)


@MOSTLY_INTERPRETED
def test_a_long_chunk_and_a_tail(kernels):
    selection("gaussian", 21_000, TYPES[2], 200).check(kernels, 20_032)


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
    Selection([Row(x, None, 500)], values).check(kernels, 640)
    Selection([Row(x, subnormals(1200, 2), 1100)], values).check(kernels)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    ("where", "value"), [(0, "nan"), pytest.param(4099, "-inf", marks=STORM), (8999, "inf")]
)
def test_what_is_not_finite_is_told(kernels, value, where):
    x = make("gaussian", "float32", 9000)
    x[where] = float(value)
    Selection([Row(x, None, 41)]).check(kernels, 4096)
    Selection([Row(x, None, 100)]).check(kernels)


@MOSTLY_INTERPRETED
def test_a_sum_that_overflows_is_told(kernels):
    x = make("gaussian", "float32", 100)
    held = x.copy()
    x[50] = held[50] = 3e38
    Selection([Row(x, held, 10)]).check(kernels, 64)


def rows_of_all_kinds(long):
    """Of three dtypes, long, short, empty, copied, all zero, at odd places, with nothing held."""
    zero = np.zeros(300, np.float32)
    some = make("gaussian", "float32", 300)
    few = zero.copy()
    few[7] = -np.float32(1e-45)
    return [
        row_of("gaussian", 70, TYPES[0], item=2),
        row_of("gaussian", 6000, TYPES[0], 41, skew=1),
        Row(-zero, None, item=3),
        row_of("lognormal", 5000, TYPES[3], 40, item=1),
        row_of("gaussian", 0, TYPES[0], 5, item=4),
        Row(np.zeros(0, np.float32), None, item=4),
        row_of("few values", 4100, ("float32", "float32", False), 60, item=5),
        Row(np.full(90, -0.0, np.float32), None, 6, item=6),
        Row(zero, some, 9, item=7),
        Row(zero, few, 3, item=8),
        Row(few, None, 3, item=9, skew=3),
        row_of("gaussian", 4097, TYPES[2], item=10, skew=1),
        row_of("gaussian", 64, TYPES[2], 1, item=10),
        row_of("gaussian", long, TYPES[0], 60, item=11),
        row_of("gaussian", 1, TYPES[1], item=12),
        Row(few, None, item=13),
    ]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(n, marks=STORM) for n in (64, 640, 4096, 8192))]
)
def test_many_rows(kernels, chunk):
    """The same workspaces serve again, whatever was there before."""
    tables = kernels.Tables(torch.device("cpu"))
    for turn in (1, -1):
        rows = rows_of_all_kinds(2000 if 0 < chunk < 8192 else 33_000)
        Selection(rows[::turn], "bfloat16").check(kernels, chunk, tables)


@pytest.mark.parametrize(
    ("chunk", "dtypes", "most"),
    [
        *((64, 1, 1), (0, 3, 11)),
        *(pytest.param(*each, marks=STORM) for each in ((64, 3, 3), (8192, 1, 7), (0, 1, 7))),
    ],
)
def test_launches(chunk, dtypes, most):
    """As many for many rows as for one; those that read gradients come once a dtype."""
    rows = rows_of_all_kinds(33_000)
    if dtypes == 1:
        rows = [row for row in rows if row.x.dtype == np.float32]
    for part in (rows, rows[1:2]) if dtypes == 1 else (rows,):
        with executed(execute=False) as launches:
            Selection(part).run(COMPILED, chunk)
        assert sum(map(len, launches.kernels.values())) == most


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("chunk", [0, 64])
def test_no_elements(kernels, chunk):
    selection("gaussian", 0, TYPES[0], 5).check(kernels, chunk)
    Selection([]).check(kernels, chunk)


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
        Selection([Row(x, None, k)]).check(kernels)


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
    Selection([Row(x, None, 300)]).check(kernels)


@MOSTLY_INTERPRETED
def test_a_block_with_more_candidates_than_room(kernels):
    """Its elements are read, and those of the others' candidates."""
    x = make("gaussian", "float32", 33_000) * np.float32(1e-3)
    x[4000:5600] = make("gaussian", "float32", 1600, 1)
    Selection([Row(x, None, 1500)]).check(kernels)


# Of four parameters the sizes of three ranks' pieces, where they begin, and how many are wanted.
SIZES = np.array([(5000, 8192, 30), (0, 4096, 5000), (100, 0, 0), (70, 40, 0)])
BEGINS = np.array([(8222, 30, 0), (-1, 0, 4096), (0, -1, -1), (0, 70, -1)])
WANTED = np.array([700, 90, 5, 110])


def ends(histograms, wanted, begins):
    """(the bin in which the wanted elements end, how many are wanted of it, of each rank's how many
    at most)."""
    total = histograms.sum(0)
    above = np.cumsum(total[::-1])[::-1]
    place = np.flatnonzero(above >= wanted)[-1]
    there = histograms[:, place]
    left = wanted - (above[place] - total[place])
    before = [there[(begins >= 0) & (begins < begin)].sum() for begin in begins]
    return [place, left, *np.maximum(left - before, 0)]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    "kind", ["few values", *(pytest.param(kind, marks=STORM) for kind in ("gaussian", "zeros"))]
)
def test_steps_over_several_ranks(kernels, kind):
    """Each step is that of the CPU's kernels. Each rank adds up two parameters' histograms, or one
    that is padding."""
    on, each = kernels.Tables(torch.device("cpu")), 2
    ranks, prefixes, wanted = [], torch.zeros(4, dtype=torch.int64), WANTED
    for sizes in SIZES.T:
        rows = [
            row_of(kind, size, TYPES[n % 2 * 2], k, item=n)
            for n, (size, k) in enumerate(zip(sizes, WANTED, strict=True))
        ]
        chosen = Selection([*rows, row_of("gaussian", 50, TYPES[0], item=4)])
        table = chosen.table()
        given = table, chosen.messages, chosen.found
        want = chosen.of_cpu(_core.sparse_add, *given)
        kernels.sparse_add(*given, on)
        chosen.is_same(want)
        ranks.append((chosen, table[:4]))
    for shift, n in kernels.ROUNDS:
        histograms = []
        for _, table in ranks:
            got = torch.ones(6, 1 << n, dtype=torch.int32)
            want = np.ones((6, 1 << n), np.int32)
            kernels.sparse_histogram(table, shift, n, prefixes, got, on)
            _core.sparse_histogram(table, shift, n, prefixes.numpy(), want[:4])
            assert np.array_equal(got, want)
            histograms.append(want - 1)
        histograms = np.stack(histograms)
        begins = np.full((3, 6), -1)
        begins[:, :4] = BEGINS.T
        heard = torch.stack(
            [
                kernels.merge(
                    torch.from_numpy(histograms[:, each * r :][:, :each].copy()),
                    *(torch.from_numpy(wanted), begins, r, on),
                )
                for r in range(3)
            ]
        )
        want = np.array([ends(histograms[:, i], wanted[i], BEGINS[i]) for i in range(4)])
        found = [kernels.take(heard, n, prefixes, r) for r in range(3)]
        for r, (prefix, left, tied) in enumerate(found):
            assert np.array_equal(prefix, prefixes.numpy() << n | want[:, 0])
            assert np.array_equal(left, want[:, 1])
            assert np.array_equal(tied, want[:, 2 + r])
        prefixes, wanted = found[0][0], want[:, 1].copy()
    for (chosen, table), (_, _, ties) in zip(ranks, found, strict=True):
        is_selected(kernels, chosen, table, prefixes, ties, on)


def is_selected(kernels, chosen, table, keys, ties, on):
    """`sparse_select` takes what it says, but no more than K of a row."""
    most = int(np.minimum(table[:, segments.K], table[:, segments.COUNT]).sum())
    chosen.room_for(most + 9)
    out = chosen.places[:most], chosen.entries[:most]
    pieces = [row.left.numpy().copy() for row in chosen.rows[: len(table)]]
    count = int(kernels.sparse_select(table, keys, ties, *out, on))
    want, values = [], []
    for row, numbers, left, key, tied in zip(
        *(chosen.rows[: len(table)], table, pieces, keys.tolist(), ties.tolist()), strict=True
    ):
        magnitude = left.view(np.int32) & 0x7FFFFFFF
        equal = np.flatnonzero(magnitude == key)[: max(tied, 0)]
        found = np.sort(np.concatenate([np.flatnonzero(magnitude > key), equal]))[: row.k]
        of_row, left = taken(left, found, chosen.values)
        values.append(of_row)
        want.append(found.astype(np.uint32) + np.uint32(numbers[segments.AT]))
        row.is_left(left)
    want, values = np.concatenate(want), np.concatenate(values)
    assert count == len(want)
    assert np.array_equal(chosen.places[:count].numpy().view(np.uint32), want)
    assert np.array_equal(bits(chosen.entries[:count]), values.view(np.uint8))
    for each in (chosen.places, chosen.entries):
        assert (each[count:] == 7).all()


@MOSTLY_INTERPRETED
def test_no_more_is_selected_than_there_is_room_for(kernels):
    """Whatever other ranks say the key and the ties are."""
    given = [
        *(("gaussian", -1, 0), ("gaussian", 0x3F800000, -3), ("zeros", 0, 1 << 40)),
        *(("gaussian", 1 << 40, 7), ("gaussian", 0x7F800000, 1 << 62), ("gaussian", -(1 << 62), 1)),
    ]
    rows = [Row(make(kind, "float32", 5000), None, 27) for kind, _, _ in given]
    rows.append(Row(make("gaussian", "float32", 20), None, 27))
    chosen = Selection(rows)
    table = chosen.table()
    for row in rows:
        row.left.copy_(tensor(row.x))
    keys, ties = torch.tensor([each[1:] for each in [*given, given[0]]]).T.contiguous()
    on = kernels.Tables(torch.device("cpu"))
    wrapped = keys.to(torch.int32).to(torch.int64)
    is_selected(kernels, chosen, table, wrapped, ties, on)


@MOSTLY_INTERPRETED
def test_nothing_to_select(kernels):
    chosen = selection("gaussian", 0, TYPES[0], 5)
    one = torch.zeros(1, dtype=torch.int64)
    on = kernels.Tables(torch.device("cpu"))
    is_selected(kernels, chosen, chosen.table(), one, one, on)


@pytest.mark.parametrize(
    "others",
    [
        *({"places": torch.zeros(4, dtype=torch.int32)}, {"places": torch.zeros(5)}),
        *({"values": torch.zeros(4)}, {"values": torch.zeros(5, dtype=torch.float64)}),
        *({"chunk": 65}, {"chunk": -64}, {"chunk": 65_600}, {"found": torch.zeros(6)}),
        {"found": torch.zeros(5, dtype=torch.int32)},
        *({"messages": torch.zeros(41, dtype=torch.uint8)}, {"messages": torch.zeros(42)}),
        *({"table": np.zeros((2, 8), np.int64)}, {"table": np.full((1, 9), 3)}),
        {"table": np.zeros((2, 9), np.int32)},
    ],
)
def test_arguments_that_are_refused(others):
    chosen = Selection(
        [row_of("gaussian", 200, TYPES[0], 5), row_of("gaussian", 9, TYPES[0], item=1)]
    )
    table = chosen.table()
    table[0, segments.ENTRY], table[1, segments.AT] = 0, 6
    given = {"table": table, "chunk": 0, "places": torch.zeros(5, dtype=torch.int32)}
    given |= {"values": torch.zeros(5), "messages": torch.zeros(42, dtype=torch.uint8)}
    given |= {"found": torch.zeros(6, dtype=torch.int32)}
    with pytest.raises(ConfigurationError):
        COMPILED.top_k(**{**given, **others}, tables=COMPILED.Tables(torch.device("cpu")))


@STORM
def test_another_length_compiles_nothing():
    """Nor does another number of rows."""
    with executed(execute=False) as launches:
        found = []
        for count, k, many in ((33_000, 330, 1), (65_536, 1, 3)):
            Selection([row_of("zeros", count, TYPES[0], k)] * many).run(COMPILED)
            found.append({id(each) for every in launches.kernels.values() for each in every})
    assert found[0] == found[1]


def moved(launches, count):
    """Bytes an element, without what each lane reads of tables: the numbers of 8 bytes."""
    each = [width * many for of in launches.accesses.values() for width, many in of.items()]
    return (sum(each) - 8 * sum(of[8] for of in launches.accesses.values())) / count


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
    chosen = selection("gaussian", count, ("float32", "float32", held), round(0.01 * chunk))
    with executed() as launches:
        chosen.check(COMPILED, chunk)
    record_property("bytes an element", moved(launches, count))
    assert moved(launches, count) <= most
    assert launches.accesses["chunks_in_registers"][16] == count // 4 * (3 if held else 2)


@STORM
def test_bytes_by_tensor(record_property):
    count = 40_000
    with executed() as launches:
        selection("gaussian", count, TYPES[0], count // 100).check(COMPILED)
    record_property("bytes an element", moved(launches, count))
    assert moved(launches, count) <= 16.6  # of which the sample is 0.8
    assert launches.accesses["_add"][16] >= count // 4096 * 4096 // 4 * 3


def test_offsets_have_64_bits():
    """The last two chunks of 2**31 + 70 elements."""
    chunk, k, tail = 1024, 40, 3
    skipped = (1 << 31) // chunk - 1
    x, held = (make("gaussian", "float32", chunk + 70, seed) for seed in (0, 1))
    constants = {"SIZE": chunk, "WIDE": chunk, "LANES": 32, "HOLDS": True, "ALIGNED": True}
    constants |= {"TYPE": "float32", "NUMBER": 0}
    constants |= {"VALUE": "float32", "FORMAT": (23, 0x7F800000, 0x7FC00000)}
    types = {"rows": "*i64", "row_of": "*i32", "places": "*i32", "values": "*i32"}
    types |= {"messages": "*u8", "found": "*i32", "bits": "*i32"}
    options = {**COMPILED.OPTIONS, "num_warps": 1}
    made = compiled(COMPILED.chunks_in_registers, types, constants, options)
    memory = Memory()
    at = [memory.allocate(name, x.nbytes) for name in ("x", "held", "left")]
    for place, array in zip(at, (x, held), strict=False):
        memory.put(place, array)
    start = skipped * chunk
    row = np.zeros((1, segments.COLUMNS + 1), np.int64)
    columns = [segments.ADDRESS, segments.HELD, segments.LEFT]
    row[0, columns] = [each - 4 * start for each in at]
    row[0, [segments.COUNT, segments.K, segments.ENTRY]] = start + len(x), k, -skipped * k
    numbers = [
        memory.read_only("rows", row),
        memory.read_only("row_of", np.zeros(2, np.int32)) - 4 * skipped,
        *(memory.allocate(name, 4 * (k + tail)) for name in ("places", "values")),
        *(memory.allocate("messages", 4), memory.allocate("found", 20)),
        memory.allocate("bits", 8 * chunk // 32) - skipped * chunk // 8,
    ]
    memory.put(numbers[5], np.zeros(5, np.int32))
    kernel = parse(made.asm["ptx"])
    blocks = range(skipped, skipped + 2)
    Launch(kernel, blocks, memory, [*numbers, 0, 0], made.metadata.shared).run()
    want = run_top_k(x, held, k, "", chunk, k + tail)
    got = memory.get(numbers[2], np.empty(k + tail, np.uint32))
    assert np.array_equal(got, want[0] + np.uint32(start))
    left = memory.get(at[2], np.empty_like(x))
    assert np.array_equal(left.view(np.uint32), want[2].view(np.uint32))


@pytest.mark.parametrize("architecture", [*(pytest.param(n, marks=STORM) for n in (80, 100)), 90])
@pytest.mark.parametrize("chunk", [4096, *(pytest.param(n, marks=STORM) for n in (1024, 8192, 0))])
def test_registers(tmp_path, record_property, chunk, architecture):
    """No thread keeps numbers in memory for want of registers; of GPUs before Hopper's one."""
    chosen = selection("zeros", 40_000, TYPES[chunk == 8192], 82)
    with executed(architecture, execute=False) as launches:
        chosen.run(COMPILED, chunk)
    for name, made in launches.kernels.items():
        registers, spilled = needs(made[-1], tmp_path)
        record_property(f"registers {name}", registers)
        assert spilled <= (4 if architecture == 80 else 0)
