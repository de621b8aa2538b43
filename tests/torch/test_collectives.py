"""One table: each c10d collective x dtype x number of ranks, synchronous, asynchronous and strided,
bit for bit against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycollective import reference
from tests.harness import PerRank
from tests.inputs import DTYPES, FLOATS, INTEGERS, awkward, same_bits
from tests.torch.groups import standing_group, to_numpy, to_torch

RANKS = [2, 3, 4]
COUNT = 1200  # a multiple of each number of ranks
TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class How:
    """The way a tensor is laid out and a call is made."""

    def __init__(self, name: str) -> None:
        self.asynchronous = name == "async"
        self.strided = name == "strided"

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.strided:
            return tensor
        wide = torch.zeros(tensor.numel(), 3, dtype=tensor.dtype)
        wide[:, 1] = tensor
        return wide[:, 1]

    def empty(self, like: torch.Tensor, count: int) -> torch.Tensor:
        return self.lay(torch.zeros(count, dtype=like.dtype))

    def call(self, collective, *args, **options) -> None:
        work = collective(*args, async_op=self.asynchronous, **options)
        if isinstance(work, torch._C.Future):  # what all_reduce_coalesced hands out
            work.wait()
        elif self.asynchronous:
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()


# Each takes this rank's flat input, and returns this rank's flat output.


def all_reduce(x, how, op, size, rank):
    x = how.lay(x)
    how.call(dist.all_reduce, x, op=op)
    return x


def all_reduce_coalesced(x, how, op, size, rank):
    parts = [how.lay(part) for part in x.split([7, 0, x.numel() - 7])]
    how.call(dist.all_reduce_coalesced, parts, op=op)
    return torch.cat(parts)


def reduce_to_last(x, how, op, size, rank):
    x = how.lay(x)
    how.call(dist.reduce, x, dst=size - 1, op=op)
    return x


def reduce_scatter(x, how, op, size, rank):
    out = how.empty(x, x.numel() // size)
    how.call(dist.reduce_scatter, out, [how.lay(part) for part in x.chunk(size)], op=op)
    return out


def reduce_scatter_tensor(x, how, op, size, rank):
    out = how.empty(x, x.numel() // size)
    how.call(dist.reduce_scatter_tensor, out, how.lay(x), op=op)
    return out


def all_gather(x, how, op, size, rank):
    out = [how.empty(x, x.numel()) for _ in range(size)]
    how.call(dist.all_gather, out, how.lay(x))
    return torch.cat(out)


def all_gather_into_chunks(x, how, op, size, rank):
    out = how.empty(x, x.numel() * size)
    how.call(dist.all_gather, list(out.chunk(size)), how.lay(x))
    return out


def all_gather_into_tensor(x, how, op, size, rank):
    out = how.empty(x, x.numel() * size)
    how.call(dist.all_gather_into_tensor, out, how.lay(x))
    return out


def broadcast_from_1(x, how, op, size, rank):
    x = how.lay(x)
    how.call(dist.broadcast, x, src=1)
    return x


def gather_to_1(x, how, op, size, rank):
    out = [how.empty(x, x.numel()) for _ in range(size)] if rank == 1 else None
    how.call(dist.gather, how.lay(x), out, dst=1)
    return torch.cat(out) if rank == 1 else x


def scatter_from_1(x, how, op, size, rank):
    out = how.empty(x, x.numel() // size)
    parts = [how.lay(part) for part in x.chunk(size)] if rank == 1 else None
    how.call(dist.scatter, out, parts, src=1)
    return out


def all_to_all(x, how, op, size, rank):
    out = [how.empty(x, x.numel() // size) for _ in range(size)]
    how.call(dist.all_to_all, out, [how.lay(part) for part in x.chunk(size)])
    return torch.cat(out)


def all_to_all_single(x, how, op, size, rank):
    out = how.empty(x, x.numel())
    how.call(dist.all_to_all_single, out, how.lay(x))
    return out


def ring(x, how, op, size, rank):
    out = how.empty(x, x.numel())
    sent = dist.isend(how.lay(x), (rank + 1) % size)
    dist.irecv(out, (rank - 1) % size).wait()
    sent.wait()
    return out


def only_on(rank):
    """What only `rank` has; elsewhere the input stays."""
    return lambda whole, inputs: [whole if r == rank else x for r, x in enumerate(inputs)]


REDUCTIONS = {
    all_reduce: lambda inputs, op: reference.all_reduce(inputs, op),
    all_reduce_coalesced: lambda inputs, op: reference.all_reduce(inputs, op),
    reduce_to_last: lambda inputs, op: only_on(len(inputs) - 1)(
        reference.reduce(inputs, op), inputs
    ),
    reduce_scatter: lambda inputs, op: reference.reduce_scatter(inputs, op),
    reduce_scatter_tensor: lambda inputs, op: reference.reduce_scatter(inputs, op),
}
MOVES = {
    all_gather: reference.all_gather,
    all_gather_into_chunks: reference.all_gather,
    all_gather_into_tensor: reference.all_gather,
    broadcast_from_1: lambda inputs: [inputs[1]] * len(inputs),
    gather_to_1: lambda inputs: only_on(1)(np.concatenate(inputs), inputs),
    scatter_from_1: lambda inputs: np.split(inputs[1], len(inputs)),
    all_to_all: reference.all_to_all,
    all_to_all_single: reference.all_to_all,
    ring: lambda inputs: [inputs[r - 1] for r in range(len(inputs))],
}
HOWS = ["sync", "async", "strided"]


def run_table(comm, collective, cases):
    """Each case is (this rank's input, op, how); the outputs."""
    standing_group(comm)
    return [
        to_numpy(
            collective(to_torch(x), How(how), TORCH_OPS.get(op), dist.get_world_size(), comm.rank)
        )
        for x, op, how in cases
    ]


def check(pool, ranks, collective, cases, expect):
    """`cases` are (dtype, op, how); all go over in one call."""
    inputs = [awkward(dtype, ranks, COUNT, seed=i) for i, (dtype, _, _) in enumerate(cases)]
    sent = [
        [(x[r], op, how) for x, (_, op, how) in zip(inputs, cases, strict=True)]
        for r in range(ranks)
    ]
    outputs = pool(ranks).call(run_table, collective, PerRank(sent))
    for i, case in enumerate(cases):
        for r, want in enumerate(expect(inputs[i], case[1])):
            assert same_bits(outputs[r][i], np.ascontiguousarray(want)), (case, r)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", REDUCTIONS, ids=lambda f: f.__name__)
def test_reductions(pool, ranks, collective):
    floats = [(d, op) for d in FLOATS for op in ("sum", "avg", "prod", "min", "max")]
    integers = [(d, op) for d in INTEGERS for op in ("sum", "avg", "max", "band", "bor", "bxor")]
    booleans = [("bool", op) for op in ("min", "max", "band", "bor", "bxor")]
    cases = [(*pair, how) for pair in floats + integers + booleans for how in HOWS]
    check(pool, ranks, collective, cases, REDUCTIONS[collective])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", MOVES, ids=lambda f: f.__name__)
def test_moves(pool, ranks, collective):
    cases = [(dtype, "", how) for dtype in DTYPES for how in HOWS]
    check(pool, ranks, collective, cases, lambda inputs, _: MOVES[collective](inputs))


def large_and_odd(comm, x):
    standing_group(comm)
    tensor = to_torch(x)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return to_numpy(tensor)


@pytest.mark.parametrize("count", [1, 3, 1_000_003])
def test_counts_below_and_far_above_the_ranks(pool, count):
    inputs = awkward("bfloat16", 4, count)
    for got in pool(4).call(large_and_odd, PerRank(inputs)):
        assert same_bits(got, reference.reduce(inputs, "avg"))
