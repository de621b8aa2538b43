"""Fixtures: pools of ranks that live as long as the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """`pool(n)`: the session's pool of n ranks."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for each in pools.values():
        each.close()
