"""Collectives on arrays in GPUs' memory by way of the host: the oracle's bits, from any stream.

On the stand-in, where the host cannot touch a device's memory, and ranks are processes.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import (
    CollectiveError,
    CollectiveTimeout,
    _core,
    reference,
)
from pycollective.schedule import algorithms_for
from tests.cuda import standin
from tests.cuda.arrays import (
    DEVICES,
    all_reduced,
    check_all_reduce,
    check_every_other_operation,
    every_other_operation,
    on_gpu,
)
from tests.cuda.captures import Capture
from tests.harness import PerRank, Ranks, results
from tests.inputs import DTYPES, PAIRS, crossed, crossed_in_turns, order_sensitive, same_bits

RANKS = [1, 2, 3, 8]


def all_reduce(comm, x, op, how="in place", algorithm="auto", stream="own", offset=0):
    return all_reduced(comm, x, lambda a: on_gpu(comm, a, stream, offset), op, how, algorithm)


def all_reduce_each(comm, inputs, op):
    return [all_reduce(comm, x, op, offset=place % 3) for place, x in enumerate(inputs)]


@pytest.mark.parametrize(("ranks", "dtype", "op"), crossed_in_turns(RANKS, PAIRS))
def test_all_reduce(gpu_pool, ranks, dtype, op):
    check_all_reduce(gpu_pool(ranks), ranks, dtype, op, all_reduce_each)


@pytest.mark.parametrize("stream", ["own", "legacy"])
@pytest.mark.parametrize("how", ["in place", "out", "async"])
@pytest.mark.parametrize("algorithm", ["auto", *algorithms_for("all_reduce")])
def test_any_algorithm_and_any_way_to_call(gpu_pool, algorithm, how, stream):
    inputs = order_sensitive("bfloat16", 3, 70_001, seed=len(algorithm + how))
    want = reference.reduce(inputs, "sum")
    pool = gpu_pool(3)
    for got in pool.call(all_reduce, PerRank(inputs), "sum", how, algorithm, stream):
        assert same_bits(got, want)


@pytest.mark.parametrize(("ranks", "dtype"), crossed([1, 2, 4], DTYPES))
def test_every_other_operation_also_with_ranks_on_the_host(gpu_pool, ranks, dtype):
    inputs = order_sensitive(dtype, ranks, 1000 + ranks, seed=ranks)
    results = gpu_pool(ranks).call(every_other_operation, PerRank(inputs), DEVICES, [1])
    check_every_other_operation(inputs, results)


def follow(comm, how):
    """Twice: a result of what was queued on the stream before the call; whether that still ran."""
    driver = standin.Driver()
    array = on_gpu(comm, np.zeros(1 << 18, np.uint8))
    results, running = [], []
    for times in (300, 200):
        driver.occupy(array, times)
        running.append(not array.stream.query())
        named = array.stream.handle if how == "handle" else None
        work = comm.all_reduce(array, "max", async_op=how == "async", stream=named)
        if how == "async":
            work.wait(timeout=30)
        assert array.stream.query()
        results.append(array.to_numpy()[-4:].view(np.uint32).tolist())
    return results, all(running)


@pytest.mark.parametrize("how", ["sync", "async", "handle"])
def test_a_call_comes_after_what_is_on_its_stream(gpu_pool, how):
    for _ in range(5):  # a busy machine may not get to the call before all of that has ended
        outcomes = gpu_pool(2).call(follow, how)
        # Of 300 and 200 the bytes are 44, 1 and 200, 0.
        assert [got for got, _ in outcomes] == [[[300], [200]]] * 2
        if all(running for _, running in outcomes):
            return
    pytest.fail("it had ended on a stream before the call came, each time")


def capturing_elsewhere(comm, x):
    """A capture of another stream, in the mode that forbids most, and calls beside it."""
    array, other = on_gpu(comm, x), _core.DeviceStream(comm.rank % DEVICES)
    with Capture(array.device, other):
        comm.all_reduce(array)
        comm.all_reduce(array, async_op=True).wait(timeout=30)
    return array.to_numpy()


def test_calls_go_on_beside_a_capture(gpu_pool):
    inputs = [np.ones(5000, np.int64) * (r + 1) for r in range(2)]
    for got in gpu_pool(2).call(capturing_elsewhere, PerRank(inputs)):
        assert (got == 6).all()


def too_late(comm, seconds):
    """Rank 1's GPU does not come to the call for longer than it may take."""
    array = on_gpu(comm, np.zeros(1 << 22, np.uint8))
    release = lambda: None  # noqa: E731
    if comm.rank == 1:
        release = standin.Driver().hold(array.device, array.stream.handle)
    comm.timeout = seconds
    try:
        comm.all_reduce(array, "max")
    except CollectiveError as error:
        return type(error), str(error)
    finally:
        release()


def test_who_waits_for_its_own_gpu_says_so():
    with Ranks(2, module=__name__, variables=standin.environment()) as ranks:
        [(kind, text), (own_kind, own)] = results(ranks.call(too_late, PerRank([30, 0.2])))
    assert own_kind is kind is CollectiveTimeout
    assert "own GPU has not come to it" in own
    assert "reported by rank 1" in text
