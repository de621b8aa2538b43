"""What the ring costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import log2

import pytest

from pycollective.order import split
from pycollective.schedule import Topology, make_schedule
from tests.schedule.proved import ANY, POWERS, bytes_sent, every, message_sizes, one_host, proved


@pytest.mark.parametrize("n", ANY)
def test_ring_talks_to_one_neighbour(n: int) -> None:
    """2(n - 1) steps, in each of which every rank sends one message."""
    assert proved("all_reduce", "ring", n).steps == 2 * (n - 1)
    assert proved("all_reduce", "ring", n).messages == every(2 * (n - 1), n)
    for half in ("reduce_scatter", "all_gather"):
        assert proved(half, "ring", n).steps == n - 1
        assert proved(half, "ring", n).messages == every(n - 1, n)
    targets = {
        (each.source, each.target) for each in one_host("all_reduce", "ring", n).transfers(0)
    }
    assert targets <= {(rank, (rank + 1) % n) for rank in range(n)}
    assert bytes_sent(proved("all_gather", "ring", n)) == every(Fraction(2 * (n - 1), n), n)


def nodes_of(leaves: set[int], lo: int, hi: int) -> Iterator[int]:
    """Sizes of the largest nodes under lo to hi - 1 that some leaves can be combined into."""
    if leaves.issuperset(range(lo, hi)):
        yield hi - lo
    elif hi - lo > 1:
        yield from nodes_of(leaves, lo, split(lo, hi))
        yield from nodes_of(leaves, split(lo, hi), hi)


@pytest.mark.parametrize("n", [*POWERS, 3, 6, 13])
def test_ring_bytes(n: int) -> None:
    """A rank sends the shard of each owner once: the partial of the ranks after that owner."""
    sent = every(Fraction(0), n)
    for owner in range(n):
        for hop in range(n - 1):
            passed = {(owner + 1 + rank) % n for rank in range(hop + 1)}
            parts = [2 if size == 1 else 4 for size in nodes_of(passed, 0, n)]
            sent[(owner + 1 + hop) % n] += Fraction(sum(parts), n)
    assert bytes_sent(proved("reduce_scatter", "ring", n)) == sent


@pytest.mark.parametrize("n", [4, 8, 16, 32, 64])
def test_ring_partials_have_at_most_so_many_nodes(n: int) -> None:
    schedule = one_host("reduce_scatter", "ring", n)
    sizes = [len(types) for shard in range(n) for _, types in message_sizes(schedule, shard)]
    assert max(sizes) == 2 * (log2(n) - 1)


@pytest.mark.parametrize(("n", "a_hop"), [(4, "4.0"), (8, "6.6"), (64, "16.6")])
def test_ring_bytes_a_hop_are_those_of_the_design(n: int, a_hop: str) -> None:
    """In the reduce phase, for each element of a shard; the price of the order on a ring."""
    sent = sum(bytes_sent(proved("reduce_scatter", "ring", n)))
    assert f"{float(sent / (n - 1)):.1f}" == a_hop


def test_ring_goes_around_host_by_host() -> None:
    schedule = make_schedule("all_gather", "ring", Topology.of_hosts("ababab"))
    pairs = {(each.source, each.target) for each in schedule.transfers(0)}
    assert pairs <= {(0, 2), (2, 4), (4, 1), (1, 3), (3, 5), (5, 0)}
