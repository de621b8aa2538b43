"""What a state of compression gives and keeps, beside the averages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pycollective.bench.codec import Owed

MEANS = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)


def given_and_kept(spoiled=-1):
    """What error feedback makes of the means by every second element, and what it then keeps.

    One call can give zeros instead, and keep none of it.
    """
    held = np.zeros(MEANS.shape[1], np.float32)
    for number, mean in enumerate(MEANS):
        held += mean
        out = np.where(np.arange(held.size) % 2 == number % 2, held, 0)
        held -= out
        yield mean, out * (number != spoiled), held.copy()


def said(calls, worst=math.inf):
    """What is wrong with them."""
    owed = Owed(worst)
    for mean, out, held in calls:
        owed.add(mean, out)
        kept = held
    return owed.fault(kept)


@pytest.mark.parametrize("spoiled", range(-1, len(MEANS)))
def test_each_average_is_seen_that_is_lost(spoiled):
    assert ("neither given nor kept" in said(given_and_kept(spoiled))) == (spoiled >= 0)


@pytest.mark.parametrize(("worst", "wrong"), [(0.6, True), (0.8, False)])
def test_a_first_average_has_a_bound(worst, wrong):
    assert ("the first average is 7." in said(given_and_kept(), worst)) == wrong


def test_nan_is_wrong():
    for number in range(len(MEANS)):
        calls = list(given_and_kept())
        calls[number][1].fill(np.nan)
        assert said(calls)
