"""Packed places by Triton kernels are the CPU's bytes, and are read as the CPU reads them: in
Triton's interpreter, and as PTX that is executed."""

from __future__ import annotations

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


def written(kernels, places, size, values):
    room = len(places) + SPARE
    entries = kernels.Entries.empty(room, getattr(torch, values.dtype.name), "cpu")
    entries.places.fill_(5)
    entries.places[: len(places)] = tensor(places.view(np.int32))
    entries.values[: len(places)] = tensor(values)
    entries.count.fill_(len(places))
    length = torch.zeros(1, dtype=torch.int64)
    tail = torch.full((kernels.tail_bound(room, size, entries.values.dtype) + 5,), 7).to(
        torch.uint8
    )
    kernels.write(entries, size, tail, length)
    assert (tail[int(length) :] == 7).all()
    return tail[: int(length)].numpy()


def read(kernels, tail, size, dtype, room):
    """(whether it is refused, places, values), from memory with more bytes behind.

    Of a tail that is refused nothing is written.
    """
    given = torch.from_numpy(np.concatenate([tail, np.full(9, 255, np.uint8)]))
    entries = kernels.Entries.empty(room + 2, torch.float32, "cpu")
    entries.places.fill_(-1)
    entries.values.fill_(7)
    entries = kernels.Entries(entries.places[:room], entries.values[:room], entries.count)
    bad = torch.zeros(1, dtype=torch.int32)
    length = torch.tensor([len(tail)])
    kernels.read(given, length, size, getattr(torch, dtype), entries, bad)
    written = 0 if bad else room
    for each, before in zip(entries[:2], (-1, 7), strict=True):
        whole = torch.tensor([], dtype=each.dtype).set_(each.untyped_storage())
        assert (whole[written:] == before).all()
    count = int(entries.count)
    assert count == 0 or not bad
    return bool(bad), entries.places[:count].numpy().view(np.uint32), entries.values[:count]


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "dtype"), in_turns(PLACES))
def test_bytes_are_the_cpus(kernels, kind, dtype):
    places, size, values, tail = example(kind, dtype)
    assert np.array_equal(written(kernels, places, size, values), tail)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("kind", "dtype"), in_turns(PLACES))
def test_what_is_read(kernels, kind, dtype):
    places, size, values, tail = example(kind, dtype)
    refused, found, wide = read(kernels, tail, size, dtype, len(places) + SPARE)
    assert not refused
    assert np.array_equal(found, places)
    assert np.array_equal(bits(wide), values.astype(np.float32).view(np.uint8))


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
def test_dense(kernels, to):
    """What is there divided and rounded once, NaNs the contract's, the rest 0."""
    places, size, values, _ = example("1 %", "float32")
    values[:5] = 0.0, -0.0, np.nan, np.inf, 1e38
    values[5:7] = 1e-40, 3e-8
    tail = tail_of(places, size, values)
    for divisor in (1.0, float(np.float32(7 / 3))):
        out = torch.full((size,), 7.0).to(getattr(torch, to))
        want = np.empty(size, dtype_of(to))
        _core.sparse_scatter(places, values, want, divisor)
        bad = torch.zeros(1, dtype=torch.int32)
        given = torch.from_numpy(tail), torch.tensor([len(tail)]), len(places) + SPARE
        kernels.decode(*given, torch.float32, out, divisor, bad)
        assert int(bad) == 0
        assert np.array_equal(bits(out), want.view(np.uint8))


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
    yield np.concatenate([tail, tail[:1]])


def expected(tail, size, room, width=2):
    """What the CPU's `Message.read` finds, or None."""
    if len(tail) < 8:
        return None
    count, length = map(int, tail[:8].view(np.uint32))
    if len(tail) != 8 + length + width * count or count > min(size, room):
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
    seen = set()
    for tail in damaged(kind):
        want = expected(tail, size, room)
        refused, found, _ = read(kernels, tail, size, "bfloat16", room)
        assert refused == (want is None), tail
        assert refused or np.array_equal(found, want)
        seen.add(refused)
    assert True in seen


@MOSTLY_INTERPRETED
def test_spare_bits_are_refused(kernels):
    """Of 130 places whose gaps are 11, with two low bits each: those of the last block are four."""
    places = np.arange(11, 12 * 130, 12, dtype=np.uint32)
    tail = tail_of(places, 2000, np.zeros(130, np.float32))
    last = len(tail) - 4 * 130 - 1  # the last byte of the stream
    assert tail[last] < 16
    tail[last] |= 16
    assert expected(tail, 2000, 130, 4) is None
    assert read(kernels, tail, 2000, "float32", 130)[0]


