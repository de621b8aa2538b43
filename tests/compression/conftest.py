"""Fixtures: ranks that average by either face of compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compression.players import FACES
from tests.harness import RankPool


@pytest.fixture(scope="session")
def with_torch() -> Iterator[RankPool]:
    """Four ranks that have torch already."""
    pool = RankPool(4, module="tests.torch.compressed")
    yield pool
    pool.close()


@pytest.fixture(params=FACES)
def face(
    request: pytest.FixtureRequest, pool: Callable[[int], RankPool]
) -> Callable[..., list[Any]]:
    """`face(function, *args)`: what ``function(communicator, name of the face, *args)`` returns."""
    ranks = pool(4) if request.param == "numpy" else request.getfixturevalue("with_torch")

    def call(function: Callable[..., Any], *args: Any) -> list[Any]:
        found = ranks.call(function, request.param, *args)
        if request.param != "numpy":
            from tests.torch.compressed import close_groups

            ranks.call(close_groups)
        return found

    return call
