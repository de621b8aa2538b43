"""A process with the stand-in for the driver: a process has one driver, and pytest's has none."""

from __future__ import annotations

import pytest

from tests.cuda import standin
from tests.harness import RankPool, Ranks, results


@pytest.fixture(scope="module")
def gpu(request):
    """`gpu(function, *arguments)`: what it returns in the process with the stand-in."""
    name, variables = request.module.__name__, standin.environment()
    with Ranks(1, module=name, variables=variables, join=False) as ranks:

        def call(function, *arguments):
            [result] = results(ranks.call(standin.called, function, *arguments))
            return result

        yield call


@pytest.fixture(scope="module")
def gpu_pool(request):
    """`gpu_pool(n)`: ranks with the stand-in, two GPUs for all of them."""
    pools = {}

    def get(size):
        if size not in pools:
            variables = standin.environment()
            pools[size] = RankPool(size, module=request.module.__name__, variables=variables)
        return pools[size]

    yield get
    for each in pools.values():
        each.close()
