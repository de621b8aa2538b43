"""Sums of sparse entries by Triton kernels are the CPU's, and so is what residuals get of them: in
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
from tests.triton.test_top_k import NUMPY, bits, tensor

STORM = pytest.mark.storm
COMPILED = module("sparse_sums", interpreted=False)
kernels = ways("sparse_sums")


def parts_of(ranks, size, density):
    """Of each rank places and values, whose order of additions shows; some are zeros."""
    found = []
    for rank in range(ranks):
        random = np.random.default_rng([rank, ranks, size])
        places = np.flatnonzero(random.random(size) < density).astype(np.uint32)
        values = random.standard_normal(places.size) * 10.0 ** random.integers(-8, 8, places.size)
        values = values.astype(np.float32)
        values[random.random(places.size) < 0.3] = -0.0
        found.append((places, values))
    return found


def entries_of(kernels, places, values, capacity):
    entries = kernels.Entries.empty(capacity, torch.float32, "cpu")
    entries.places.zero_()
    entries.values.zero_()
    entries.places[: len(places)] = tensor(places.view(np.int32))
    entries.values[: len(places)] = tensor(values)
    entries.count.fill_(len(places))
    return entries


def marked(kernels, parts, size):
    capacity = max(len(places) for places, _ in parts) + 3
    return kernels.mark([entries_of(kernels, *part, capacity) for part in parts], size)


def sum_of(parts):
    """The CPU's."""
    places = np.empty(sum(len(each) for each, _ in parts), np.uint32)
    values = np.empty(len(places), np.float32)
    every = [each for each, _ in parts], [each for _, each in parts]
    found = _core.sparse_sum(*every, places, values)
    return places[:found], values[:found]


SUMS = [
    *((1, 100, 0.1), (2, 5000, 0.05), (3, 3000, 0.3), (5, 1500, 0.9), (8, 2048, 0.1)),
    *((2, 31, 1.0), (2, 1, 1.0), (3, 70, 0.0), pytest.param(17, 1100, 0.2, marks=STORM)),
]


def check_sums(kernels, ranks, size, density):
    parts = parts_of(ranks, size, density)
    if len(parts[0][0]) > 2:
        parts[0][1][:2] = np.nan, np.inf
    rows = marked(kernels, parts, size)
    places, values = sum_of(parts)
    room = min(rows.values.numel(), size)
    out = kernels.Entries.empty(room + 2, torch.float32, "cpu")
    out.places.fill_(7)
    kernels.total(rows, out)
    assert int(out.count) == len(places)
    assert np.array_equal(out.places[: len(places)].numpy().view(np.uint32), places)
    assert np.array_equal(bits(out.values[: len(places)]), values.view(np.uint8))
    assert (out.places[len(places) :] == 7).all()
    for dtype, divisor in (("float32", float(ranks)), ("bfloat16", 3.0)):
        dense = torch.full((size + 2,), 7.0).to(getattr(torch, dtype))
        kernels.average(rows, dense[:size], divisor)
        want = np.empty(size, dtype_of(dtype))
        _core.sparse_scatter(places, values, want, divisor)
        assert np.array_equal(bits(dense[:size]), want.view(np.uint8))
        assert (dense[size:] == 7).all()


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(("ranks", "size", "density"), SUMS)
def test_sums(kernels, ranks, size, density):
    check_sums(kernels, ranks, size, density)


@MOSTLY_INTERPRETED
def test_sums_of_a_few_ranks(kernels):
    check_sums(kernels, 3, 2100, 0.2)


@MOSTLY_INTERPRETED
def test_places_beyond_the_size_get_no_bit(kernels):
    places = np.array([3, 70, 99, 100, 127], np.uint32)
    entries = entries_of(kernels, places, np.ones(5, np.float32), 5)
    rows = kernels.mark([entries], 100)
    assert rows.bits.tolist() == [[8, 0, 64, 8]]


def selected_again(kernels, places, values, edges, wanted, dtype):
    """What is kept, what rounding has dropped, and whether a sum is not finite."""
    sums = entries_of(kernels, places, values, len(places) + 5)
    kept = kernels.Entries.empty(len(places) + 5, getattr(torch, dtype), "cpu")
    kept.places.fill_(7)
    lost, bad = torch.full((len(places) + 5,), 7.0), torch.zeros(1, dtype=torch.int32)
    kernels.select_sums(sums, torch.tensor(edges), torch.tensor(wanted), kept, lost, bad)
    return kept, lost, int(bad)


