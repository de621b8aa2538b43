"""What recursive doubling costs: steps, messages and bytes, against formulas written here."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import pytest

from pycollective.schedule import Topology, make_schedule
from pycollective.schedule.steps import Send
from tests.schedule.proved import ANY, POWERS, bytes_sent, every, message_sizes, one_host, proved


@pytest.mark.parametrize("n", POWERS)
def test_recursive_doubling(n: int) -> None:
    """log2 n steps of one node; leaves in the first."""
    traffic = proved("all_reduce", "recursive_doubling", n)
    assert traffic.steps == log2(n)
    assert traffic.messages == every(log2(n), n)
    assert bytes_sent(traffic) == every(2 + 4 * (log2(n) - 1), n)


@pytest.mark.parametrize("n", ANY)
def test_recursive_doubling_carries_at_most_two_nodes_a_message(n: int) -> None:
    sizes = [
        len(types) for _, types in message_sizes(one_host("all_reduce", "recursive_doubling", n), 0)
    ]
    power = n & (n - 1) == 0
    assert max(sizes, default=0) <= (1 if power else 2)
    steps = ceil(log2(n)) if power else int(log2(n)) + 2
    assert proved("all_reduce", "recursive_doubling", n).steps == steps


@pytest.mark.parametrize("n", ANY)
def test_bruck_takes_the_fewest_steps(n: int) -> None:
    """For any number of ranks: each step at most doubles what a rank can have."""
    traffic = proved("all_gather", "recursive_doubling", n)
    assert traffic.steps == ceil(log2(n))
    assert traffic.messages == every(ceil(log2(n)), n)
    assert bytes_sent(traffic) == every(Fraction(2 * (n - 1), n), n)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 8), (8, 3), (64, 1), (3, 2), (11, 4)])
def test_recursive_doubling_exchanges_once_a_host(hosts: int, local: int) -> None:
    """Between hosts log2(hosts) messages one after the other, of the first rank alone."""
    traffic = proved("all_reduce", "recursive_doubling", hosts * local, f"{hosts}x{local}")
    power = hosts & (hosts - 1) == 0
    across = int(log2(hosts)) + (0 if power else 2)
    topology = Topology.parse(f"{hosts}x{local}", hosts * local)
    schedule = make_schedule("all_reduce", "recursive_doubling", topology)
    for rank, (steps, _) in schedule.lowered(0).items():
        targets = {topology.host_of[step.to] for step in steps if isinstance(step, Send)}
        assert targets <= {topology.host_of[rank]} or rank % local == 0
    assert traffic.steps == across + (2 if local > 1 else 0)
    for rank, messages in enumerate(traffic.messages):
        if rank % local:
            assert messages == 1
        elif power:
            assert messages == across + local - 1
        else:
            assert messages <= across - 1 + local - 1
