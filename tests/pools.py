"""Pools of ranks for what asks for many sizes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.harness import RankPool


@contextmanager
def forked_beyond(
    most: int, pool: Callable[[int], RankPool], module: str
) -> Iterator[Callable[[int], RankPool]]:
    """`pool`, but of more than `most` ranks forks that have imported `module`.

    A fresh rank imports pytest and hypothesis with its test, half a second of CPU; that processes
    need not be alike, as forks are, a few of them show.
    """
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size <= most:
            return pool(size)
        if size not in pools:
            pools[size] = RankPool(size, module=module)
        return pools[size]

    try:
        yield get
    finally:
        for each in pools.values():
            each.close()
