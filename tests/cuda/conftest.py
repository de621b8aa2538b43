"""A process with the stand-in for the driver: a process has one driver, and pytest's has none."""

from __future__ import annotations

import pytest

from tests.cuda import standin
from tests.harness import Ranks, results


@pytest.fixture(scope="module")
def gpu():
    """`gpu(function, *arguments)`: what it returns in the process with the stand-in."""
    with Ranks(1, env=standin.environment(), join=False) as ranks:

        def call(function, *arguments):
            [result] = results(ranks.call(standin.called, function, *arguments))
            return result

        yield call
