"""What the direct way costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.schedule.proved import ANY, bytes_sent, every, proved


@pytest.mark.parametrize("n", ANY)
def test_direct_sends_only_inputs_and_results(n: int) -> None:
    """All-reduce: two steps of n - 1 messages, and 2 + 2 bytes an element less a rank's own."""
    share = Fraction(2 * (n - 1), n)
    both = proved("all_reduce", "direct", n)
    assert both.steps == (2 if n > 1 else 0)
    assert both.messages == every(2 * (n - 1), n)
    assert bytes_sent(both) == every(2 * share, n)
    assert both.nodes == every(0, n)
    for half in (proved("reduce_scatter", "direct", n), proved("all_gather", "direct", n)):
        assert half.steps == (1 if n > 1 else 0)
        assert half.messages == every(n - 1, n)
        assert bytes_sent(half) == every(share, n)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_direct_to_and_from_a_root(n: int) -> None:
    root = n // 2
    other = [rank != root for rank in range(n)]
    for name, from_root, from_others in (
        ("broadcast", n - 1, 0),
        ("gather", 0, 1),
        ("scatter", n - 1, 0),
    ):
        messages = [from_others if each else from_root for each in other]
        assert proved(name, "direct", n, root=root).messages == messages, name
    reduced = proved("reduce", "direct", n, root=root)
    assert reduced.messages == [n - 1 + each for each in other]
    assert proved("all_to_all", "direct", n).messages == every(n - 1, n)
    assert proved("all_to_all", "direct", n).results == every(n - 1, n)
