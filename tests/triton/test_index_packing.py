"""Packed places by Triton kernels are the CPU's bytes, and are read as the CPU reads them: in
Triton's interpreter, and as PTX that is executed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from pycollective import _core
from pycollective.errors import ConfigurationError
from tests.inputs import dtype_of
from tests.triton.compiled import module
from tests.triton.executed import MOSTLY_INTERPRETED, executed, ways
from tests.triton.test_compiled import needs
from tests.triton.test_top_k import bits, tensor

STORM = pytest.mark.storm
COMPILED = module("index_packing", interpreted=False)
kernels = ways("index_packing")
MOST = (1 << 32) - 1
SPARE = 37  # entries that are not in use


def random(density, size=6000):
    return np.flatnonzero(np.random.default_rng(size).random(size) < density).astype(np.uint32)


def distances():
    """Blocks whose gaps have nothing to do with each other."""
    r = np.random.default_rng(3)
    parts = [np.arange(500, 900), r.integers(0, 10**9, 300), r.integers(3 * 10**9, MOST, 100)]
    return np.unique(np.concatenate([*parts, 3 * 10**9 + r.integers(0, 400, 200)]))


def far():
    return np.sort(np.random.default_rng(4).choice(MOST, 300, replace=False))


FAR = ("the last there is", "far", "distances")  # marks of their places are 1 GiB
# Places and size.
PLACES = {
    "none": ([], 1000),
    "one": ([7], 8),
    "the last there is": ([MOST - 1], MOST),
    "a run": (range(300), 300),
    "a block": (range(0, 384, 3), 384),
    "0.1 %": (random(0.001), 6000),
    "1 %": (random(0.01), 6000),
    "half": (random(0.5, 2000), 2000),
    "97 %": (random(0.97, 1000), 1000),
    "far": (far(), MOST),
    "distances": (distances(), MOST),
    "wide": (np.unique(far() >> 7), 1 << 25),
    "widths alike": (range(11, 12 * 130, 12), 2000),
}


def tail_of(places, size, values):
    """As the CPU's `Message.write` writes it."""
    stream = np.empty(_core.pack_indices_bound(places.size, size), np.uint8)
    stream = stream[: _core.pack_indices(places, size, stream)]
    head = np.array([places.size, stream.size], np.uint32).view(np.uint8)
    return np.concatenate([head, stream, values.view(np.uint8)])


def example(kind, dtype):
    places, size = PLACES[kind]
    places = np.asarray(places, np.uint32)
    values = np.random.default_rng(places.size).standard_normal(places.size)
    values = values.astype(np.float32).astype(dtype_of(dtype))
    return places, size, values, tail_of(places, size, values)


def in_turns(names):
    """The usual run has each with one type of values, in turns."""
    types = ("float32", "bfloat16", "float16")
    return [
        pytest.param(name, dtype, marks=() if (row + column) % 3 == 0 else STORM)
        for row, name in enumerate(names)
        for column, dtype in enumerate(types)
    ]


class Message(NamedTuple):
    """Places, size and values of a message, and how many entries it has room for."""

    places: np.ndarray
    size: int
    values: np.ndarray
    room: int


def message(kind, dtype="float32"):
    places, size, values, _ = example(kind, dtype)
    return Message(places, size, values, len(places) + SPARE)


def packed(kernels, messages, counted=True, bad=0, tables=None):
    """The tails that are written, each with all of its room. No byte beside them is."""
    rooms = np.array([each.room for each in messages], np.int64)
    sizes = np.array([each.size for each in messages], np.int64)
    first = 3 + np.cumsum(rooms) - rooms
    dtype = getattr(torch, messages[0].values.dtype.name)
    places = torch.full((3 + int(rooms.sum()),), 5, dtype=torch.int32)
    values = torch.ones(len(places), dtype=dtype)
    for at, each in zip(first, messages, strict=True):
        places[at : at + len(each.places)] = tensor(each.places.view(np.int32))
        values[at : at + len(each.places)] = tensor(each.values)
    bounds = np.array([kernels.tail_bound(each.room, each.size, dtype) for each in messages])
    tails = 5 + np.cumsum(bounds + 5) - (bounds + 5)
    memory = torch.full((5 + int((bounds + 5).sum()),), 7, dtype=torch.uint8)
    found = torch.tensor([bad, 0, 0, 0], dtype=torch.int32)
    parts = np.stack([first, rooms, sizes, tails], axis=1)
    counts = torch.tensor([len(each.places) for each in messages]) if counted else None
    tables = tables or kernels.Tables(torch.device("cpu"))
    kernels.pack(places, values, parts, counts, memory, found, tables)
    assert found.tolist() == [bad, 0, 0, 0]
    made = [memory[at : at + n].numpy().copy() for at, n in zip(tails, bounds, strict=True)]
    for at, n in zip(tails, bounds, strict=True):
        memory[at : at + n] = 7
    assert (memory == 7).all()
    return made


