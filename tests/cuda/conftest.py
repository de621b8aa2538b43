"""A process with the stand-in for the driver: a process has one driver, and pytest's has none."""

from __future__ import annotations

import pytest

from tests.cuda import standin
from tests.cuda.arrays import for_device
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


def pools(request, begin=None, **more):
    """Pools of ranks with the stand-in, by their number; `begin`: what each rank does first."""
    made = {}

    def get(size):
        if size not in made:
            variables = standin.environment(**more)
            made[size] = RankPool(size, module=request.module.__name__, variables=variables)
            if begin is not None:
                assert made[size].call(begin) == [(rank, "peer") for rank in range(size)]
        return made[size]

    yield get
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def gpu_pool(request):
    """`gpu_pool(n)`: ranks with the stand-in, two GPUs for all of them."""
    yield from pools(request)


@pytest.fixture(scope="module")
def peers(request):
    """`peers(n)`: ranks whose calls kernels carry out, a GPU for each."""
    yield from pools(request, for_device, devices=8)
