"""What the tree costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from math import ceil, log2

import pytest

from tests.schedule.proved import ANY, POWERS, bytes_sent, message_sizes, one_host, proved


def trailing_zeros(rank: int, n: int) -> int:
    """Children of a rank in a binomial tree over a power of two: of rank 0, all the bits."""
    return (rank & -rank).bit_length() - 1 if rank else n.bit_length() - 1


@pytest.mark.parametrize("n", POWERS)
def test_tree(n: int) -> None:
    """2 log2 n steps; up one node, which of an odd rank is a leaf; down a message to each child."""
    traffic = proved("all_reduce", "tree", n)
    children = [trailing_zeros(rank, n) for rank in range(n)]
    assert traffic.steps == 2 * log2(n)
    assert traffic.messages == [(rank > 0) + children[rank] for rank in range(n)]
    up = [0 if rank == 0 else 2 if rank % 2 else 4 for rank in range(n)]
    assert bytes_sent(traffic) == [up[rank] + 2 * children[rank] for rank in range(n)]


@pytest.mark.parametrize("n", ANY)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_tree_carries_one_node_a_message(operation: str, n: int) -> None:
    schedule = one_host(operation, "tree", n)
    assert proved(operation, "tree", n).steps <= 2 * ceil(log2(n))
    for shard in range(schedule.shards):
        assert all(len(types) == 1 for _, types in message_sizes(schedule, shard))


@pytest.mark.parametrize("n", ANY)
def test_tree_reduce_and_broadcast(n: int) -> None:
    for root in {0, n - 1}:
        reduced, spread = (proved(name, "tree", n, root=root) for name in ("reduce", "broadcast"))
        assert reduced.steps == ceil(log2(n)) + (root > 0)
        assert sum(reduced.messages) == n - 1 + (root > 0)
        assert spread.steps == ceil(log2(n))
        assert sum(spread.messages) == n - 1
        assert bytes_sent(spread) == [2 * messages for messages in spread.messages]
