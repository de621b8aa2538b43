"""The backend on devices: each c10d collective, bit for bit; and what groups can do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycollective import ConfigurationError
from tests.harness import PerRank, RankPool
from tests.inputs import FLOATS, INTEGERS, awkward, same_bits
from tests.torch.device_side import standing
from tests.torch.groups import to_numpy, to_torch
from tests.torch.test_collectives import COUNT, MOVES, REDUCTIONS, TORCH_OPS, How, reduce_to_last


@pytest.fixture(scope="module")
def pool() -> Iterator:
    """As the session's, whose ranks have another default group."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size, module="tests.torch.programs")
        return pools[size]

    yield get
    for each in pools.values():
        each.close()


def run_table(comm, collective, cases):
    standing(comm)
    return [
        to_numpy(collective(to_torch(x), How(how), TORCH_OPS.get(op), comm.size, comm.rank))
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
            if collective is reduce_to_last and r != ranks - 1 and is_carried(*case):
                continue  # Gloo uses that memory
            assert same_bits(outputs[r][i], np.ascontiguousarray(want)), (case, r)


def is_carried(dtype, op, how):
    """Whether it is a reduction that the carrier makes itself."""
    return dtype in ("int8", "uint8", "int32", "int64") and op in ("sum", "prod", "min", "max")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.storm), 3])
@pytest.mark.parametrize("collective", REDUCTIONS, ids=lambda f: f.__name__)
def test_reductions(pool, ranks, collective):
    floats = [(d, op) for d in FLOATS for op in ("sum", "avg", "prod", "min", "max")]
    integers = [(d, op) for d in INTEGERS for op in ("sum", "avg", "max", "band", "bor", "bxor")]
    booleans = [("bool", op) for op in ("min", "max", "band", "bor", "bxor")]
    pairs = floats + integers + booleans  # which take turns
    cases = [(*pair, ("sync", "async")[at % 2]) for at, pair in enumerate(pairs)]
    # A work of Gloo's reduce-scatter is not completed when its wait is over.
    cases = [(*each[:2], "sync") if is_carried(*each) else each for each in cases]
    check(pool, ranks, collective, cases, REDUCTIONS[collective])


@pytest.mark.parametrize("collective", MOVES, ids=lambda f: f.__name__)
def test_moves(pool, collective):
    cases = [(d, "", how) for d in ("float32", "int64", "uint8") for how in ("sync", "async")]
    check(pool, 2, collective, cases, lambda inputs, _: MOVES[collective](inputs))


def takes_strided(reduction):
    """A reduce-scatter's output is contiguous, as NCCL's."""
    return "scatter" not in reduction.__name__


def strided(comm, x):
    """Reductions of a tensor whose elements lie apart."""
    standing(comm)
    return [
        to_numpy(each(to_torch(x), How("strided"), dist.ReduceOp.AVG, comm.size, comm.rank))
        for each in filter(takes_strided, REDUCTIONS)
    ]


def test_strided_tensors(pool):
    inputs = awkward("bfloat16", 3, COUNT)
    want = [REDUCTIONS[each](inputs, "avg") for each in filter(takes_strided, REDUCTIONS)]
    for rank, got in enumerate(pool(3).call(strided, PerRank(inputs))):
        for found, wanted in zip(got, want, strict=True):
            assert same_bits(found, np.ascontiguousarray(wanted[rank]))


# --- What is refused.


def ones(*size, **options):
    return torch.ones(*size, **options)


REFUSALS = {
    "all_reduce: ReduceOp.PREMUL_SUM is not supported": (
        NotImplementedError,
        lambda: dist.all_reduce(ones(2), op=dist._make_nccl_premul_sum(2.0)),
    ),
    "uint16 cannot be reduced": (
        ConfigurationError,
        lambda: dist.all_reduce(ones(2, dtype=torch.uint16)),
    ),
    "sum has no meaning for bool": (
        ConfigurationError,
        lambda: dist.all_reduce(ones(2, dtype=torch.bool)),
    ),
    "bxor has no meaning for float32": (
        ConfigurationError,
        lambda: dist.all_reduce(ones(2), op=dist.ReduceOp.BXOR),
    ),
    "does not go with an input of 3": (
        ConfigurationError,
        lambda: dist.reduce_scatter_tensor(ones(2), ones(3)),
    ),
    "give 2 inputs of the output's shape": (
        ConfigurationError,
        lambda: dist.reduce_scatter(ones(2), [ones(2), ones(1)]),
    ),
}


def refuse(comm, said):
    standing(comm)
    error, call = REFUSALS[said]
    with pytest.raises(error, match=said):
        call()
    tensor = ones(2)
    dist.all_reduce(tensor)  # still
    return tensor.tolist()


@pytest.mark.parametrize("said", REFUSALS)
def test_refusals(pool, said):
    assert pool(2).call(refuse, said) == [[2.0, 2.0]] * 2