@MOSTLY_INTERPRETED
def test_a_place_that_is_the_size_is_refused(kernels):
    places = np.array([3, 50], np.uint32)
    tail = tail_of(places, 51, np.zeros(2, np.float32))
    assert not read(kernels, tail, 51, "float32", 2)[0]
    assert read(kernels, tail, 50, "float32", 2)[0]


def to_write(**others):
    entries = COMPILED.Entries.empty(20, torch.float32, "cpu")
    room = COMPILED.tail_bound(20, 1000, torch.float32)
    given = {"entries": entries, "size": 1000, "tail": torch.zeros(room, dtype=torch.uint8)}
    return {**given, "length": torch.zeros(1, dtype=torch.int64), **others}


@pytest.mark.parametrize(
    "others",
    [
        *({"tail": to_write()["tail"][1:]}, {"size": MOST + 2}, {"size": -1}),
        *({"length": torch.zeros(1)}, {"tail": torch.zeros(1000)}),
    ],
)
def test_what_is_not_written(others):
    with pytest.raises(ConfigurationError):
        COMPILED.write(**to_write(**others))


@pytest.mark.parametrize(
    "others",
    [
        *({"capacity": 1 << 31}, {"capacity": -1}, {"values": torch.float64}),
        *({"out": torch.zeros(20)[::2]}, {"out": torch.zeros(9, dtype=torch.float64)}),
        *({"bad": torch.zeros(1)}, {"length": torch.zeros(0, dtype=torch.int64)}),
        {"tail": torch.zeros(9, dtype=torch.int8)},
    ],
)
def test_what_is_not_decoded(others):
    given = {"tail": torch.zeros(9, dtype=torch.uint8), "length": torch.tensor([9])}
    given |= {"capacity": 5, "values": torch.float32, "out": torch.zeros(9), "divisor": 1.0}
    given |= {"bad": torch.zeros(1, dtype=torch.int32), **others}
    with pytest.raises(ConfigurationError):
        COMPILED.decode(**given)


def test_another_length_compiles_nothing():
    with executed(execute=False) as launches:
        found = []
        for size, count in ((6001, 100), (65_536, 2048 - SPARE)):
            places = np.arange(count, dtype=np.uint32)
            written(COMPILED, places, size, np.ones(count, np.float32))
            tail, bad = torch.zeros(100, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
            given = tail[count % 2 :], torch.tensor([9]), count, torch.float32
            COMPILED.decode(*given, torch.empty(size), 2.0, bad)
            found.append({id(each) for every in launches.kernels.values() for each in every})
    assert found[0] == found[1]


def test_bytes_that_are_moved(record_property):
    """Of a hundredth of a tensor: beside what selects, and what a decoder moves, by the element."""
    size = 200_000
    places = np.sort(np.random.default_rng(1).choice(size, size // 100, replace=False))
    places = places.astype(np.uint32)
    values = np.ones(len(places), np.float32)
    with executed() as launches:
        tail = written(COMPILED, places, size, values)
    packing = sum(launches.moved.values()) / size
    assert np.array_equal(tail, tail_of(places, size, values))
    out, bad = torch.empty(size), torch.zeros(1, dtype=torch.int32)
    with executed() as launches:
        given = torch.from_numpy(tail.copy()), torch.tensor([len(tail)]), len(places)
        COMPILED.decode(*given, torch.float32, out, 2.0, bad)
    # `out` is filled with zeros by torch.
    decoding = out.element_size() + sum(launches.moved.values()) / size
    record_property("bytes an element, packing", packing)
    record_property("bytes an element, decoding", decoding)
    assert packing <= 1
    assert decoding <= 4.3
    assert np.array_equal(np.flatnonzero(out.numpy()), places)


@pytest.mark.storm
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_registers(tmp_path, architecture):
    places, size, values, tail = example("1 %", "float32")
    with executed(architecture, execute=False) as launches:
        written(COMPILED, places, size, values)
        read(COMPILED, tail, size, "float32", 100)
    for made in launches.kernels.values():
        assert needs(made[-1], tmp_path)[1] == 0
