"""The machine's phase: whether the caches of the cores that ranks run on are near or far.

The host of a virtual machine moves its cores. For seconds at a time they share a cache, then they
do not. An all-reduce takes 3 to 10 times as long where they do not, and steal time, affinity and
context switches say nothing of it. The latency from core to core does. So a benchmark looks before
and after each turn, repeats a turn whose looks disagree, and compares turns of one phase alone.

Latencies that were measured: 22 to 80 ns where cores share a cache, 175 to 280 ns and more where
they do not. The boundary is between, at the same factor from both: sqrt(80 x 175) ns.

A flip that is undone within one turn is not seen.

`benchmarks/between_commits.py` runs this file with the package of another commit, so it needs
nothing but `_core.core_to_core_latency`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from pycollective import _core

T = TypeVar("T")

NEAR, FAR = "near", "far"
SINGLE = "single"  # one core: there is nothing between cores
MIXED = "mixed"  # the looks around a turn disagree
PHASES = (SINGLE, NEAR, FAR, MIXED)
BOUNDARY_SECONDS = 120e-9
# A look takes the best try: other load can only make a crossing look slower than it is. Each try
# takes 40 us near and 180 us far.
_TRIES = 3
_ROUND_TRIPS = 500
_REPEATS = 2


@dataclass(frozen=True)
class Turn(Generic[T]):
    """A turn, and what was seen around it.

    Attributes:
        result: of the last try.
        phase: near, far or single; mixed where the looks of every try disagreed.
        latency: seconds, the larger of its looks.
        repeated: tries that were thrown away.
    """

    result: T
    phase: str
    latency: float
    repeated: int


def look(cores: Sequence[int], latency: Callable[[int, int, int], float] | None = None) -> float:
    """Return the one-way latency between `cores` in seconds; 0 for one core.

    With several cores it is the largest between neighbours in the list: if each shares a cache
    with the next, all share it. `latency` measures between two, as `_core.core_to_core_latency`,
    which is the default.
    """
    measure = latency or _core.core_to_core_latency
    distinct = sorted(set(cores))
    return max(
        (
            min(measure(one, other, _ROUND_TRIPS) for _ in range(_TRIES))
            for one, other in itertools.pairwise(distinct)
        ),
        default=0.0,
    )


def look_together(communicator: Any, cores: Sequence[int]) -> float:
    """Return what rank 0 sees, on all ranks, while the others wait; every rank must call it."""
    seen = np.zeros(1)
    communicator.barrier()
    if communicator.rank == 0:
        seen[0] = look(cores)
    communicator.broadcast(seen)
    return float(seen[0])


def phase_of(latency: float) -> str:
    """Return near, far, or, for a latency of 0, single."""
    if latency == 0:
        return SINGLE
    return NEAR if latency < BOUNDARY_SECONDS else FAR


def within_one(run: Callable[[], T], looks: Callable[[], float]) -> Turn[T]:
    """Run a turn between two looks; up to twice more while they disagree."""
    repeated = -1
    phase = MIXED
    while phase == MIXED and repeated < _REPEATS:
        repeated += 1
        before = looks()
        result = run()
        after = looks()
        if phase_of(before) == phase_of(after):
            phase = phase_of(before)
    return Turn(result, phase, max(before, after), repeated)


def by_phase(
    turns: Mapping[str, Sequence[Turn[T]]], least: int = 1
) -> dict[str, dict[str, list[Turn[T]]]]:
    """Return the turns of each library within each phase that can be compared, near first.

    These are the phases in which every library has `least` turns; mixed turns are in none.
    """
    found = {
        phase: {
            library: [turn for turn in every if turn.phase == phase]
            for library, every in turns.items()
        }
        for phase in (SINGLE, NEAR, FAR)
    }
    return {
        phase: libraries
        for phase, libraries in found.items()
        if libraries and min(map(len, libraries.values())) >= least
    }
