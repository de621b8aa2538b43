"""Whole steps against NumPy, bit for bit: outputs on every rank, and all that is held."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest

from pycollective.compression import CODECS, TopKState
from tests.compression import oracle
from tests.compression.players import (
    SHAPES,
    TOPOLOGIES,
    TYPES,
    digest,
    ends_of,
    gradients,
    size_of,
)
from tests.inputs import same_bits
from tests.kernels.quantized import CODECS as QUANTIZED

STEPS = 3
VALUES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def steps_of(comm, host_of, of, options, dtype, seed):
    """Rank 0's outputs and everyone's residuals; the digests of this rank's outputs."""
    state = of(SHAPES, ends_of(comm, host_of), chunk=oracle.CHUNK, **options)
    outputs = []
    for step in range(STEPS):
        mine = gradients(seed, comm.rank, step, dtype=dtype)
        assert state.all_reduce(mine)
        outputs.append(mine)
    held = state._feedback.keeper.gather()
    found = [digest(each) for each in outputs]
    return found, (outputs, held) if comm.rank == 0 else digest(held["worker"])


def run(pool, host_of, of, options, dtype, seed):
    """(outputs by step, residuals); the same bytes on all ranks."""
    outcomes = pool(4).call(steps_of, host_of, of, options, dtype, seed)
    outputs, held = outcomes[0][1]
    assert all(found == outcomes[0][0] for found, _ in outcomes)
    assert {found for _, found in outcomes[1:]} == {digest(held["worker"])}
    return outputs, held


def flat_inputs(name, step, dtype, seed):
    return [gradients(seed, rank, step, dtype=dtype)[name].reshape(-1) for rank in range(4)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("host_of", TOPOLOGIES)
@pytest.mark.parametrize("codec", QUANTIZED)
def test_quantized(pool, codec, host_of, dtype):
    seed = seed_of(codec, host_of, dtype)
    outputs, held = run(pool, host_of, CODECS[codec], {}, dtype, seed)
    check_dense(outputs, host_of, dtype, seed)
    for name in ("w", "v"):
        want = oracle.Quantized(codec, size_of(SHAPES)[name], max(host_of) + 1)
        for step, got in enumerate(outputs):
            average = want.step(flat_inputs(name, step, dtype, seed), host_of)
            assert same_bits(got[name].reshape(-1), average), (name, step)
        assert same_bits(held["worker"][name], want.worker)
        assert same_bits(held["server"][name], want.server)


@pytest.mark.parametrize("exchange", ["gather", "region"])
@pytest.mark.parametrize(
    ("host_of", "dtype", "values"),
    [
        ((0, 1, 2, 3), "float32", "float32"),
        ((0, 1, 2, 3), "bfloat16", "bfloat16"),
        ((0, 0, 1, 1), "float32", "bfloat16"),
        ((0, 0, 1, 1), "float16", "float16"),
        ((0, 1, 0, 0), "bfloat16", "float32"),
        ((0, 1, 1, 2), "float32", "bfloat16"),
    ],
)
def test_top_k(pool, host_of, dtype, values, exchange):
    seed = seed_of("top_k", host_of, dtype)
    options = {"density": 0.04, "values": values, "exchange": exchange}
    outputs, held = run(pool, host_of, TopKState, options, dtype, seed)
    check_dense(outputs, host_of, dtype, seed)
    for name in ("w", "v"):
        count = size_of(SHAPES)[name]
        hosts = max(host_of) + 1
        want = oracle.TopK(name, count, hosts, round(0.04 * count), VALUES[values])
        for step, got in enumerate(outputs):
            inputs = flat_inputs(name, step, dtype, seed)
            average = want.step(inputs, host_of, exchange == "region")
            assert same_bits(got[name].reshape(-1), average), (name, step)
        assert same_bits(held["worker"][name], want.worker)


def check_dense(outputs, host_of, dtype, seed):
    """What is small goes as it is, rounded once."""
    for step, got in enumerate(outputs):
        want = oracle.dense(flat_inputs("bias", step, dtype, seed), host_of)
        assert same_bits(got["bias"], want)
        assert got["none"].shape == (0, 4)


def seed_of(*what):
    """A seed of its own for each case."""
    return zlib.crc32(repr(what).encode())