def check_packed(made, messages):
    for tail, each in zip(made, messages, strict=True):
        want = tail_of(each.places, each.size, each.values)
        assert np.array_equal(tail[: len(want)], want)
        assert not tail[len(want) :].any()


def came(kernels, tails, sizes, rooms, dtype):
    """(entries, found) of tails that lie side by side."""
    given = torch.from_numpy(np.concatenate([np.full(9, 255, np.uint8), *tails]))
    lengths = np.array([len(each) for each in tails], np.int64)
    at = 9 + np.cumsum(lengths) - lengths
    parts = np.stack([at, at, lengths, *np.broadcast_arrays(sizes, rooms, at)[:2], 0 * at], axis=1)
    found = torch.zeros(4, dtype=torch.int32)
    tables = kernels.Tables(torch.device("cpu"))
    return kernels.read(given, parts, getattr(torch, dtype), found, tables), found


def read(kernels, tails, *given):
    """(whether one is refused, of each the places and the values)."""
    entries, found = came(kernels, tails, *given)
    assert found.tolist() in ([0, 0, 0, 0], [1, 1, 0, 0])
    return bool(found[0]), [entries_of(entries, row) for row in range(len(tails))]


def entries_of(entries, row):
    """The places and values of a message that has come."""
    marks = entries.marks[row].numpy()
    has = np.unpackbits(marks.view(np.uint8).reshape(-1, 8)[:, :4], bitorder="little")
    places = np.flatnonzero(has).astype(np.uint32)
    words, first = np.unique(places >> 5, return_index=True)
    assert np.array_equal(marks[words] >> 32, entries.values.shape[1] - first)
    return places, entries.values[row, : len(places)]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "dtype"), in_turns(PLACES))
def test_bytes_are_the_cpus(kernels, kind, dtype):
    given = [message(kind, dtype)]
    check_packed(packed(kernels, given), given)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "dtype"), in_turns([each for each in PLACES if each not in FAR]))
def test_what_is_read(kernels, kind, dtype):
    places, size, values, tail = example(kind, dtype)
    refused, [(found, wide)] = read(kernels, [tail], size, len(places) + SPARE, dtype)
    assert not refused
    assert np.array_equal(found, places)
    assert np.array_equal(bits(wide), values.astype(np.float32).view(np.uint8))


MANY = ("a block", "none", "widths alike", "1 %", "one", "97 %")


@MOSTLY_INTERPRETED
def test_many_messages(kernels):
    """Of different lengths; one has no entries, and one no room for any."""
    given = [message(kind) for kind in MANY]
    given.append(given[1]._replace(room=0))
    made = packed(kernels, given)
    check_packed(made, given)
    sizes, rooms = zip(*((each.size, each.room) for each in given), strict=True)
    refused, found = read(kernels, made, sizes, rooms, "float32")
    assert not refused
    for (places, values), each in zip(found, given, strict=True):
        assert np.array_equal(places, each.places)
        assert np.array_equal(bits(values), each.values.view(np.uint8))


@MOSTLY_INTERPRETED
def test_tables_serve_again(kernels):
    """Also messages of more blocks."""
    tables = kernels.Tables(torch.device("cpu"))
    for kind in ("one", "a block", "a block"):
        check_packed(packed(kernels, [message(kind)], tables=tables), [message(kind)])


