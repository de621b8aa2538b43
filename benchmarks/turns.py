"""Calls that take turns in the same ranks: each round every one of them, in the same order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
# What is measured of one call or more, such as its seconds.
Turn = Callable[[Call], tuple[float, ...]]


def take_turns(calls: Mapping[str, Call], rounds: int, turn: Turn) -> dict[str, tuple[float, ...]]:
    """The medians, over the rounds, of what `turn` measures of each call."""
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # warm
            seen[name].append(turn(call))
    return {
        name: tuple(statistics.median(values) for values in zip(*rows, strict=True))
        for name, rows in seen.items()
    }


def seconds_of(repeats: int, barrier: Call, slowest: Callable[[float], float]) -> Turn:
    """A turn of so many calls back to back: the slowest rank's seconds for each.

    Args:
        repeats: how many.
        barrier: all ranks leave it together.
        slowest: the largest of all ranks' numbers.
    """

    def turn(call: Call) -> tuple[float]:
        barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (slowest((time.perf_counter() - start) / repeats),)

    return turn
