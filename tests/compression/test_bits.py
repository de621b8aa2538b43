"""Whole steps against NumPy, bit for bit: outputs on every rank, and all that is held."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest

from pycollective import reference
from pycollective.compression import CODECS, TopKState
from tests.compression import expected
from tests.compression.players import (
    SHAPES,
    TOPOLOGIES,
    TYPES,
    digest,
    ends_of,
    gradients,
    make,
    size_of,
)
from tests.inputs import dtype_of, order_sensitive, same_bits
from tests.kernels.quantized import CODECS as QUANTIZED

STEPS = 3
VALUES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def crowded(seed, rank, step, dtype):
    """Few magnitudes: nearly all of those that are picked, or not, are ties."""
    random = np.random.default_rng([seed, rank, step])
    few = np.array([-2, -1, -1, 0, 1, 1], dtype_of(dtype))
    return {name: random.choice(few, shape) for name, shape in SHAPES.items()}


def inputs(seed, rank, step, dtype, ties):
    return (crowded if ties else gradients)(seed, rank, step, dtype=dtype)


def steps_of(comm, host_of, of, options, dtype, seed, ties):
    """Rank 0's outputs and everyone's residuals; the digests of this rank's outputs."""
    state = of(SHAPES, ends_of(comm, host_of), chunk=expected.CHUNK, **options)
    outputs = []
    for step in range(STEPS):
        mine = inputs(seed, comm.rank, step, dtype, ties)
        assert state.all_reduce(mine)
        outputs.append(mine)
    held = state._feedback.keeper.gather()
    found = [digest(each) for each in outputs]
    return found, (outputs, held) if comm.rank == 0 else digest(held["worker"])


def run(pool, host_of, of, options, dtype, seed, ties=False):
    """(outputs by step, residuals); the same bytes on all ranks."""
    outcomes = pool(4).call(steps_of, host_of, of, options, dtype, seed, ties)
    outputs, held = outcomes[0][1]
    assert all(found == outcomes[0][0] for found, _ in outcomes)
    assert {found for _, found in outcomes[1:]} == {digest(held["worker"])}
    return outputs, held