@MOSTLY_INTERPRETED
def test_all_entries_are_in_use_unless_said_otherwise(kernels):
    given = [each._replace(room=len(each.places)) for each in map(message, ("one", "1 %"))]
    check_packed(packed(kernels, given, counted=False), given)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("counted", [True, False])
def test_where_something_is_bad_no_message_has_entries(kernels, counted):
    given = [message("a block"), message("one")]
    none = [Message(each.places[:0], each.size, each.values[:0], each.room) for each in given]
    check_packed(packed(kernels, given, counted, bad=1), none)


@MOSTLY_INTERPRETED
def test_a_refused_message_is_none_and_others_are_read(kernels):
    """The room of one is a byte too short, and of one its last place is the size."""
    given = [message(kind) for kind in ("1 %", "a block", "one", "half")]
    tails = [tail_of(*each[:3]) for each in given]
    tails[1] = tails[1][:-1]
    sizes = [each.size for each in given]
    sizes[2] -= 1
    refused, found = read(kernels, tails, sizes, 2000, "float32")
    assert refused
    assert [len(places) for places, _ in found] == [
        len(given[0].places),
        0,
        0,
        len(given[3].places),
    ]
    for row in (0, 3):
        assert np.array_equal(found[row][0], given[row].places)
        assert np.array_equal(bits(found[row][1]), given[row].values.view(np.uint8))


def damaged(kind):
    """Tails that differ from a right one in a byte or in their length."""
    *_, tail = example(kind, "bfloat16")
    random = np.random.default_rng(len(tail))
    stream = int(tail[4:8].view(np.uint32)[0])
    at = np.unique(np.concatenate([np.arange(14), random.integers(0, 8 + stream, 6)]))
    for byte in at[at < 8 + stream]:
        other = tail.copy()
        other[byte] ^= random.choice([1, 128])
        yield other
    yield from (tail[:length] for length in (0, 3, 8, len(tail) - 1))


def expected(tail, size, room, width=2):
    """What the CPU's `Message.read` finds, or None. More bytes may lie behind."""
    if len(tail) < 8:
        return None
    count, length = map(int, tail[:8].view(np.uint32))
    if len(tail) < 8 + length + width * count or count > min(size, room):
        return None
    places = np.empty(count, np.uint32)
    try:
        _core.unpack_indices(tail[8 : 8 + length], size, places)
    except ConfigurationError:
        return None
    return places


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    "kind", ["a block", *(pytest.param(kind, marks=STORM) for kind in ("one", "a run", "1 %"))]
)
def test_refused_is_what_the_cpu_refuses(kernels, kind):
    """And what is not is read as it is there."""
    places, size = PLACES[kind]
    room = len(places) + SPARE
    tails = list(damaged(kind))
    wanted = [expected(tail, size, room) for tail in tails]
    refused, found = read(kernels, tails, size, room, "bfloat16")
    assert refused
    for tail, want, (places, _) in zip(tails, wanted, found, strict=True):
        assert np.array_equal(places, [] if want is None else want), tail
    assert any(want is None for want in wanted)


@MOSTLY_INTERPRETED
def test_spare_bits_are_refused(kernels):
    """Of 130 places whose gaps are 11, with two low bits each: those of the last block are four."""
    places = np.arange(11, 12 * 130, 12, dtype=np.uint32)
    tail = tail_of(places, 2000, np.zeros(130, np.float32))
    last = len(tail) - 4 * 130 - 1  # the last byte of the stream
    assert tail[last] < 16
    tail[last] |= 16
    assert expected(tail, 2000, 130, 4) is None
    refused, [(found, _)] = read(kernels, [tail], 2000, 130, "float32")
    assert refused
    assert not len(found)


@MOSTLY_INTERPRETED
def test_a_place_that_is_the_size_is_refused(kernels):
    places = np.array([3, 50], np.uint32)
    tail = tail_of(places, 51, np.zeros(2, np.float32))
    assert not read(kernels, [tail], 51, 2, "float32")[0]
    refused, [(found, _)] = read(kernels, [tail], 50, 2, "float32")
    assert refused
    assert not len(found)


def but(parts, column, number):
    """The row with another number."""
    other = parts.copy()
    other[0, column] = number
    return other


