"""What the tree takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from collections.abc import Callable

from pycollective.schedule.algorithms.patterns import log2_ceiling
from pycollective.schedule.counts import (
    LEAF,
    NODE,
    RESULT,
    Load,
    Phases,
    Transfer,
    on_the_way_back,
    step,
)
from pycollective.schedule.topology import Topology


def _steps_count(topology: Topology, load: Callable[[int], Load], adds: float = 0) -> Phases:
    """Each step towards rank 0, with what is sent in that between ranks so far apart."""
    ranks = range(topology.ranks)
    distances = [1 << number for number in range(log2_ceiling(len(ranks)))]
    return tuple(
        step(
            topology,
            Transfer(ranks[distance :: 2 * distance], ranks[:: 2 * distance], load(distance)),
            adds=adds,
        )
        for distance in distances
    )


def _up_count(topology: Topology) -> Phases:
    # The first who hands over at a distance has as many leaves, or those up to the last rank.
    alone = 1, topology.ranks - 1
    return _steps_count(topology, lambda distance: LEAF if distance in alone else NODE, adds=1)


def _down_count(topology: Topology) -> Phases:
    return on_the_way_back(_up_count(topology))


def _gather_count(topology: Topology) -> Phases:
    n = topology.ranks
    return _steps_count(topology, lambda distance: RESULT.times(min(distance, n - distance) / n))


def _scatter_count(topology: Topology) -> Phases:
    return on_the_way_back(_gather_count(topology))


def _all_gather_count(topology: Topology) -> Phases:
    n = topology.ranks

    def lacked(distance: int) -> Load:
        last = n - 1 - (n - 1 - distance) % (2 * distance)  # of those who receive
        return RESULT.times(1 - min(distance, n - last) / n)

    return _gather_count(topology) + on_the_way_back(_steps_count(topology, lacked))


COUNTS = {
    "all_reduce": lambda topology: _up_count(topology) + _down_count(topology),
    "reduce_scatter": lambda topology: _up_count(topology) + _scatter_count(topology),
    "all_gather": _all_gather_count,
    "reduce": _up_count,
    "broadcast": _down_count,
    "gather": _gather_count,
    "scatter": _scatter_count,
}
