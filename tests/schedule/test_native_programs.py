"""The programs that the native tests run are those that schedules become today."""

from __future__ import annotations

from tests.schedule.native_programs import FILE, lines


def test_the_native_tests_have_the_programs_of_today():
    assert FILE.read_text().splitlines() == list(lines()), (
        "run python -m tests.schedule.native_programs"
    )
