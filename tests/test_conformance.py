"""One table: every operation x dtype x reduce op x count x number of ranks, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pycollective import ConfigurationError, reference
from tests.harness import PerRank, results, run_ranks
from tests.inputs import (
    DTYPES,
    FLOATS,
    PAIRS,
    awkward,
    crossed,
    crossed_in_turns,
    order_sensitive,
    same_bits,
)
from tests.pools import forked_beyond
from tests.turns import in_turns

RANKS = [1, 2, 3, 4, 7]
COUNTS = [0, 1, 2, 5, 17, 1000, 16384, 100003]
AVERAGED = [*FLOATS, "int16", "int64"]


@pytest.fixture(scope="module")
def pool(pool):
    with forked_beyond(3, pool, __name__) as pools:
        yield pools


def all_reduce(comm, x, op, how):
    if how == "out":
        out = np.empty_like(x)
        comm.all_reduce(x, op=op, out=out)
        return out
    if how == "async":
        comm.all_reduce(x, op=op, async_op=True).wait(timeout=30)
    elif how == "strided":
        wide = np.zeros((2, x.size, 3), x.dtype)
        wide[1, :, 2] = x
        comm.all_reduce(wide[1, :, 2], op=op)
        assert not wide[0].view(np.uint8).any()
        return wide[1, :, 2].copy()
    else:
        comm.all_reduce(x, op=op)
    return x


def all_reduce_each(comm, several, op):
    return [all_reduce(comm, x, op, "in place") for x in several]


@pytest.mark.parametrize(("ranks", "dtype", "op"), crossed_in_turns(RANKS, PAIRS))
def test_all_reduce(pool, ranks, dtype, op):
    several = [awkward(dtype, ranks, count, seed=count) for count in COUNTS]
    by_rank = [*zip(*several, strict=True)]
    wants = [reference.reduce(inputs, op) for inputs in several]
    for rank, got in enumerate(pool(ranks).call(all_reduce_each, PerRank(by_rank), op)):
        for x, want in zip(got, wants, strict=True):
            assert same_bits(x, want), (rank, x.size)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.sampled_from(RANKS),
    pair=st.sampled_from(PAIRS),
    count=st.integers(0, 300_000) | st.integers(0, 70),
    how=st.sampled_from(["in place", "out", "async", "strided"]),
    seed=st.integers(0, 1000),
)
def test_all_reduce_anyhow(pool, ranks, pair, count, how, seed):
    dtype, op = pair
    inputs = order_sensitive(dtype, ranks, count, seed)
    want = reference.reduce(inputs, op)
    for got in pool(ranks).call(all_reduce, PerRank(inputs), op, how):
        assert same_bits(got, want)


def reduce_scatter(comm, x, op, counts):
    out = np.empty(counts[comm.rank], x.dtype)
    comm.reduce_scatter(out, x, op=op, counts=counts)
    whole = np.empty_like(x)
    comm.all_gather(whole, out, counts=counts)
    return out, whole


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
@pytest.mark.parametrize("scale", [0, 1, 300, 40_000])
def test_reduce_scatter_then_all_gather_is_all_reduce(pool, ranks, dtype, scale):
    counts = [scale * (1 + r % 3) + (r == 1) for r in range(ranks)]
    inputs = awkward(dtype, ranks, sum(counts))
    want = reference.reduce(inputs, "sum")
    edges = np.cumsum([0, *counts])
    for r, (shard, whole) in enumerate(
        pool(ranks).call(reduce_scatter, PerRank(inputs), "sum", counts)
    ):
        assert same_bits(shard, want[edges[r] : edges[r + 1]])
        assert same_bits(whole, want)


def reduce_then_broadcast(comm, x, root):
    before = x.copy()
    comm.reduce(x, root=root, op="avg")
    if comm.rank != root:
        assert same_bits(x, before)
    comm.broadcast(x, root=root)
    return x


@pytest.mark.parametrize(
    ("ranks", "dtype", "count"),
    in_turns(RANKS, AVERAGED, [1, 1000, 200_000], among=crossed(RANKS, AVERAGED)),
)
def test_reduce_then_broadcast_is_all_reduce(pool, ranks, dtype, count):
    inputs = order_sensitive(dtype, ranks, count)
    want = reference.reduce(inputs, "avg")
    for got in pool(ranks).call(reduce_then_broadcast, PerRank(inputs), ranks - 1):
        assert same_bits(got, want)


def move(comm, x):
    """Everything that only moves bytes; equal shards."""
    n, r = comm.size, comm.rank
    gathered = np.empty(n * x.size, x.dtype)
    comm.all_gather(gathered, x)
    to_all = np.empty_like(gathered)
    comm.all_to_all(to_all, np.roll(gathered, r))
    on_root = np.empty_like(gathered) if r == n - 1 else None
    comm.gather(on_root, x, root=n - 1)
    back = np.empty_like(x)
    comm.scatter(back, on_root, root=n - 1)
    passed = np.empty_like(x)
    if n > 1:
        sending = comm.send(x, (r + 1) % n, async_op=True)
        comm.recv(passed, (r - 1) % n)
        sending.wait(timeout=30)
    comm.barrier()
    return gathered, to_all, on_root, back, passed


@pytest.mark.parametrize(("ranks", "dtype"), crossed_in_turns(RANKS, DTYPES))
def test_moving_keeps_every_byte(pool, ranks, dtype):
    for count in [0, 1, 33, 5000, 60_001]:
        inputs = awkward(dtype, ranks, count)
        whole = np.concatenate(inputs)
        rolled = [np.roll(whole, r) for r in range(ranks)]
        exchanged = reference.all_to_all(rolled)
        for r, got in enumerate(pool(ranks).call(move, PerRank(inputs))):
            gathered, to_all, on_root, back, passed = got
            assert same_bits(gathered, whole)
            assert same_bits(to_all, exchanged[r])
            assert on_root is None or same_bits(on_root, whole)
            assert same_bits(back, inputs[r])
            assert ranks == 1 or same_bits(passed, inputs[r - 1])


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_what_has_no_meaning_is_refused(op):
    for outcome in run_ranks(all_reduce, 2, np.zeros(3, bool), op, "in place"):
        assert isinstance(outcome.error, ConfigurationError)
        assert f"{op} has no meaning for bool" in str(outcome.error)


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(level):
    from pycollective import _core

    if level not in _core.simd_levels():
        pytest.skip(f"this CPU has no {level}")
    inputs = awkward("bfloat16", 3, 70_001)
    want = reference.reduce(inputs)
    variables = {"PYCOLLECTIVE_SIMD": level}
    for used, got in results(run_ranks(with_level, 3, PerRank(inputs), variables=variables)):
        assert used == level
        assert same_bits(got, want)


def with_level(comm, x):
    from pycollective import _core

    comm.all_reduce(x)
    return _core.simd_level(), x
