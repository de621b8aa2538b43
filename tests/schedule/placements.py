"""Topologies on which formulas are held to schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pycollective.schedule import Topology

# All that are small, then such that are and are not powers of two, even and odd: what holds for
# these and not for another has not been met, and large numbers take most of the time.
RANKS = [*range(1, 14), 16, 17, 19, 24]
MORE_RANKS = [14, 15, 33]  # in `make storm`
BOTH = [RANKS, pytest.param(MORE_RANKS, marks=pytest.mark.storm)]


def blocks(ranks: int) -> Iterator[Topology]:
    """So many ranks, a power of two, on hosts that hold blocks of a power of two."""
    for hosts in (1, 2, 4, 8, 16, 32, 64):
        if hosts <= ranks:
            yield Topology.parse(f"{hosts}x{ranks // hosts}", ranks)


def any_placements(ranks: int) -> Iterator[Topology]:
    """All on one host, blocks, blocks and a rest, dealt out in turn, uneven, scattered."""
    yield Topology.single_host(ranks)
    few = ranks <= 17
    for size in (1, 3, 4, 7) if few else (3, 4):
        if size < ranks:
            yield Topology.of_hosts([rank // size for rank in range(ranks)])
    for hosts in (2, 3, 10) if few else (10,):
        if hosts < ranks:
            yield Topology.of_hosts([rank % hosts for rank in range(ranks)])
    if ranks > 2:
        yield Topology.of_hosts([0] * (ranks - 1) + [1])
        yield Topology.of_hosts([rank * rank % 5 for rank in range(ranks)])
    if ranks > 2 and few:
        yield Topology.of_hosts([0] * (ranks // 4) + [1] * (ranks - ranks // 4))
