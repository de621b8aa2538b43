"""Densities that chunks can have, and how many elements go; a host's threshold of many shares."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from pycollective import ConfigurationError
from pycollective.compression import TopKState
from pycollective.compression.top_k import check_density
from tests.compression.players import ends_of, gradients
from tests.compression.test_payload import Counting

SHAPE = {"w": (125, 1000)}


@pytest.mark.parametrize(("density", "chunk"), [(1e-4, 4096), (1e-4, 9984), (0.0156, 64)])
def test_a_density_below_one_element_of_a_chunk_is_refused_by_name(density, chunk):
    with pytest.raises(ConfigurationError, match=re.escape(f"density={density}")) as error:
        check_density(density, "chunk", chunk)
    (least,) = map(int, re.findall(r"take chunk=(\d+)", str(error.value)))
    check_density(density, "chunk", least)
    with pytest.raises(ConfigurationError):
        check_density(density, "chunk", least - 64)
    check_density(density, "tensor", chunk)


def test_exactly_one_element_of_a_chunk_will_do():
    for chunk in range(64, 10_001, 64):
        check_density(1 / chunk, "chunk", chunk)


def sent(comm, density, chunk):
    """How many elements a host sends of chunks of ones; what is said of half such a chunk."""
    ends = ends_of(comm, (0, 1, 1, 1))
    state = TopKState(SHAPE, ends, density=density, by="chunk", chunk=chunk)
    x = np.ones(SHAPE["w"], np.float32) if comm.rank == 0 else np.zeros(SHAPE["w"], np.float32)
    state.all_reduce({"w": x})
    try:
        TopKState(SHAPE, ends, density=density, by="chunk", chunk=chunk // 2 // 64 * 64)
    except ConfigurationError as error:
        return np.count_nonzero(x), "by chunk is less than one" in str(error)
    return np.count_nonzero(x), False


@pytest.mark.parametrize(("density", "chunk", "each"), [(1e-4, 10048, 1), (2.6e-4, 4096, 1)])
def test_the_least_density_sends_one_element_of_each_chunk(pool, density, chunk, each):
    chunks = -(-125_000 // chunk)
    assert pool(4).call(sent, density, chunk) == [(chunks * each, True)] * 4


def bytes_within_a_host(comm, several):
    """What a rank hands over to the other one of its host in a step of top-k by tensor."""
    shapes = {f"w{number}": (64, 64) for number in range(several)}
    ends = ends_of(comm, (0, 0, 1, 1))
    local = Counting(ends.local)
    state = TopKState(shapes, replace(ends, local=local), density=0.01)
    assert state.all_reduce(gradients(1, comm.rank, 0, shapes))
    return sum(local.sent)


def test_a_histogram_goes_to_one_rank_of_the_host(pool):
    several = 8
    sums, histograms = 4 * several * 64 * 64 // 2, 4 * (2048 + 1024 + 1024) * several // 2
    for sent in pool(4).call(bytes_within_a_host, several):
        assert sums + histograms < sent < 1.2 * (sums + histograms)
