"""What is timed is compared: all-reduces with the oracle each time, kernels once, bit for bit.

And what states of compression give and keep with the averages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective import reference
from pycollective.bench import phase
from pycollective.bench.codec import Owed
from pycollective.bench.operations import PERIOD
from pycollective.testing.inputs import leaves

Array = NDArray[Any]


def check(
    name: str, call: Call, made: Sequence[tuple[Array, Array]], returns: object = None
) -> None:
    """Call once, and compare what it makes; nothing of it is there before.

    Args:
        name: of the call, for who reads the error.
        call: what will be timed.
        made: arrays that it writes, each with what it is to hold then.
        returns: what it is to return.

    Raises:
        AssertionError: it makes other bits, or returns something else.
    """
    for array, _ in made:
        array.view("u1").fill(0xA5)
    returned = call()
    if returned != returns:
        raise AssertionError(f"{name} returns {returned}, not {returns}")
    for array, wanted in made:
        if array.dtype != wanted.dtype or not np.array_equal(array.view("u1"), wanted.view("u1")):
            raise AssertionError(f"{name} makes other bits than it should")


def check_owed(owed: Owed, state: Any, counts: dict[str, int]) -> None:
    """Raise where a state has given too little, or lost the rest; collective, and it keeps nothing.

    Averages were of parameters of so many elements, one after another.
    """
    held, none = state.flush(), np.zeros(max(counts.values()), np.float32)
    each = [held[n].numpy().ravel() if n in held else none[:count] for n, count in counts.items()]
    if why := owed.fault(np.concatenate(each)):
        raise AssertionError(f"{type(state).__name__}: {why}")


class Sum:
    """A rank's buffers of an all-reduce, whose calls take turns.

    Before each turn `x` is what this rank has of the inputs, and of `out`, where that is another
    array, nothing is right. What is there after it, of so many calls, is compared with what the
    oracle makes of the inputs by as many.

    Attributes:
        x: the input.
        out: the output; `x` where calls are in place.
    """

    def __init__(
        self, inputs: Sequence[Array], rank: int, calls: int, *, count: int = 0, apart: bool = False
    ) -> None:
        """`inputs`: of all ranks, repeated up to `count`; `calls`: of a turn; `apart`: not in
        place."""
        count = count or len(inputs[rank])
        answer = reference.reduce(inputs)
        for _ in range(0 if apart else calls - 1):  # of what all ranks have by then
            answer = reference.reduce([answer] * len(inputs))
        self._mine, self._answer = np.resize(inputs[rank], count), np.resize(answer, count)
        self._wrong: dict[Call, int] = {}
        self.x = self._mine.copy()
        self.out = np.empty_like(self.x) if apart else self.x

    @classmethod
    def of(cls, dtype: str, count: int, ranks: int, rank: int, calls: int) -> Sum:
        """In place, of inputs whose sum depends on the order."""
        inputs = leaves(dtype, "sum", ranks, min(count, PERIOD), count)
        return cls(inputs, rank, calls, count=count)

    def turn(self, timed: Turn) -> Turn:
        """That turn, with the inputs put back before and the result compared after it."""

        def turn(call: Call) -> tuple[float, ...]:
            self.out.view("u1").fill(0xA5)
            self.x[:] = self._mine
            measured = timed(call)
            bits = f"u{self.out.itemsize}"
            wrong = np.count_nonzero(self.out.view(bits) != self._answer.view(bits))
            self._wrong[call] = self._wrong.get(call, 0) + int(wrong)
            return measured

        return turn

    def wrong(self, calls: Mapping[str, Call]) -> dict[str, int]:
        """Elements of all turns whose bits were not the oracle's on this rank, by call."""
        return {name: self._wrong[call] for name, call in calls.items()}


Call = Callable[[], object]
# What is measured of one call or more, such as its seconds.
Turn = Callable[[Call], tuple[float, ...]]


def take_turns(calls: Mapping[str, Call], rounds: int, turn: Turn) -> dict[str, tuple[float, ...]]:
    """The medians, over the rounds, of what `turn` measures of each call."""
    (only,) = take_turns_by_phase(calls, rounds, turn, lambda: 0.0)
    return only.medians


class InPhase(NamedTuple):
    """What was measured in one phase of the machine (`pycollective.bench.phase`).

    Attributes:
        phase: near, far or single; mixed, of all turns, where no phase had enough of every call.
        latency: seconds from core to core, the median.
        turns: of the call that had fewest.
        medians: of each call.
    """

    phase: str
    latency: float
    turns: int
    medians: dict[str, tuple[float, ...]]


def take_turns_by_phase(
    calls: Mapping[str, Call],
    rounds: int,
    turn: Turn,
    looks: Callable[[], float],
    least: int = 1,
) -> list[InPhase]:
    """The medians within each phase in which every call had `least` turns, near first.

    `looks` measures the latency, the same on all ranks. A turn, with the warm call before it, is
    repeated if the looks around it disagree.
    """

    def once(call: Call) -> tuple[float, ...]:
        call()  # warm
        return turn(call)

    seen: dict[str, list[phase.Turn[tuple[float, ...]]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seen[name].append(phase.within_one(partial(once, call), looks))
    return [
        InPhase(
            now,
            statistics.median(each.latency for turns in within.values() for each in turns),
            min(map(len, within.values())),
            {name: _medians([each.result for each in turns]) for name, turns in within.items()},
        )
        for now, within in (phase.by_phase(seen, least) or {phase.MIXED: seen}).items()
    ]


def _medians(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(values) for values in zip(*rows, strict=True))


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
