"""Which run of leaves each rank computes where leaves cost unlike, and ranks are not as fast."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import add

from pycollective.errors import ConfigurationError
from pycollective.leaves.deal import Deal, checked_leaves

# The slowest rank may take so much longer than it must. Cuts then have room to lie at round
# numbers, where runs are made of few nodes; and each node of a run travels.
_SLACK = 1.02
_CLOSE = 1.001  # where the search for the shortest time ends

_Places = list[tuple[int, int]]  # before leaves, from the first to the last of each range; ascend


def cut(costs: Sequence[float], speeds: Sequence[float]) -> Deal:
    """Deal leaves to ranks in runs, such that the slowest rank is done early.

    The ranks' runs follow one another. A run takes the sum of its costs divided by its rank's
    speed, and the longest takes at most 2.1 % more than it must. Each rank has a leaf or more; with
    fewer leaves than ranks it is the default deal. The same numbers give the same deal on all
    machines: it follows from sums, products and comparisons in fp64.

    Args:
        costs: of each leaf, in any unit.
        speeds: of each rank, relative to one another.

    Raises:
        ConfigurationError: there are none of them, or a number is not finite and above 0.
    """
    leaves = checked_leaves(len(costs))
    _check(costs, "leaf", "costs")
    _check(speeds, "rank", "has speed")
    if leaves < len(speeds):
        return Deal.contiguous(len(speeds), leaves)
    search = _Search(costs, speeds)
    low = search.until[-1] / math.fsum(speeds)  # nothing is faster
    high = low * _CLOSE
    while search.begins(high) is None:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high and high > low * _CLOSE:
        if search.begins(middle) is None:
            low = middle
        else:
            high = middle
    cuts = search.cuts(high * _SLACK)
    return Deal(leaves, tuple(((lo, hi),) for lo, hi in pairwise(cuts)))


class _Search:
    """Cuts whose runs take no longer than a limit, of costs divided by speeds.

    Where ranks are unlike, a run that ends as late as it may can leave a slow rank no end within
    the limit. So it knows every place where a run may begin, not the last alone.
    """

    def __init__(self, costs: Sequence[float], speeds: Sequence[float]) -> None:
        self.until = [0.0, *accumulate(costs)]  # before each leaf, and of all
        self._speeds = speeds
        self._by_cost = sorted(range(len(costs)), key=costs.__getitem__)
        self._costs = sorted(costs)

    def begins(self, limit: float) -> list[_Places] | None:
        """Where each rank's run may begin, so that those before it keep the limit.

        None if the last then cannot end with the last leaf.
        """
        leaves, ranks = len(self._costs), len(self._speeds)
        found, places = [], [(0, 0)]
        for rank, speed in enumerate(self._speeds):
            found.append(places)
            others = ranks - 1 - rank  # have a leaf each
            places = self._ends(places, limit * speed, leaves - others)
        return found if places and places[-1][1] == leaves else None

    def _ends(self, begins: _Places, room: float, last: int) -> _Places:
        """Where runs may end that begin there and cost up to `room`."""
        ends: _Places = []
        heavy = sorted(self._by_cost[bisect_right(self._costs, room) :])  # for this rank
        for lo, hi in begins:
            # Runs that begin one behind the other end one behind the other.
            for leaf in [*heavy[bisect_left(heavy, lo) : bisect_right(heavy, hi)], hi + 1]:
                if lo < leaf:
                    far = min(bisect_right(self.until, self.until[leaf - 1] + room) - 1, last)
                    if ends and lo + 1 <= ends[-1][1] + 1:
                        ends[-1] = ends[-1][0], max(far, ends[-1][1])
                    elif lo < far:
                        ends.append((lo + 1, far))
                lo = leaf + 1
        return ends

    def cuts(self, limit: float) -> list[int]:
        """Where runs begin and the last ends, at numbers as round as the limit allows."""
        begins, cuts = self.begins(limit), [len(self._costs)]
        assert begins is not None  # the limit is no less than one that can be kept
        for places, speed in zip(reversed(begins), reversed(self._speeds), strict=True):
            room, end = limit * speed, cuts[-1]
            first = bisect_left(self.until, self.until[end], key=partial(add, room))
            within = [(max(lo, first), min(hi, end - 1)) for lo, hi in places]
            cuts.append(max((_roundest(lo, hi) for lo, hi in within if lo <= hi), key=_zeros))
        return cuts[::-1]


def _roundest(lo: int, hi: int) -> int:
    """Of the integers from lo to hi, the multiple of the largest power of two."""
    if lo == 0:
        return 0
    bit = (lo - 1 ^ hi).bit_length() - 1
    return hi >> bit << bit


def _zeros(number: int) -> int:
    return number & -number


def _check(values: Sequence[float], of: str, what: str) -> None:
    for number, value in enumerate(values):
        if not 0 < value < math.inf:
            raise ConfigurationError(
                f"{of} {number} {what} {value!r}: give a finite number above 0"
            )
