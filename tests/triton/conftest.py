from __future__ import annotations

import pytest

from tests.triton.compiled import interpreting


@pytest.fixture(autouse=True)
def interpreter():
    with interpreting():
        yield
