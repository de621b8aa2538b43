"""Runs of leaves cut by cost: against brute force, and numbers that are refused."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest

from pycollective import ConfigurationError
from pycollective.leaves.cut import cut
from pycollective.leaves.deal import Deal


def slowest(costs: list[float], speeds: list[float], cuts: list[int]) -> float:
    runs = zip(pairwise(cuts), speeds, strict=True)
    return max(sum(costs[lo:hi]) / speed for (lo, hi), speed in runs)


def cuts_of(deal: Deal) -> list[int]:
    """Each rank has one run, behind that of the rank before."""
    return [*(lo for ((lo, _),) in deal.held), deal.leaves]


def lognormal(rng: random.Random, count: int, sigma: float = 0.8) -> list[float]:
    return [rng.lognormvariate(0, sigma) for _ in range(count)]


def test_the_slowest_rank_is_as_fast_as_any_runs_allow() -> None:
    rng = random.Random(1)
    for _ in range(150):
        leaves = rng.randint(1, 10)
        ranks = rng.randint(1, leaves)
        costs = lognormal(rng, leaves, rng.choice([0.1, 0.8, 3]))
        speeds = lognormal(rng, ranks, rng.choice([0, 0.3, 2]))
        chosen = combinations(range(1, leaves), ranks - 1)
        best = min(slowest(costs, speeds, [0, *cuts, leaves]) for cuts in chosen)
        found = slowest(costs, speeds, cuts_of(cut(costs, speeds)))
        assert found <= best * 1.0211, (costs, speeds)


def test_costs_of_long_tail_on_three_ranks() -> None:
    """As any_number_of_ranks.md says: slowest over mean, and the rows of who has most."""
    rng = random.Random(2)
    equal, balanced, rows = 0.0, 0.0, 0
    for _ in range(100):
        costs, speeds = lognormal(rng, 24), [1.0] * 3
        deal = cut(costs, speeds)
        equal += slowest(costs, speeds, [0, 8, 16, 24]) * 3 / sum(costs)
        balanced += slowest(costs, speeds, cuts_of(deal)) * 3 / sum(costs)
        rows += max(len(deal.nodes(rank)) for rank in range(3))
    assert (round(equal / 100, 2), round(balanced / 100, 2)) == (1.28, 1.08)
    assert rows / 100 < 3


def test_cuts_lie_at_round_numbers_where_that_costs_nothing() -> None:
    assert cuts_of(cut([1.0] * 24, [1.0] * 3)) == [0, 8, 16, 24]
    assert cuts_of(cut([1.0] * 63 + [60.0], [1.0] * 2)) == [0, 60, 64]  # 62 costs less than 2 %


def test_many_leaves_on_many_ranks() -> None:
    rng = random.Random(3)
    costs, speeds = lognormal(rng, 4096), lognormal(rng, 512, 0.3)
    found = slowest(costs, speeds, cuts_of(cut(costs, speeds)))
    assert found < 1.5 * slowest(costs, speeds, [8 * rank for rank in range(513)]) / 2


def test_fewer_leaves_than_ranks_are_dealt_as_ever() -> None:
    assert cut([15e-324, 5e-324], [1.0, 1.0]).leaves == 2  # whose middle is one of them
    assert cut([1.0, 5.0], [1.0, 1.0, 1.0]) == Deal.contiguous(3, 2)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0.0])
def test_a_number_that_is_no_cost_or_speed_is_named(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match=f"leaf 1 costs {wrong}: give a finite number"):
        cut([1.0, wrong], [1.0])
    with pytest.raises(ConfigurationError, match=f"rank 1 has speed {wrong}: give a finite"):
        cut([1.0, 1.0], [1.0, wrong])
    with pytest.raises(ConfigurationError, match="leaves must be 1"):
        cut([], [1.0])
