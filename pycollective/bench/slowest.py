"""The largest of every rank's numbers, and whether all ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycollective.communicator import Communicator


def largest(communicator: Communicator, numbers: Sequence[float]) -> list[float]:
    """Return the largest of all ranks for each number; every rank must call it."""
    all_of = np.array(numbers, np.float64)
    communicator.all_reduce(all_of, op="max")
    found: list[float] = all_of.tolist()
    return found


def slowest(communicator: Communicator, number: float) -> float:
    """Return the largest of one number."""
    return largest(communicator, [number])[0]


def alike(communicator: Communicator, number: float) -> bool:
    """Return whether all ranks have the same; every rank must call it."""
    most, least = largest(communicator, [number, -number])
    return most == -least