def flat_inputs(name, step, dtype, seed, ties=False):
    return [inputs(seed, rank, step, dtype, ties)[name].reshape(-1) for rank in range(4)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("host_of", TOPOLOGIES)
@pytest.mark.parametrize("codec", QUANTIZED)
def test_quantized(pool, codec, host_of, dtype):
    seed = seed_of(codec, host_of, dtype)
    outputs, held = run(pool, host_of, CODECS[codec], {}, dtype, seed)
    check_dense(outputs, host_of, dtype, seed)
    for name in ("w", "v"):
        want = expected.Quantized(codec, size_of(SHAPES)[name], max(host_of) + 1)
        for step, got in enumerate(outputs):
            average = want.step(flat_inputs(name, step, dtype, seed), host_of)
            assert same_bits(got[name].reshape(-1), average), (name, step)
        assert same_bits(held["worker"][name], want.worker)
        assert same_bits(held["server"][name], want.server)


@pytest.mark.parametrize("by", ["tensor", "chunk"])
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
def test_top_k(pool, host_of, dtype, values, by):
    check_top_k(pool, host_of, dtype, values, by)


@pytest.mark.parametrize("by", ["tensor", "chunk"])
@pytest.mark.parametrize("host_of", [*TOPOLOGIES, (0, 1, 0, 1)])
def test_top_k_of_ties(pool, host_of, by):
    check_top_k(pool, host_of, "float32", "float32", by, ties=True)


def check_top_k(pool, host_of, dtype, values, by, ties=False):
    seed = seed_of("top_k", host_of, dtype)
    decay = 0.5 if by == "chunk" else 1.0
    options = {"density": 0.04, "values": values, "by": by, "decay": decay}
    outputs, held = run(pool, host_of, TopKState, options, dtype, seed, ties)
    check_dense(outputs, host_of, dtype, seed, ties)
    for name in ("w", "v"):
        count = size_of(SHAPES)[name]
        hosts, k = max(host_of) + 1, round(0.04 * (count if by == "tensor" else expected.CHUNK))
        want = expected.TopK(count, hosts, k, VALUES[values], by, decay)
        for step, got in enumerate(outputs):
            flat = flat_inputs(name, step, dtype, seed, ties)
            average = want.step(flat, host_of)
            assert same_bits(got[name].reshape(-1), average), (name, step)
        assert same_bits(held["worker"][name], want.worker)


def check_dense(outputs, host_of, dtype, seed, ties=False):
    """What is small goes as it is, rounded once."""
    for step, got in enumerate(outputs):
        want = expected.dense(flat_inputs("bias", step, dtype, seed, ties), host_of)
        assert same_bits(got["bias"], want)
        assert got["none"].shape == (0, 4)


def seed_of(*what):
    """A seed of its own for each case."""
    return zlib.crc32(repr(what).encode())


# Density 1.

LARGE = {"w": (83, 61), "v": (9, 1000)}


def dense_and_all(comm, host_of, dtype, seed, options):
    """Whether the average of all elements is the dense all-reduce's, step after step."""
    ends = ends_of(comm, host_of)
    ranks = len(host_of)
    if ends is None:
        return True, ""
    state = TopKState(LARGE, ends, density=1, values="float32", compress=lambda *_: True, **options)
    same = True
    for step in range(3):
        inputs = {
            name: order_sensitive(dtype, ranks, int(np.prod(shape)), seed + step)
            for name, shape in LARGE.items()
        }
        mine = {name: each[comm.rank].copy() for name, each in inputs.items()}
        assert state.all_reduce(mine)
        for name, each in inputs.items():
            same &= same_bits(mine[name], reference.reduce(each, "avg"))
    assert not any(held.any() for _, held in state._feedback.codec.residuals["worker"])
    return same, digest(mine)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by", ["tensor", "chunk"])
def test_density_1_is_the_dense_average_bit_for_bit(pool, by, dtype):
    """One rank a host, and hosts that are nodes of the contract's order."""
    options = {"by": by, "chunk": 512}
    for seed, host_of in enumerate([(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 1), (0, 1, 2)]):
        outcomes = pool(4).call(dense_and_all, host_of, dtype, seed, options)
        assert [same for same, _ in outcomes] == [True] * 4, host_of
        assert len({found for _, found in outcomes if found}) == 1


# Inputs made to defeat 1 bit, each of whole chunks and a part of one.

COUNT = 21 * expected.CHUNK + 77


def one_huge(random, rank):
    x = random.standard_normal(COUNT) * 1e-3
    x[:: 2 * expected.CHUNK] = 1e4
    return x


def alternating(random, rank):
    """Within a chunk, and between hosts: the means all but cancel."""
    places = np.arange(COUNT)
    return (0.5 + 0.1 * rank + places % 5) * (-1.0) ** (places + rank)


def zeros(random, rank):
    x = random.standard_normal(COUNT)
    x[3 * expected.CHUNK : 5 * expected.CHUNK] = 0
    return x


def subnormals(random, rank):
    return random.integers(-(1 << 23) + 1, 1 << 23, COUNT) * 2.0**-149


def heavy_tail(random, rank):
    return random.choice([-1.0, 1.0], COUNT) * np.exp(3 * random.standard_normal(COUNT))


def the_same_again(comm, host_of, kind):
    """The averages of the same gradients step after step, and all that is held after them."""
    state = make(comm, host_of, "one_bit", {"w": (1, COUNT)})
    outputs = []
    for _ in range(12):
        mine = kind(np.random.default_rng([7, comm.rank]), comm.rank).astype(np.float32)
        assert state.all_reduce({"w": mine})
        outputs.append(mine)
    return outputs, state._feedback.keeper.gather()


@pytest.mark.parametrize(
    "kind", [one_huge, alternating, zeros, subnormals, heavy_tail], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("host_of", [(0, 0, 1, 1), (0, 1, 2, 3)])
def test_what_would_defeat_one_bit(pool, host_of, kind):
    want = expected.Quantized("one_bit", COUNT, max(host_of) + 1)
    every = [kind(np.random.default_rng([7, rank]), rank).astype(np.float32) for rank in range(4)]
    averages = [want.step(every, host_of) for _ in range(12)]
    for outputs, held in pool(4).call(the_same_again, host_of, kind):
        assert all(same_bits(got, each) for got, each in zip(outputs, averages, strict=True))
        assert same_bits(held["worker"]["w"], want.worker)
        assert same_bits(held["server"]["w"], want.server)