def check_selected_again(kernels, places, values, edges, wanted, dtype):
    """Of each segment those that the CPU's kernels select, and behind them nothing."""
    kept, lost, bad = selected_again(kernels, places, values, edges, wanted, dtype)
    want = [], [], []
    for first, last, k in zip(edges[:-1], edges[1:], wanted, strict=True):
        scratch, best = np.empty(last - first, np.float32), np.empty(k, np.uint32)
        taken = np.empty(k, NUMPY.get(dtype, dtype))
        assert not k or _core.top_k(values[first:last].copy(), None, scratch, k, best) == k
        if k:
            _core.sparse_take(scratch, best, taken)
        for found, part in zip(
            want, (places[first:last][best[:k]], taken, scratch[best[:k]]), strict=True
        ):
            found.append(part)
    n = sum(wanted)
    assert (int(kept.count), bad) == (n, 0)
    assert np.array_equal(kept.places[:n].numpy().view(np.uint32), np.concatenate(want[0]))
    assert np.array_equal(bits(kept.values[:n]), np.concatenate(want[1]).view(np.uint8))
    assert np.array_equal(bits(lost[:n]), np.concatenate(want[2]).view(np.uint8))
    assert (kept.places[n:] == 7).all()
    assert (lost[n:] == 7).all()


@MOSTLY_INTERPRETED
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=STORM) for d in ("float16", "float32"))]
)
def test_sums_are_selected_again(kernels, dtype):
    places, values = sum_of(parts_of(3, 9000, 0.3))
    values[np.isinf(values)] = 1
    values[2500:4000] = np.round(values[2500:4000] / 8)  # many equal magnitudes, zeros among them
    values[40] = 1e6  # more than fp16 has
    # More than a program looks at at once; one; none; of the last some belong to none.
    edges, wanted = [0, 2300, 2301, 2301, 4000], [700, 1, 0, 900]
    check_selected_again(kernels, places, values, edges, wanted, dtype)


@MOSTLY_INTERPRETED
def test_a_sum_that_is_not_finite_is_told(kernels):
    places, values = sum_of(parts_of(2, 300, 0.3))
    values[20] = -np.inf
    assert selected_again(kernels, places, values, [0, 9, 60], [3, 5], "bfloat16")[2] == 1
    assert selected_again(kernels, places, values, [0, 9, 60], [3, 0], "bfloat16")[2] == 0


@MOSTLY_INTERPRETED
def test_of_no_segments_nothing_is_selected(kernels):
    places, values = sum_of(parts_of(2, 300, 0.3))
    empty = np.empty(0, np.int64)
    kept, _, bad = selected_again(kernels, places, values, [0], empty, "float32")
    assert (int(kept.count), bad) == (0, 0)


@MOSTLY_INTERPRETED
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_dropped_returns(kernels, kept):
    """Of one parameter's places, those that the owner has not kept."""
    mine, got = parts_of(2, 3000, 0.1)
    first, last = 700, 2500
    own = np.random.default_rng(9).standard_normal(last - first).astype(np.float32)
    left = torch.from_numpy(own.copy())
    but = marked(kernels, [got], 3000) if kept else None
    entries = entries_of(kernels, *mine, len(mine[0]) + 4)
    kernels.add_at(left, entries, torch.tensor([first, last]), but)
    places, values = mine
    there = (places >= first) & (places < last)
    if kept:
        there &= ~np.isin(places, got[0])
    own[places[there].astype(np.int64) - first] += values[there]
    assert np.array_equal(bits(left), own.view(np.uint8))


def test_arguments_that_are_refused():
    few, many = (COMPILED.Entries.empty(n, torch.float32, "cpu") for n in (5, 6))
    limits, bad = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    bits, before = torch.zeros(2, 2, 1, dtype=torch.int32)
    rows = COMPILED.Rows(bits, before, torch.zeros(2, 5), 32)
    for refused in (
        lambda: COMPILED.mark([few, many], 100),
        lambda: COMPILED.mark([few] * 65, 100),
        lambda: COMPILED.mark([few], (1 << 32) + 1),
        lambda: COMPILED.total(rows, few),
        lambda: COMPILED.average(rows, torch.zeros(31), 1.0),
        lambda: COMPILED.add_at(torch.zeros(9), few, limits, rows),
        lambda: COMPILED.add_at(torch.zeros(9), few, limits[:1]),
        lambda: COMPILED.select_sums(many, limits, limits[:2], few, torch.zeros(6), bad),
        lambda: COMPILED.select_sums(few, limits[:1], limits[:1], many, torch.zeros(6), bad),
        lambda: COMPILED.select_sums(few, limits, limits[:2], many, torch.zeros(4), bad),
    ):
        with pytest.raises(ConfigurationError):
            refused()


@pytest.mark.storm
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_registers(tmp_path, architecture, ranks):
    parts = parts_of(ranks, 3000, 0.1)
    with executed(architecture, execute=False) as launches:
        rows = marked(COMPILED, parts, 3000)
        out = COMPILED.Entries.empty(3000, torch.float32, "cpu")
        COMPILED.total(rows, out)
        COMPILED.average(rows, torch.empty(3000), 3.0)
        one = marked(COMPILED, parts[:1], 3000)
        numbers = torch.zeros(2, dtype=torch.int64)
        COMPILED.add_at(torch.empty(3000), out, numbers, one)
        kept = COMPILED.Entries.empty(3000, torch.bfloat16, "cpu")
        bad = torch.zeros(1, dtype=torch.int32)
        COMPILED.select_sums(out, numbers, numbers[:1], kept, torch.empty(3000), bad)
    for made in launches.kernels.values():
        assert needs(made[-1], tmp_path)[1] == 0
