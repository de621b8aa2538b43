"""Fixtures: pools of ranks that have torch already."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """`pool(n)`: the session's pool of n ranks, forks here: to import torch takes each 1.5 s."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size, module="tests.torch.programs")
        return pools[size]

    yield get
    for each in pools.values():
        each.close()
