"""Whether averages that leave something out for later ones lose any of it.

What a state of compression gives differs from the average, by as much as it may, but what it gives
and what it then keeps make up all averages so far, but for rounding. That has a bound which is the
same for every codec, and tight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycollective.compression.arrays import Floats

# Of an average (L2), for up to so many calls; an average that is missing is off by 1. What a state
# keeps is rounded in each call, by 6e-8 of what it has grown to: of the same gradients again and
# again, all one way, so that it grows with the square (0.1 % of the elements sent: 7e-5 in 100
# calls, 7e-4 in 400).
_MOST_LOST, _CALLS = 1e-4, 100


def off(mean: Any, out: Any) -> float:
    """How far `out` is from `mean`, relative to it (L2): arrays of floats of one shape."""
    return float(np.linalg.norm(out.astype(mean.dtype) - mean) / np.linalg.norm(mean))


class Owed:
    """What the calls of one state have left out of the averages so far."""

    def __init__(self, worst: float = math.inf) -> None:
        """`worst`: how far off a first call may be, which has nothing to make good."""
        self._worst = worst
        self._first = 0.0
        self._owed: Any = np.float64(0)
        self._mean: Any = None
        self._calls = 0

    def add(self, mean: Floats, out: Floats) -> None:
        """Note a call, each of them, by what it should have averaged to and what it made: fp32."""
        if self._mean is None:
            self._first = off(mean, out)
        self._owed = self._owed + mean - out
        self._mean = mean
        self._calls += 1

    def fault(self, held: Floats) -> str:
        """What is wrong with the calls, of which there was one; empty if nothing is.

        Args:
            held: what the state's `flush` gave, fp32, of the same shape.
        """
        if not self._first <= self._worst:  # so that NaN is wrong
            return f"the first average is {self._first:.2e} off"
        lost = float(np.linalg.norm(self._owed - held) / np.linalg.norm(self._mean))
        most = _MOST_LOST * max(1.0, self._calls / _CALLS) ** 2
        return "" if lost <= most else f"{lost:.2e} of an average is neither given nor kept"
