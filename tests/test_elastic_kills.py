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
    # A second segment with its peers, after a change that another kill has disturbed; the store.
    most = dict(zip(HELD, (6, 3, 2), strict=True))
    assert all(found["grown"][what] <= most[what] for what in HELD), found["grown"]
    if name == "one host":
        assert len({*MOMENTS} - {*found["moments"]}) <= 1, found["moments"]
