"""A host program that flushes subnormals gets the contract's bits from every operation."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import reference
from tests.float_environment import flushes, flushing, needs_flushing
from tests.harness import PerRank
from tests.inputs import same_bits, subnormal

pytestmark = needs_flushing


def all_reduce_while_flushing(comm, x, op, async_op):
    with flushing():
        flushed = np.float32(2.0**-126) * np.float32(0.5) == 0
        work = comm.all_reduce(x, op=op, async_op=async_op)
        if async_op:
            work.wait(timeout=30)
        return flushed, flushes(), x


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("count", [10, 100_000], ids=["one shot", "two shots"])
def test_all_reduce_keeps_subnormals(pool, dtype, count, async_op):
    inputs = subnormal(dtype, 3, count)
    for op in ["sum", "avg"]:
        want = reference.reduce(inputs, op)
        for flushed, still_flushing, got in pool(3).call(
            all_reduce_while_flushing, PerRank(inputs), op, async_op
        ):
            assert flushed, "the host does not flush: this test shows nothing"
            assert still_flushing, "the host's state was not put back"
            assert same_bits(got, want)