PART = np.array([[0, 20, 1000, 0]])


def to_pack(**others):
    given = {"places": torch.zeros(20, dtype=torch.int32), "values": torch.zeros(20)}
    given |= {
        "parts": PART,
        "counts": torch.tensor([20]),
        "tables": COMPILED.Tables(torch.device("cpu")),
    }
    room = COMPILED.tail_bound(20, 1000, torch.float32)
    given["messages"] = torch.zeros(room, dtype=torch.uint8)
    return {**given, "found": torch.zeros(4, dtype=torch.int32), **others}


@pytest.mark.parametrize(
    "others",
    [
        *({"messages": to_pack()["messages"][1:]}, {"messages": torch.zeros(1000)}),
        *({"parts": but(PART, *each)} for each in [(0, -1), (0, 1), (1, -1), (1, 1 << 31)]),
        *({"parts": but(PART, *each)} for each in [(2, -1), (2, 1 << 33), (3, -1), (3, 1)]),
        *({"parts": PART[:, :3]}, {"places": torch.zeros(40, dtype=torch.int32)[::2]}),
        *({"values": torch.zeros(19)}, {"values": torch.zeros(20, dtype=torch.float64)}),
        *({"counts": torch.tensor([20.0])}, {"found": torch.zeros(4)}),
    ],
)
def test_what_is_not_packed(others):
    with pytest.raises(ConfigurationError):
        COMPILED.pack(**to_pack(**others))


CAME = np.array([[0, 1, 8, 9, 5, 0]])


@pytest.mark.parametrize(
    "others",
    [
        *({"came": torch.zeros(8, dtype=torch.uint8)}, {"came": torch.zeros(9, dtype=torch.int8)}),
        *({"parts": but(CAME, *each)} for each in [(0, -1), (0, 2), (1, 2), (2, -1)]),
        *({"parts": but(CAME, *each)} for each in [(3, 1 << 33), (4, 1 << 31)]),
        *({"parts": CAME[:, :5]}, {"values": torch.float64}, {"found": torch.zeros(4)}),
    ],
)
def test_what_is_not_read(others):
    given = {"came": torch.zeros(9, dtype=torch.uint8), "parts": CAME, "values": torch.float32}
    given |= {
        "found": torch.zeros(4, dtype=torch.int32),
        "tables": COMPILED.Tables(torch.device("cpu")),
        **others,
    }
    with pytest.raises(ConfigurationError):
        COMPILED.read(**given)


def test_another_length_compiles_nothing():
    with executed(execute=False) as launches:
        seen = []
        for size, count, messages in ((6001, 100, 1), (65_536, 2048 - SPARE, 3)):
            places = np.arange(count, dtype=np.uint32)
            values = np.ones(count, np.float32)
            packed(COMPILED, messages * [Message(places, size, values, count + SPARE)])
            came(COMPILED, messages * [np.zeros(count, np.uint8)], size, count, "float32")
            seen.append({id(each) for every in launches.kernels.values() for each in every})
    assert seen[0] == seen[1]


def test_bytes_that_are_moved(record_property):
    """Of a hundredth of a tensor, by its elements."""
    size = 200_000
    places = np.sort(np.random.default_rng(1).choice(size, size // 100, replace=False))
    given = [Message(places.astype(np.uint32), size, np.ones(len(places), np.float32), len(places))]
    with executed() as launches:
        made = packed(COMPILED, given)
    packing = sum(launches.moved.values()) / size
    check_packed(made, given)
    with executed() as launches:
        _, [(found, _)] = read(COMPILED, made, size, len(places), "float32")
    reading = sum(launches.moved.values()) / size
    record_property("bytes an element, packing", packing)
    record_property("bytes an element, reading", reading)
    assert packing <= 1
    assert reading <= 0.8
    assert np.array_equal(found, places)


@pytest.mark.storm
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_registers(tmp_path, architecture):
    _, size, _, tail = example("1 %", "float32")
    with executed(architecture, execute=False) as launches:
        packed(COMPILED, [message("1 %")])
        came(COMPILED, [tail], size, 100, "float32")
    for made in launches.kernels.values():
        assert needs(made[-1], tmp_path)[1] == 0
