"""Kernels of compression over tables of several segments: what rows have to do with each other."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _core, reference, segments
from tests.inputs import awkward, dtype_of, same_bits
from tests.kernels.quantized import CODECS, decode, encode, payload_bytes, rounded, sum_of
from tests.kernels.segments import found_for, table_of
from tests.kernels.test_sparse import first, first_of_chunks, make, taken

TYPES = list(segments.DTYPES)
CHUNK = 64
# Elements of each row: of several types, none at all, a few, more than a chunk.
COUNTS = [130, 0, 1, 64, 63, 1000, 5]
BAD, NONZERO = segments.BAD, segments.NONZERO


def gradients(seed=0, counts=COUNTS):
    """An array a row, of all types in turn."""
    kinds = [TYPES[n % 3] for n in range(len(counts))]
    pairs = zip(kinds, counts, strict=True)
    return [make("gaussian", dtype, count, seed + n) for n, (dtype, count) in enumerate(pairs)]


def bad_and_nonzero(found, items):
    return found[BAD], found[NONZERO : NONZERO + items].tolist()


# --- Quantization.


class Bucket:
    """Rows of which every second one is compressed, and where they lie in a message."""

    def __init__(self, codec, seed=0):
        self.codec, self.x = codec, gradients(seed)
        self.held = [make("gaussian", "float32", x.size, 9) if x.size > 1 else None for x in self.x]
        self.left = [np.full(x.size, 7, np.float32) for x in self.x]
        self.compressed = [n % 2 == 0 for n in range(len(self.x))]
        sizes = [
            payload_bytes(codec, CHUNK, x.size) if compressed else 4 * x.size
            for x, compressed in zip(self.x, self.compressed, strict=True)
        ]
        ends = 41 + np.cumsum([size + 3 for size in sizes])
        self.places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.room = int(ends[-1]) + 5

    def table(self, x=None):
        columns = (self.x if x is None else x, self.held, self.left, self.places, self.compressed)
        return table_of(
            [
                {"x": a, "held": b, "left": c, "at": place.start, "k": int(k)}
                for a, b, c, place, k in zip(*columns, strict=True)
            ]
        )

    def expected(self, n):
        """Its bytes, and what is left."""
        if not self.compressed[n]:
            return self.x[n].astype(np.float32).view(np.uint8), self.left[n]
        return encode(self.codec, CHUNK, sum_of(self.x[n], self.held[n]))


@pytest.mark.parametrize("codec", CODECS)
def test_each_row_is_quantized_to_its_own_place(codec):
    """Nothing between them, before or behind changes."""
    for level in _core.simd_levels():
        bucket = Bucket(codec)
        messages, found = np.full(bucket.room, 0xA5, np.uint8), found_for(len(COUNTS))
        _core.quantize(codec, CHUNK, bucket.table(), messages, found, simd=level)
        for n, place in enumerate(bucket.places):
            payload, left = bucket.expected(n)
            assert same_bits(messages[place], payload)
            assert same_bits(bucket.left[n], left)
            messages[place] = 0xA5
        assert (messages == 0xA5).all()
        assert bad_and_nonzero(found, len(COUNTS)) == (0, [int(count > 0) for count in COUNTS])


def test_a_parameter_in_several_rows_is_the_payload_of_the_whole():
    x, left = make("gaussian", "float16", 1000), np.zeros(1000, np.float32)
    cuts = [(0, 128), (128, 960), (960, 1000)]
    rows = [{"x": x[a:b], "left": left[a:b], "k": 1, "item": 0} for a, b in cuts]
    at = 0
    for row in rows:
        row["at"] = at
        at += payload_bytes("one_bit", CHUNK, row["x"].size)
    messages, found = np.zeros(at, np.uint8), found_for(1)
    _core.quantize("one_bit", CHUNK, table_of(rows), messages, found)
    payload, rest = encode("one_bit", CHUNK, x.astype(np.float32))
    assert same_bits(messages, payload)
    assert same_bits(left, rest)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_noted_and_all_else_is_done(bad):
    """In any row that is compressed; those that are not go as they are, and whoever adds sees."""
    bucket = Bucket("int8")
    bucket.x[1], bucket.places[1] = np.full(1, bad, np.float32), slice(0, 4)
    for number, flag in ((1, 0), (0, 1), (6, 1)):
        bucket.x[number][-1] = bad
        messages, found = np.zeros(bucket.room, np.uint8), found_for(len(COUNTS))
        _core.quantize("int8", CHUNK, bucket.table(), messages, found)
        assert bad_and_nonzero(found, len(COUNTS)) == (flag, [1] * len(COUNTS))
        assert same_bits(messages[bucket.places[4]], bucket.expected(4)[0])
        assert same_bits(messages[:4].view(np.float32), bucket.x[1])
        bucket.x[number][-1] = 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [-0.0, 1.0, np.nan, np.inf, "least"])
def test_what_is_zero_is_told_by_the_gradient_alone(dtype, value):
    """Any element counts, and neither sign nor residual does."""
    for count in (1, 2, 3, 4, 5, 255, 256, 257, 5003):
        for at in {0, count // 2, count - 1}:
            x, held = np.zeros(count, dtype_of(dtype)), np.ones(count, np.float32)
            if value == "least":
                x.view(f"u{x.itemsize}")[at] = 1
            else:
                x[at] = value
            left, messages = np.zeros(count, np.float32), np.zeros(2 * count + 99, np.uint8)
            table = table_of([{"x": x, "held": held, "left": left, "k": 1}])
            entries = np.zeros(count, np.uint32), np.zeros(count, np.float32)
            for kernel, arguments in (
                (_core.quantize, ("int8", CHUNK, table, messages)),
                (_core.top_k, (table, 0, *entries, messages)),
                (_core.sparse_add, (table, messages)),
            ):
                found = found_for(1)
                kernel(*arguments, found)
                assert found[NONZERO] == (value != 0)


def test_a_parameter_is_nonzero_if_one_of_its_rows_is():
    for where in range(3):
        x = np.zeros((3, 64), np.float32)
        x[where, 5] = 1
        rows = [{"x": each, "item": 2, "at": 256 * n} for n, each in enumerate(x)]
        found = found_for(3)
        _core.quantize("one_bit", CHUNK, table_of(rows), np.zeros(768, np.uint8), found)
        assert bad_and_nonzero(found, 3) == (0, [0, 0, 1])


@pytest.mark.parametrize("codec", CODECS)
def test_items_that_are_all_zero_are_left_out(codec):
    """Their bytes and residuals stay; nothing is noted, of the others only what is not finite."""
    bucket = Bucket(codec)
    items, skipped = len(COUNTS), (3, 4)
    zero_at = segments.zero_at(items)
    messages, found = np.full(bucket.room, 0xA5, np.uint8), found_for(items)
    found[[zero_at + n for n in skipped]] = 1
    bucket.x[4][0] = np.nan
    _core.quantize(codec, CHUNK, bucket.table(), messages, found, zero_at)
    for n, place in enumerate(bucket.places):
        if n in skipped:
            assert (messages[place] == 0xA5).all()
            assert (bucket.left[n] == 7).all()
        else:
            assert same_bits(messages[place], bucket.expected(n)[0])
    assert bad_and_nonzero(found, items) == (0, [0] * items)
    bucket.x[0][0] = np.nan
    _core.quantize(codec, CHUNK, bucket.table(), messages, found, zero_at)
    assert bad_and_nonzero(found, items) == (1, [0] * items)


def mean_of(leaves, divisor, dtype):
    with np.errstate(all="ignore"):
        return rounded(reference.tree(leaves, np.add) / np.float32(divisor), dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_averaged_from_their_own_places(codec, ranks):
    """Payloads and fp32, to any type; NaNs of fp32 become the type's one."""
    for level in _core.simd_levels():
        rank_buckets = [Bucket(codec, seed) for seed in range(ranks)]
        bucket = rank_buckets[0]
        messages = np.zeros((ranks, bucket.room), np.uint8)
        for message, each in zip(messages, rank_buckets, strict=True):
            _core.quantize(codec, CHUNK, each.table(), message, found_for(len(COUNTS)))
        odd = np.stack(awkward("float32", ranks, COUNTS[5], 0))
        messages[:, bucket.places[5]] = odd.view(np.uint8)
        types = [TYPES[(n + 1) % 3] for n in range(len(COUNTS))]
        pairs = zip(types, COUNTS, strict=True)
        rooms = [np.full(count + 8, 3, dtype_of(dtype)) for dtype, count in pairs]
        outs = [room[4:-4] for room in rooms]
        found = found_for(len(COUNTS))
        _core.dequantize(codec, CHUNK, bucket.table(outs), messages, 3, found, simd=level)
        for n, place in enumerate(bucket.places):
            leaves = [
                decode(codec, CHUNK, row[place], COUNTS[n])
                if bucket.compressed[n]
                else row[place].copy().view(np.float32)
                for row in messages
            ]
            assert same_bits(outs[n], mean_of(leaves, 3, types[n]))
            outs[n][:] = 3
            assert (rooms[n] == 3).all()
        assert found[BAD] == 0  # of fp32 the host that averages looks, and says


