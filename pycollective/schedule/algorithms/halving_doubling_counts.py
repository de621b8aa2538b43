"""What halving-doubling takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from itertools import repeat
from operator import xor

from pycollective.schedule.algorithms.blocks import larger_neighbour, largest_block
from pycollective.schedule.counts import (
    LEAF,
    NODE,
    RESULT,
    Phases,
    Transfer,
    ceil_div,
    on_the_way_back,
    step,
)
from pycollective.schedule.topology import Topology


def _halve_count(topology: Topology, shards: int) -> Phases:
    """Each step of `halve`, for so many shards.

    In step k a block of 2**k ranks, if there is one, is done, and hands each rank's part over while
    the larger ones exchange halves of such a part.
    """
    n = topology.ranks
    phases = []
    distance = 1
    while distance < largest_block(n):
        unit = LEAF if distance == 1 else NODE
        half = ceil_div(shards, 2 * distance) / shards
        lo = n // (2 * distance) * (2 * distance)  # of the block that is done
        pairs = range(lo)
        transfers = [Transfer(pairs, map(xor, pairs, repeat(distance)), unit.times(half))]
        if n & distance:
            larger = larger_neighbour(n, distance)
            takers = range(lo - larger, lo)
            givers = (lo + rank % distance for rank in range(larger))
            each = larger // distance
            part = unit.times(ceil_div(shards, distance) / shards / each)
            transfers.append(Transfer(givers, takers, part, each))
        # A block that has its half combines with it what the smaller blocks handed over.
        joins = n & 2 * distance and n % (2 * distance)
        phases.append(step(topology, *transfers, adds=half * (2 if joins else 1)))
        distance *= 2
    return tuple(phases)


def _collect_count(topology: Topology) -> Phases:
    n, block = topology.ranks, largest_block(topology.ranks)
    phases = _halve_count(topology, n)
    if n == block:
        return phases
    return *phases, step(topology, Transfer(range(n - block), range(block, n), RESULT.times(1 / n)))


def _all_gather_count(topology: Topology) -> Phases:
    return on_the_way_back(_collect_count(topology))


def _all_reduce_count(topology: Topology) -> Phases:
    phases = _halve_count(topology, largest_block(topology.ranks))
    return phases + on_the_way_back(phases)


COUNTS = {
    "all_reduce": _all_reduce_count,
    "reduce_scatter": _collect_count,
    "all_gather": _all_gather_count,
}
