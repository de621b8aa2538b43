"""Collectives that kernels carry out over peer memory: ranks are processes, each with a GPU of its
own, which map each other's mailboxes. On the stand-in, which runs the same kernels."""

from __future__ import annotations

import pytest

from pycollective import ConfigurationError, _core, reference
from pycollective.schedule import algorithms_for
from tests.cuda.arrays import (
    all_reduced,
    check_all_reduce,
    check_every_other_operation,
    every_other_operation,
    on_its_gpu,
)
from tests.cuda.captures import Capture
from tests.harness import PerRank
from tests.inputs import DTYPES, PAIRS, crossed, order_sensitive, same_bits

RANKS = [1, 2, 3, 8]


def all_reduce(comm, x, op, how="in place", algorithm="auto", offset=0):
    return all_reduced(comm, x, lambda a: on_its_gpu(comm, a, offset), op, how, algorithm)


def all_reduce_each(comm, inputs, op):
    return [all_reduce(comm, x, op, offset=place % 3) for place, x in enumerate(inputs)]


def usual_or_storm():
    """Usually each pair, whose kernel it is, on some number of ranks of which order can show, and
    averages on 3, by which nothing can be divided exactly; sums on any: the way of a call does not
    depend on its operation. The rest in `make storm`."""
    cases = crossed(RANKS, PAIRS)
    several = {pair: [n for n, *of in cases if n > 2 and pair == tuple(of)] for pair in PAIRS}
    some = {pair: several[pair][i % len(several[pair])] for i, pair in enumerate(PAIRS)}
    for ranks, dtype, op in cases:
        usual = op == "sum" or ranks == (3 if op == "avg" else some[dtype, op])
        yield pytest.param(ranks, dtype, op, marks=() if usual else pytest.mark.storm)


@pytest.mark.parametrize(("ranks", "dtype", "op"), list(usual_or_storm()))
def test_all_reduce(peers, ranks, dtype, op):
    check_all_reduce(peers(ranks), ranks, dtype, op, all_reduce_each)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("how", ["in place", "out", "async"])
@pytest.mark.parametrize("algorithm", ["auto", *algorithms_for("all_reduce")])
def test_any_algorithm_and_any_way_to_call(peers, ranks, algorithm, how):
    inputs = order_sensitive("bfloat16", ranks, 70_001, seed=len(algorithm + how))
    want = reference.reduce(inputs, "sum")
    for got in peers(ranks).call(all_reduce, PerRank(inputs), "sum", how, algorithm):
        assert same_bits(got, want)


def kernel_calls(comm):
    return comm.kernel_calls


@pytest.mark.parametrize(("ranks", "dtype"), crossed([1, 2, 4], DTYPES))
def test_every_other_operation(peers, ranks, dtype):
    inputs = order_sensitive(dtype, ranks, 1000 + ranks, seed=ranks)
    pool = peers(ranks)
    before = pool.call(kernel_calls)
    results = pool.call(every_other_operation, PerRank(inputs), ranks)
    check_every_other_operation(inputs, results)
    made = {after - begin for begin, after in zip(before, pool.call(kernel_calls), strict=True)}
    assert made == {len(results[0]) - ("recv" in results[0])}


def by_parts(comm, x):
    """Of several communicators, also at once."""
    half = comm.split(comm.rank % 2, -comm.rank)
    assert half.device_path[0] == "peer"
    assert half.device == comm.device
    mine, whole = on_its_gpu(comm, x), on_its_gpu(comm, x)
    works = [half.all_reduce(mine, async_op=True), comm.all_reduce(whole, async_op=True)]
    for work in works:
        work.wait(timeout=30)
    got = mine.to_numpy(), whole.to_numpy()
    half.close()
    return got


def test_several_communicators(peers):
    inputs = order_sensitive("float32", 4, 20_000, seed=2)
    for _ in range(3):
        for rank, (part, whole) in enumerate(peers(4).call(by_parts, PerRank(inputs))):
            members = [r for r in range(4) if r % 2 == rank % 2][::-1]
            assert same_bits(part, reference.reduce([inputs[r] for r in members], "sum"))
            assert same_bits(whole, reference.reduce(inputs, "sum"))


def replayed(comm, inputs):
    """A graph of two calls, on what is in their arrays each time."""
    stream = _core.DeviceStream(comm.device)
    small = on_its_gpu(comm, inputs[0][:100], stream=stream)
    large = on_its_gpu(comm, inputs[0], stream=stream)
    refused = pytest.raises(ConfigurationError, match="make the call once before capturing")
    with Capture(comm.device, stream), refused:  # which does not spoil it
        comm.all_reduce(large, op="max", algorithm="tree", stream=stream)
    for array in (small, large):
        comm.all_reduce(array)
    with Capture(comm.device, stream) as capture:
        for array in (small, large):
            comm.all_reduce(array, stream=stream)
    got = []
    for turn, x in enumerate(inputs):
        small.write(x[:100])
        large.write(x)
        capture.replay()
        if turn % 2 == 0:  # beside other calls
            other = on_its_gpu(comm, x, stream=stream)
            comm.all_reduce(other)
            got.append(other.to_numpy())
        else:
            got.append(large.to_numpy())
        got.append(small.to_numpy())
        got.append(large.to_numpy())
    return got


def test_a_captured_graph_replays(peers):
    turns = [order_sensitive("bfloat16", 3, 50_000, seed=s) for s in range(5)]
    want = [reference.reduce(inputs, "sum") for inputs in turns]
    mine = [[inputs[r] for inputs in turns] for r in range(3)]
    for got in peers(3).call(replayed, PerRank(mine)):
        for turn, expected in enumerate(want):
            whole, small, large = got[3 * turn : 3 * turn + 3]
            assert same_bits(whole, expected)
            assert same_bits(large, expected)
            assert same_bits(small, reference.reduce([x[:100] for x in turns[turn]], "sum"))
