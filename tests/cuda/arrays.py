"""Calls on arrays of ranks on the stand-in's GPUs, and what they must give."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from pycollective import _core, reference
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.harness import PerRank, Ranks, results
from tests.inputs import awkward, same_bits

DEVICES = 2  # the stand-in's


def on_gpu(comm, x, stream="own", offset=0):
    """A copy of `x` on the rank's GPU: on a stream of its own, or on the legacy one."""
    device = comm.rank % DEVICES
    on = _core.DeviceStream(device) if stream == "own" else None
    return DeviceArray.from_numpy(x, device, on, offset=offset)


def for_device(comm):
    """Have kernels carry out calls on arrays of the rank's GPU."""
    comm.use_device("cuda")
    return comm.device, comm.device_path[0]


def starting(module):
    """`started(n)` for a module of tests: ranks of it whose calls kernels carry out."""

    @contextmanager
    def started(size, **more):
        variables = standin.environment(devices=8, **more)
        with Ranks(size, module=module, variables=variables) as ranks:
            assert results(ranks.call(for_device)) == [(rank, "peer") for rank in range(size)]
            yield ranks

    return started


def on_its_gpu(comm, x, offset=0, stream=None):
    """A copy of `x` on the communicator's GPU, on a stream of its own unless one is given."""
    stream = stream or _core.DeviceStream(comm.device)
    return DeviceArray.from_numpy(x, comm.device, stream, offset=offset)


def all_reduced(comm, x, put, op, how="in place", algorithm="auto"):
    """What an all-reduce of `put(x)` gives; `how`: in place, out (of place) or async."""
    array = put(x)
    before = array.to_numpy()
    if how == "out":
        out = put(np.zeros_like(x))
        comm.all_reduce(array, op=op, out=out, algorithm=algorithm, stream=array.stream)
        assert same_bits(array.to_numpy(), before)
        return out.to_numpy()
    if how == "async":
        comm.all_reduce(array, op=op, async_op=True, algorithm=algorithm).wait(timeout=30)
    else:
        comm.all_reduce(array, op=op, algorithm=algorithm)
    return array.to_numpy()


def check_all_reduce(pool, ranks, dtype, op, all_reduce_each):
    """The oracle's bits, of none to many elements; `all_reduce_each(comm, inputs, op)`."""
    inputs = [awkward(dtype, ranks, count, seed=count) for count in (0, 1, 5, 1021, 30_011)]
    mine = [[of_count[r] for of_count in inputs] for r in range(ranks)]
    for got in pool.call(all_reduce_each, PerRank(mine), op):
        for result, leaves in zip(got, inputs, strict=True):
            assert same_bits(result, reference.reduce(leaves, op)), result.size


def every_other_operation(comm, x, devices, on_host=()):
    """Of each its result; arrays of the ranks `on_host` are in the host's memory."""
    device = comm.rank % devices
    stream = _core.DeviceStream(device)

    def put(array):
        return (
            array.copy() if comm.rank in on_host else DeviceArray.from_numpy(array, device, stream)
        )

    def get(array):
        return array.to_numpy() if isinstance(array, DeviceArray) else array

    n, rank = comm.size, comm.rank
    counts = [3 + 2 * r for r in range(n)]
    begin, mine = sum(counts[:rank]), counts[rank]
    shard, whole = x[begin : begin + mine], x[: sum(counts)]
    got = {}

    out = put(np.zeros_like(shard))
    comm.reduce_scatter(out, put(whole), op="max", counts=counts)
    got["reduce_scatter"] = get(out)
    every = put(whole)
    own = every[begin : begin + mine]
    comm.reduce_scatter(own, every, op="max", counts=counts)
    got["reduce_scatter in place"] = get(own)
    out = put(np.zeros_like(whole))
    comm.all_gather(out, put(shard), counts=counts)
    got["all_gather"] = get(out)
    array = put(x)
    comm.broadcast(array, root=n - 1)
    got["broadcast"] = get(array)
    array = put(x)
    comm.reduce(array, root=0, op="min")
    got["reduce"] = get(array)
    out = put(np.zeros_like(whole)) if rank == n - 1 else None
    comm.gather(out, put(shard), root=n - 1, counts=counts)
    got["gather"] = None if out is None else get(out)
    out = put(np.zeros_like(shard))
    comm.scatter(out, put(whole) if rank == 0 else None, root=0, counts=counts)
    got["scatter"] = get(out)
    even = x[: n * 7]
    out = put(np.zeros_like(even))
    comm.all_to_all(out, put(even))
    got["all_to_all"] = get(out)
    if n > 1:
        array = put(np.zeros_like(x))
        sending = comm.send(put(x), (rank + 1) % n, async_op=True)
        comm.recv(array, (rank - 1) % n)
        sending.wait(timeout=30)
        got["recv"] = get(array)
    return got


def check_every_other_operation(inputs, results):
    """Each rank's results against the oracle's."""
    ranks = len(inputs)
    counts = [3 + 2 * r for r in range(ranks)]
    begins = [sum(counts[:r]) for r in range(ranks)]
    total = sum(counts)
    parts = [slice(b, b + c) for b, c in zip(begins, counts, strict=True)]
    shards = [x[part] for x, part in zip(inputs, parts, strict=True)]
    most = reference.reduce([x[:total] for x in inputs], "max")
    for rank, got in enumerate(results):
        want = {
            "reduce_scatter": most[parts[rank]],
            "reduce_scatter in place": most[parts[rank]],
            "all_gather": np.concatenate(shards),
            "broadcast": inputs[-1],
            "reduce": reference.reduce(inputs, "min") if rank == 0 else inputs[rank],
            "gather": np.concatenate(shards) if rank == ranks - 1 else None,
            "scatter": inputs[0][parts[rank]],
            "all_to_all": np.concatenate([x[7 * rank : 7 * rank + 7] for x in inputs]),
        }
        if ranks > 1:
            want["recv"] = inputs[(rank - 1) % ranks]
        assert want.keys() == got.keys()
        for name, expected in want.items():
            assert expected is got[name] is None or same_bits(got[name], expected), name
