"""Which rank gives which leaves: runs against brute force, and deals that are refused."""

from __future__ import annotations

import pickle
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from pycollective import ConfigurationError, leaves_of
from pycollective.leaves.deal import MOST_LEAVES, Deal
from pycollective.order import cover, held


def fewest_nodes(size: int, leaves: int) -> int:
    """Of all ways to cut leaves into runs of two lengths."""
    each, longer = divmod(leaves, size)
    found = []
    for chosen in combinations(range(size), longer):
        cuts = [0]
        for rank in range(size):
            cuts.append(cuts[-1] + each + (rank in chosen))
        found.append(sum(len(cover(*run, leaves)) for run in pairwise(cuts)))
    return min(found)


@pytest.mark.parametrize("size", range(1, 9))
def test_runs_are_even_and_cut_where_blocks_align_best(size: int) -> None:
    for leaves in range(1, 34):
        runs = [leaves_of(rank, size, leaves) for rank in range(size)]
        assert [leaf for run in runs for leaf in run] == [*range(leaves)]
        assert {len(run) for run in runs} <= {leaves // size, -(-leaves // size)}
        nodes = sum(len(cover(run.start, run.stop, leaves)) for run in runs)
        assert nodes == fewest_nodes(size, leaves), leaves


def test_what_a_rank_has_of_many_leaves() -> None:
    assert leaves_of(1, 3, 12) == range(4, 8)
    assert [len(leaves_of(rank, 4, 2)) for rank in range(4)] == [1, 1, 0, 0]
    assert leaves_of(4095, 4096, MOST_LEAVES) == range(MOST_LEAVES - 8, MOST_LEAVES)
    last = [leaves_of(rank, 4096, 6001) for rank in (4094, 4095)]
    assert last[0].stop == last[1].start
    assert last[1].stop == 6001


def test_64_leaves_are_few_nodes_on_any_number_of_ranks() -> None:
    """As docs/inside/algorithms.md and docs/reference/any_number_of_ranks.md say."""
    deals = [Deal.contiguous(size, 64) for size in range(1, 65)]
    most = [max(len(deal.nodes(rank)) for rank in range(deal.size)) for deal in deals]
    assert round(sum(most) / len(most), 2) == 1.67
    assert max(most) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 3, 8), "rank must be 0 to 2, not 3"),
        ((-1, 3, 8), "rank must be 0 to 2, not -1"),
        ((0, 0, 4), "shared by 1 rank or more, not 0"),
        ((0, 1, 0), f"leaves must be 1 to {MOST_LEAVES}, not 0"),
        ((0, 1, MOST_LEAVES + 1), f"leaves must be 1 to {MOST_LEAVES}, not"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        leaves_of(*arguments)


def test_a_deal_of_runs_is_the_same_however_it_is_made() -> None:
    for size, leaves in [(1, 7), (3, 8), (5, 12), (4, 3)]:
        default = Deal.contiguous(size, leaves)
        given = [leaves_of(rank, size, leaves) for rank in range(size)]
        assert Deal.of(leaves, [list(reversed(mine)) for mine in given]) == default
        assert Deal.of(leaves, given).digest == default.digest
        assert 0 < default.digest < 1 << 63


def test_a_deal_of_any_sets_has_their_nodes() -> None:
    given = [[0, 3, 2, 9], [], [1, 4, 5, 6, 7, 10, 8]]
    deal = Deal.of(11, given)
    assert deal.held == (((0, 1), (2, 4), (9, 10)), (), ((1, 2), (4, 9), (10, 11)))
    for rank, mine in enumerate(given):
        assert deal.nodes(rank) == (held(mine, 11) if mine else [])


def test_other_deals_have_other_digests() -> None:
    deals = [Deal.contiguous(size, leaves) for size in (1, 2, 3, 8) for leaves in (7, 8, 12)]
    deals += [Deal.of(8, [[0, 2, 4, 6], [1, 3, 5, 7]]), Deal.of(8, [[1, 3, 5, 7], [0, 2, 4, 6]])]
    assert len({deal.digest for deal in deals}) == len(deals)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1], [1, 2], [3]], r"leaf 1 is given twice, by rank\(s\) 0, 1: give each leaf once"),
        ([[0, 1, 2, 2], [3]], r"leaf 2 is given twice, by rank\(s\) 0: give each leaf once"),
        ([[0, 1], [3]], "no rank gives leaf 2 of 4: give each leaf once"),
        ([[0], []], "no rank gives leaf 1 and 2 more of 4: give each leaf once"),
        ([[0, 1], [2, 3, 4]], "rank 1 gives leaf 4, and leaves are 0 to 3"),
        ([[-1, 0, 1], [2, 3]], "rank 0 gives leaf -1, and leaves are 0 to 3"),
    ],
)
def test_a_deal_that_is_none_names_leaf_and_ranks(given: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Deal.of(4, given)


@pytest.mark.parametrize(
    "held",
    [
        (((0, 2),), ((3, 4),)),
        (((0, 2),), ((1, 4),)),
        (((0, 2),), ((2, 5),)),
        (((1, 2),), ((2, 4),)),
        (((2, 4), (0, 1)), ((1, 2),)),
        (((0, 1), (1, 2)), ((2, 4),)),
        (((0, 2), (2, 2)), ((2, 4),)),
        (((0, 3), (4, 3)), ((3, 4),)),
        ((), ()),
        (),
    ],
)
def test_ranges_that_are_no_deal_are_refused(held: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(ConfigurationError, match="do not give each of 4 leaves once"):
        Deal(4, held)


def test_a_deal_of_ranges_is_the_same_whatever_they_are_made_of() -> None:
    ranges: Any = [[[np.int64(0), 2], (5, 6)], [], [(2, 5)]]
    deal = Deal(np.int64(6), ranges)
    assert deal == Deal.of(6, [[0, 1, 5], [], [2, 3, 4]])
    assert deal.digest == Deal.of(6, [[0, 1, 5], [], [2, 3, 4]]).digest


def test_a_deal_that_was_pickled_under_the_modules_former_name_is_loaded() -> None:
    deal = Deal.of(3, [[0, 2], [1]])
    former = pickle.dumps(deal, 0).replace(b"pycollective.leaves.", b"pycollective.")
    assert pickle.loads(former) == deal
