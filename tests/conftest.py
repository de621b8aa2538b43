"""Fixtures: pools of ranks that live as long as the session."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool, close_servers


def pytest_configure() -> None:
    """Take the signals that a shell's background and nohup ignore, for all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    """Ends what forked the ranks of tests."""
    yield
    close_servers()
