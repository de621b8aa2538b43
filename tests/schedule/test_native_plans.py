"""The plans that the native tests run are those that schedules become today."""

from __future__ import annotations

import pytest

from tests.schedule.native_plans import FILES, FOLDER, lines


@pytest.mark.parametrize("file", FILES)
def test_the_native_tests_have_the_programs_of_today(file):
    assert (FOLDER / file).read_text().splitlines() == list(lines(file)), (
        "run python -m tests.schedule.native_plans"
    )
