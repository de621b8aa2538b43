"""The order of a reduction: which partial result is added to which (docs/reference/contract.md).

A node is the half-open range ``(lo, hi)`` of leaves that it is the result of. A left child always
holds a power of two of leaves, so siblings and parents follow from the two numbers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

Node = tuple[int, int]
TAKE, COMBINE = range(2)  # of a recipe


def split(lo: int, hi: int) -> int:
    """Where the order splits leaves lo to hi - 1: after the largest power of two below hi - lo."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def sibling(node: Node, leaves: int) -> Node:
    """The node that `node` is combined with, in the order over `leaves` leaves; not of the root."""
    lo, hi = node
    if hi == leaves:  # the right edge: a right child, beside the largest block that ends at lo
        return lo - (lo & -lo), lo
    size = hi - lo
    return (lo - size, lo) if lo & size else (hi, min(hi + size, leaves))


def parent(node: Node, leaves: int) -> Node:
    """The node that `node` and its sibling make; not of the root."""
    other = sibling(node, leaves)
    return min(node[0], other[0]), max(node[1], other[1])


def cover(lo: int, hi: int, leaves: int) -> list[Node]:
    """The fewest nodes of the order over `leaves` that make up leaves lo to hi - 1."""
    nodes: list[Node] = []
    while lo < hi:
        aligned = lo & -lo or leaves  # no node that begins at lo is larger
        if hi == leaves and hi - lo <= aligned:  # the right edge: a node of whatever size is left
            end = hi
        else:
            end = lo + min(aligned, 1 << ((hi - lo).bit_length() - 1))
        nodes.append((lo, end))
        lo = end
    return nodes


def held(ranks: Collection[int], leaves: int) -> list[Node]:
    """The fewest nodes of the order over `leaves` that make up the leaves of these ranks."""

    def within(lo: int, hi: int) -> list[Node]:
        found = sum(lo <= rank < hi for rank in ranks)
        if found in (0, hi - lo):
            return [(lo, hi)] if found else []
        middle = split(lo, hi)
        return [*within(lo, middle), *within(middle, hi)]

    return within(0, leaves)


def recipe(node: Node, terms: Sequence[Node]) -> list[int]:
    """How `node` is made of `terms`, nodes that ascend and make it up, in postfix order.

    Returns:
        `TAKE` for the next term, `COMBINE` for the last two results, as ``csrc/kernels/kernels.h``.
    """
    if len(terms) == 1:
        return [TAKE]
    middle = split(*node)
    left = sum(lo < middle for lo, _ in terms)
    return [
        *recipe((node[0], middle), terms[:left]),
        *recipe((middle, node[1]), terms[left:]),
        COMBINE,
    ]


def join(sums: Sequence[float], leaves: Sequence[int]) -> float:
    """Add up nodes that ascend from leaf 0, of so many leaves each, in the order; +0 for none."""
    ends = [*accumulate(leaves)]
    at = 0

    def node(lo: int, hi: int) -> float:
        nonlocal at
        if ends[at] == hi:
            at += 1
            return sums[at - 1]
        middle = split(lo, hi)
        return node(lo, middle) + node(middle, hi)

    return node(0, ends[-1]) if ends else 0.0
