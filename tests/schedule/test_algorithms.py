"""What each algorithm costs: steps, messages and bytes, against formulas that are written here.

Bytes are those that a rank sends for each element of a bf16 buffer: 2 for a leaf or a result, 4 for
a node, which is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import ceil, log2

import pytest

from pycollective.order import split
from pycollective.schedule import Schedule, Topology, make_schedule
from pycollective.schedule.steps import Receive, Send, Type
from pycollective.schedule.verify import Traffic, verify

POWERS = [2, 4, 8, 16, 32, 64]
ANY = [*range(1, 34), 47, 48, 63, 64, 65]


def one_host(operation: str, algorithm: str, n: int, root: int = 0) -> Schedule:
    return make_schedule(operation, algorithm, Topology.single_host(n), root)


@cache
def proved(operation: str, algorithm: str, n: int, hosts: str = "", root: int = 0) -> Traffic:
    topology = Topology.parse(hosts or f"1x{n}", n)
    return verify(make_schedule(operation, algorithm, topology, root))


def bytes_sent(traffic: Traffic) -> list[Fraction]:
    """By rank."""
    return [
        Fraction(traffic.bytes_sent(rank, 2, 4)).limit_denominator(1 << 20)
        for rank in range(traffic.ranks)
    ]


def every(value: float | Fraction, n: int) -> list[float | Fraction]:
    return [value] * n


def message_sizes(schedule: Schedule, shard: int) -> Iterator[tuple[Send, list[Type]]]:
    """Each send of a shard, and the types of its buffers."""
    for steps, types in schedule.lowered(shard).values():
        for step in steps:
            if isinstance(step, Send):
                yield step, [types[buffer] for buffer in step.buffers]


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


@pytest.mark.parametrize("n", ANY)
def test_ring_talks_to_one_neighbour(n: int) -> None:
    """2(n - 1) steps, in each of which every rank sends one message."""
    assert proved("all_reduce", "ring", n).steps == 2 * (n - 1)
    assert proved("all_reduce", "ring", n).messages == every(2 * (n - 1), n)
    for half in ("reduce_scatter", "all_gather"):
        assert proved(half, "ring", n).steps == n - 1
        assert proved(half, "ring", n).messages == every(n - 1, n)
    targets = {(move.source, move.target) for move in one_host("all_reduce", "ring", n).moves(0)}
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
    pairs = {(move.source, move.target) for move in schedule.moves(0)}
    assert pairs <= {(0, 2), (2, 4), (4, 1), (1, 3), (3, 5), (5, 0)}


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


BLOCKS = [(2, 4), (4, 4), (8, 8), (2, 8), (16, 4), (32, 2), (64, 1), (1, 8)]


@pytest.mark.parametrize(("hosts", "local"), BLOCKS)
def test_hierarchical_on_aligned_blocks(hosts: int, local: int) -> None:
    """A leaf to each carrier of the host, one node a host across, and the same way back.

    Up to 8 hosts carriers send straight to the owner; from 16 on they halve, in log2(hosts) steps.
    """
    n = hosts * local
    straight = hosts <= 8
    inside = Fraction(2 * (local - 1), local)
    node = 4 if local > 1 else 2
    if straight or local > 1:
        up = Fraction(node * (hosts - 1), n)
    else:  # leaves in the first step of halving, which takes half of the shards
        up = 1 + Fraction(4 * (hosts // 2 - 1), n)
    back = Fraction(2 * (hosts - 1), n)
    steps = (1 if straight else int(log2(hosts))) if hosts > 1 else 0
    messages = local - 1 + (hosts - 1 if straight else steps)
    within = local > 1  # else the first step, and the last, is nobody's
    for operation, phases, sent in (
        ("all_reduce", 2, inside + up + back + inside),
        ("reduce_scatter", 1, inside + up),
        ("all_gather", 1, back + inside),
    ):
        traffic = proved(operation, "hierarchical", n, f"{hosts}x{local}")
        assert traffic.messages == every(phases * messages, n)
        assert bytes_sent(traffic) == every(sent, n)
        last_is_idle = not within and operation != "reduce_scatter"
        assert traffic.steps == phases * (1 + steps) - last_is_idle


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 8), (8, 8), (16, 4), (3, 4), (11, 2)])
def test_hierarchical_sends_one_node_a_host_across(hosts: int, local: int) -> None:
    """Hosts of an aligned block each, any number of them: binary blocks of hosts keep the order."""
    topology = Topology.parse(f"{hosts}x{local}", hosts * local)
    schedule = make_schedule("reduce_scatter", "hierarchical", topology)
    for shard in range(schedule.shards):
        across = set()
        for rank, (steps, types) in schedule.lowered(shard).items():
            for step in steps:
                if isinstance(step, Send) and topology.host_of[rank] != topology.host_of[step.to]:
                    assert [types[buffer] for buffer in step.buffers] in (
                        [Type.NODE],
                        [Type.RESULT],
                    )
                    across.add(topology.host_of[rank])
        assert len(across) >= hosts - 1


def test_hierarchical_keeps_to_itself_what_it_can() -> None:
    """Every rank of a host carries its own part across: as many messages from each."""
    traffic = proved("all_reduce", "hierarchical", 16, "4x4")
    assert len(set(traffic.messages)) == 1
    topology = Topology.parse("4x4", 16)
    schedule = make_schedule("all_reduce", "hierarchical", topology)
    across = {
        (step.source, rank)
        for shard in range(16)
        for rank, (steps, _) in schedule.lowered(shard).items()
        for step in steps
        if isinstance(step, Receive) and topology.host_of[step.source] != topology.host_of[rank]
    }
    assert {(a % 4, b % 4) for a, b in across} == {(place, place) for place in range(4)}
