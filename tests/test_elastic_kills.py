"""Ranks of a training are killed, and it ends with the bits of one in which nobody was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.elastic_kills import CASES, HELD, MOMENTS, disturbed, summary, undisturbed

# Kills and steps. On one host: every kind of moment, at least once.
STORMS = {"one host": (12, 160), "8-bit gradients": (6, 100), "two hosts packed": (3, 70)}


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STORMS)
def test_killed_ranks_change_no_bit(name: str) -> None:
    kills, steps = STORMS[name]
    training = replace(CASES[name], steps=steps)
    runs = [disturbed(training, kills, seed=1)]
    found: dict[str, Any] = summary(runs, undisturbed(replace(training, leaf_seconds=0.0)))
    assert found["kills"] == kills
    assert found["wrong"] == 0
    assert found["left"] == []
    # Rank 0 is connected to the store; a thread may start after the first step.
    assert all(found["grown"][what] <= most for what, most in zip(HELD, (1, 0, 1), strict=True))
    if name == "one host":
        assert len(set(MOMENTS) - {*found["moments"]}) <= 1, found["moments"]
