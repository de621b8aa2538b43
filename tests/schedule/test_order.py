"""The order's arithmetic on nodes, against the recursion that defines the order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pycollective.order import Node, cover, parent, sibling, split


def families(lo: int, hi: int) -> Iterator[tuple[Node, Node, Node]]:
    """Each inner node of the order over leaves lo to hi - 1, with its left and right child."""
    if hi - lo > 1:
        middle = split(lo, hi)
        yield (lo, hi), (lo, middle), (middle, hi)
        yield from families(lo, middle)
        yield from families(middle, hi)


def pieces(node: Node, lo: int, hi: int) -> list[Node]:
    """The largest nodes under `node` that lie within leaves lo to hi - 1, from the top down."""
    if lo <= node[0] and node[1] <= hi:
        return [node]
    if node[1] <= lo or hi <= node[0]:
        return []
    middle = split(*node)
    return pieces((node[0], middle), lo, hi) + pieces((middle, node[1]), lo, hi)


@pytest.mark.parametrize("lo", [0, 4, 96])
def test_split_is_after_the_largest_power_of_two_below_the_size(lo: int) -> None:
    for size in range(2, 300):
        left = split(lo, lo + size) - lo
        assert left < size <= 2 * left
        assert left & (left - 1) == 0


def test_the_orders_of_the_contract() -> None:
    """contract.md shows them: 6 leaves as ((0+1)+(2+3))+(4+5), 7 as ...+((4+5)+6)."""
    six = [(0, 6), (0, 4), (0, 2), (2, 4), (4, 6)]
    assert [node for node, _, _ in families(0, 6)] == six
    seven = [(0, 7), (0, 4), (0, 2), (2, 4), (4, 7), (4, 6)]
    assert [node for node, _, _ in families(0, 7)] == seven


@pytest.mark.parametrize("leaves", [*range(1, 140), 1000, 1024, 1025])
def test_sibling_and_parent_are_those_of_the_recursion(leaves: int) -> None:
    seen = {(0, leaves)}
    for node, left, right in families(0, leaves):
        assert sibling(left, leaves) == right
        assert sibling(right, leaves) == left
        assert parent(left, leaves) == parent(right, leaves) == node
        seen |= {left, right}
    assert len(seen) == 2 * leaves - 1


@pytest.mark.parametrize("leaves", range(1, 34))
def test_cover_is_the_fewest_nodes(leaves: int) -> None:
    for lo in range(leaves + 1):
        for hi in range(lo, leaves + 1):
            expected = pieces((0, leaves), lo, hi) if lo < hi else []
            assert cover(lo, hi, leaves) == expected
