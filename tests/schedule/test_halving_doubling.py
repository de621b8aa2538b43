"""What halving-doubling costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from fractions import Fraction
from math import log2

import pytest

from tests.schedule.proved import ANY, POWERS, bytes_sent, every, message_sizes, one_host, proved


@pytest.mark.parametrize("n", POWERS)
def test_halving_doubling(n: int) -> None:
    """log2 n steps down: half of the shards as leaves, a quarter as nodes, an eighth; then up."""
    down = 1 + sum(Fraction(4, 2**step) for step in range(2, n.bit_length()))
    up = Fraction(2 * (n - 1), n)
    assert down == 3 - Fraction(4, n)
    for operation, phases, sent in (
        ("all_reduce", 2, down + up),
        ("reduce_scatter", 1, down),
        ("all_gather", 1, up),
    ):
        traffic = proved(operation, "halving_doubling", n)
        assert traffic.steps == phases * log2(n)
        assert traffic.messages == every(phases * log2(n), n)
        assert bytes_sent(traffic) == every(sent, n)


@pytest.mark.parametrize("n", ANY)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_halving_doubling_carries_one_node_of_a_shard_a_message(operation: str, n: int) -> None:
    schedule = one_host(operation, "halving_doubling", n)
    for shard in range(schedule.shards):
        assert all(len(types) == 1 for _, types in message_sizes(schedule, shard))