LARGE = np.full(64, 1.5e38, np.float32)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_average_that_is_not_finite_is_noted(dtype, compressed):
    """What overflows in 16 bits, at the end; in the middle, with zero_at, in any type."""
    payload = encode("int8", CHUNK, LARGE)[0] if compressed else LARGE.view(np.uint8)
    out = np.zeros(64, dtype_of(dtype))
    table = table_of([{"x": out, "at": 25, "k": int(compressed)}])
    message = np.concatenate([np.zeros(25, np.uint8), payload])
    two = np.stack([message, message])
    for zero_at in (0, segments.zero_at(1)):
        for divisor, overflows in ((2, dtype == "float16"), (0.5, True)):
            found = found_for(1)
            _core.dequantize("int8", CHUNK, table, two, divisor, found, zero_at)
            assert found[BAD] == (overflows and (zero_at != 0 or dtype != "float32"))
            assert np.isfinite(out.astype(np.float32)).all() != overflows


@pytest.mark.parametrize("dtype", TYPES)
def test_any_one_element_is_looked_at(dtype):
    """Also of rows that are dequantized in blocks."""
    count = 70_000
    for level in _core.simd_levels():
        for at in (0, 5, 65_535, 65_536, count - 1):
            scales = np.zeros(-(-count // 64), np.float32)
            scales[at // 64] = np.inf
            records = np.zeros((len(scales), 12), np.uint8)
            records[:, :4] = scales[:, None].view(np.uint8)
            payload = np.concatenate([np.zeros(25, np.uint8), records.reshape(-1)])
            out, found = np.zeros(count, dtype_of(dtype)), found_for(1)
            table, zero_at = table_of([{"x": out, "at": 25, "k": 1}]), segments.zero_at(1)
            _core.dequantize("one_bit", 64, table, payload[None], 1, found, zero_at, level)
            assert found[BAD] == 1
            expected = np.zeros(count, np.float32)
            expected[at // 64 * 64 :][:64] = np.inf
            assert same_bits(out.astype(np.float32), expected)


@pytest.mark.parametrize("where", ["everywhere", "but the last", "but the first", "nowhere"])
def test_items_that_are_zero_on_all_ranks_become_zeros(where):
    """And are told, by the bits of all headers."""
    items, zero_at = 11, segments.zero_at(11)
    messages = np.zeros((3, 24 + 2 + 4 * items), np.uint8)
    messages[:, 26:] = np.ones(items, np.float32).view(np.uint8)
    zero = {
        "everywhere": range(3),
        "but the last": range(2),
        "but the first": (1, 2),
        "nowhere": (),
    }
    for row in zero[where]:
        messages[row, 25] = 1 << 2  # item 10
        messages[row, 24] = 1 << 3 if row == 1 else 0
    out = np.full(items, 7, np.float32)
    rows = [{"x": out[n : n + 1], "at": 26 + 4 * n} for n in range(items)]
    found = found_for(items)
    _core.dequantize("int8", CHUNK, table_of(rows), messages, 1, found, zero_at)
    ten = int(where == "everywhere")
    assert out.tolist() == [3] * 10 + [3 * (1 - ten)]
    want = found_for(items)
    want[zero_at + 10] = ten
    assert found.tolist() == want.tolist()
    out[:] = 7
    _core.dequantize("int8", CHUNK, table_of(rows), messages, 1, found)
    assert out.tolist() == [3] * items


# --- Top-k.


class Sparse:
    """Rows of which the second is not compressed, and where their places and entries begin."""

    def __init__(self, k, chunk, values="float32"):
        self.x, self.k, self.chunk = gradients(3), k, chunk
        self.held = [make("gaussian", "float32", x.size, 9) if x.size > 1 else None for x in self.x]
        self.left = [np.full(x.size, 7, np.float32) for x in self.x]
        self.k = [k if n != 3 else 0 for n in range(len(self.x))]
        self.at = [1000 * n if n != 3 else 13 for n in range(len(self.x))]
        counts = [self.chosen(n).size if n != 3 else 0 for n in range(len(self.x))]
        self.entry = np.cumsum([0, *(count + 2 for count in counts)]).tolist()
        self.places = np.full(self.entry[-1], 7, np.uint32)
        self.values = np.full(self.entry[-1], 7, dtype_of(values))
        self.messages = np.full(13 + 4 * COUNTS[3] + 9, 0xA5, np.uint8)
        self.found = found_for(len(COUNTS))

    def c(self, n):
        return sum_of(self.x[n], self.held[n])

    def chosen(self, n):
        if self.chunk:
            return first_of_chunks(self.c(n), self.k[n], self.chunk)
        return first(self.c(n), self.k[n])

    @property
    def table(self):
        columns = (self.x, self.held, self.left, self.k, self.at, self.entry[:-1])
        names = ("x", "held", "left", "k", "at", "entry")
        return table_of([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])

    def check_copied(self):
        assert same_bits(
            self.messages[13:-9].view(np.uint8), self.x[3].astype(np.float32).view(np.uint8)
        )
        self.messages[13:-9] = 0xA5
        assert (self.messages == 0xA5).all()
        assert (self.left[3] == 7).all()
        assert bad_and_nonzero(self.found, len(COUNTS)) == (0, [int(n > 0) for n in COUNTS])


@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize(("k", "chunk"), [(3, 0), (100, 0), (3, 64), (64, 64)])
def test_each_row_has_its_own_places_and_entries(k, chunk, values):
    """More than a row has is all of it; what lies between their entries stays."""
    for level in _core.simd_levels():
        rows = Sparse(k, chunk, values)
        arguments = (rows.places, rows.values, rows.messages, rows.found, level)
        _core.top_k(rows.table, chunk, *arguments)
        for n in range(len(COUNTS)):
            if n == 3:
                continue
            at = rows.chosen(n)
            want, left = taken(rows.c(n), at, values)
            here = slice(rows.entry[n], rows.entry[n] + at.size)
            assert same_bits(rows.places[here], at + np.uint32(rows.at[n]))
            assert same_bits(rows.values[here], want)
            assert same_bits(rows.left[n], left)
            rows.places[here] = 7
        assert (rows.places == 7).all()
        rows.check_copied()


@pytest.mark.parametrize("chunk", [0, 64])
def test_top_k_notes_what_is_not_finite_in_any_row(chunk):
    for number in (0, 5, 6):
        rows = Sparse(3, chunk)
        rows.x[number][-1] = np.inf
        _core.top_k(rows.table, chunk, rows.places, rows.values, rows.messages, rows.found)
        assert rows.found[BAD] == 1
        rows = Sparse(3, chunk)
        rows.x[number][-1] = np.nan
        _core.sparse_add(rows.table, rows.messages, rows.found)
        assert rows.found[BAD] == 1


def test_residuals_of_all_rows_are_added():
    for level in _core.simd_levels():
        rows = Sparse(3, 0)
        _core.sparse_add(rows.table, rows.messages, rows.found, level)
        for n in range(len(COUNTS)):
            assert n == 3 or same_bits(rows.left[n], rows.c(n))
        rows.check_copied()


def test_each_row_has_its_own_threshold():
    """Entries of all rows lie one behind another, wherever the table says."""
    for level in _core.simd_levels():
        left = [make("few values", "float32", count, 1) for count in (100, 0, 1000)]
        c = [each.copy() for each in left]
        keys = np.array([0.5, 0.0, 0.75], np.float32).view(np.int32).astype(np.int64)
        ties, k = np.array([3, 9, 0]), (40, 9, 2)
        rows = [{"x": x, "left": x, "at": 1000 * n, "k": k[n]} for n, x in enumerate(left)]
        for row in rows:
            row["entry"] = 12_345
        places, values = np.zeros(42, np.uint32), np.zeros(42, np.float32)
        many = _core.sparse_select(table_of(rows), keys, ties, places, values, level)
        entry = 0
        for n, each in enumerate(c):
            magnitudes = np.abs(each).view(np.int32)
            above = int((magnitudes > keys[n]).sum())
            tied = min(int(ties[n]), int((magnitudes == keys[n]).sum()))
            at = first(each, above + tied)[: k[n]]
            want, rest = taken(each, at)
            here = slice(entry, entry + at.size)
            assert same_bits(places[here], at + np.uint32(1000 * n))
            assert same_bits(values[here], want)
            assert same_bits(left[n], rest)
            entry += at.size
        assert many == entry


def test_histograms_of_all_rows():
    left = [make("lognormal", "float32", count) for count in (1000, 0, 70)]
    table = table_of([{"x": x, "left": x, "k": 1} for x in left])
    prefixes = np.array([0x3F, 0x40, 0x40])
    bins = np.full((3, 256), 5, np.int32)
    _core.sparse_histogram(table, 16, 8, prefixes, bins)
    for row, x, prefix in zip(bins, left, prefixes, strict=True):
        keys = np.abs(x).view(np.int32) >> 16
        within = keys[keys >> 8 == prefix] & 255
        assert row.tolist() == (5 + np.bincount(within, minlength=256)).tolist()


# --- Results.


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sum_that_is_scattered_is_finite_or_noted(dtype):
    """Items that are all zero are left out, and so is what lies between rows."""
    out = np.full((3, 10), 7, dtype_of(dtype))
    table = table_of([{"x": row, "at": 20 * n, "k": 1} for n, row in enumerate(out)])
    places = np.array([0, 9, 10, 19, 20, 45, 50], np.uint32)
    values = np.array([1, 2, 1e38, np.nan, np.inf, 3e38, np.inf], np.float32)
    for zero, divisor, flag in (
        ([0, 1, 1], 1, 0),
        ([0, 1, 0], 1, int(dtype == "float16")),
        ([0, 1, 0], 0.5, 1),
        ([0, 0, 1], 1, 1),
    ):
        found = found_for(3)
        _core.sparse_scatter(table, places, values, divisor, found, np.array(zero, np.uint8))
        assert found[BAD] == flag
        want = np.zeros((3, 60), np.float32)
        with np.errstate(all="ignore"):
            want[:, places] = values / np.float32(divisor)
            want = np.stack([want[n, 20 * n : 20 * n + 10] * (1 - zero[n]) for n in range(3)])
            want[np.array(zero) == 1] = 0
            assert same_bits(out, want.astype(out.dtype))


@pytest.mark.parametrize("kernel", ["dequantize", "sparse_scatter", "fill_nan"])
def test_results_are_nan_if_something_was_bad(kernel):
    """All elements of all rows, the type's one NaN; and nothing if nothing was."""
    for bad in (0, 1):
        outs = [np.zeros(n + 2, dtype_of(TYPES[n % 3])) for n in range(7)]
        table = table_of([{"x": out[1:-1], "k": 1} for out in outs])
        found = found_for(len(outs))
        found[BAD] = bad
        if kernel == "dequantize":
            _core.dequantize("int8", CHUNK, table, np.zeros((2, 99), np.uint8), 1, found)
        elif kernel == "sparse_scatter":
            nothing, zero = np.zeros(0, np.uint32), np.ones(7, np.uint8)
            _core.sparse_scatter(table, nothing, np.zeros(0, np.float32), 1, found, zero)
        else:
            _core.fill_nan(table, found)
        for n, out in enumerate(outs):
            want = np.zeros_like(out)
            want[1:-1] = np.nan if bad else 0
            assert same_bits(out, rounded(want, TYPES[n % 3]))
        assert found.tolist() == [bad] + [0] * (len(found) - 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "largest"])
@pytest.mark.parametrize("dtype", TYPES)
def test_one_element_that_is_not_finite_is_noted(dtype, value):
    for count in (1, 2, 3, 7, 255, 257, 4099):
        for at in {0, count // 2, count - 1}:
            x = make("gaussian", dtype, count)
            largest = value == "largest"
            x[at] = np.finfo(np.float16).max if largest else value
            if largest and dtype != "float16":
                x.view(f"u{x.itemsize}")[at] = {2: 0xFF7F, 4: 0xFF7FFFFF}[x.itemsize]
            found = found_for(2)
            others = make("gaussian", "float32", 9)
            _core.check_finite(table_of([{"x": others}, {"x": x}]), found)
            assert found[BAD] == (not largest)
            assert not found[1:].any()
