"""Averages of sparse entries by Triton kernels are the CPU's: in Triton's interpreter, and as PTX
that is executed."""

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


def test_arguments_that_are_refused():
    few, many = (COMPILED.Entries.empty(n, torch.float32, "cpu") for n in (5, 6))
    bits, before = torch.zeros(2, 2, 1, dtype=torch.int32)
    rows = COMPILED.Rows(bits, before, torch.zeros(2, 5), 32)
    for refused in (
        lambda: COMPILED.mark([few, many], 100),
        lambda: COMPILED.mark([few] * 65, 100),
        lambda: COMPILED.mark([few], (1 << 32) + 1),
        lambda: COMPILED.average(rows, torch.zeros(31), 1.0),
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
        COMPILED.average(rows, torch.empty(3000), 3.0)
    for made in launches.kernels.values():
        assert needs(made[-1], tmp_path)[1] == 0
