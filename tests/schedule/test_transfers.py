"""What each rank works out for itself fits what all others do; and the workspace."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pycollective.order import parent, sibling
from pycollective.schedule import (
    ALGORITHMS,
    OPERATIONS,
    Schedule,
    ScheduleError,
    Topology,
    algorithms_for,
    make_schedule,
)
from pycollective.schedule.layout import Layout, Workspace, lay_out, needed, workspace
from pycollective.schedule.lower import lower, nodes_of
from pycollective.schedule.plan import make_plan
from pycollective.schedule.proof import check_shard
from pycollective.schedule.transfer import Transfer, merged, ranges_of

STORM = pytest.mark.storm
KINDS = [(op, name) for op in OPERATIONS for name in algorithms_for(op)]
LARGE = {
    "64x64": Topology.parse("64x64", 4096),
    "16x64": Topology.parse("16x64", 1024),
    "uneven": Topology.parse("100,300,7,593", 1000),
    "dealt out": Topology.of_hosts([rank % 16 for rank in range(1000)]),
}


def roots(operation: str, n: int) -> list[int]:
    return sorted({0, 1 % n, n // 2, n - 1}) if OPERATIONS[operation].rooted else [0]


def any_placements(ranks: int) -> Iterator[Topology]:
    """All on one host, blocks, blocks and a rest, dealt out in turn, uneven, scattered."""
    yield Topology.single_host(ranks)
    few = ranks <= 17
    for size in (1, 3, 4, 7) if few else (3, 4):
        if size < ranks:
            yield Topology.of_hosts([rank // size for rank in range(ranks)])
    for hosts in (2, 3, 10) if few else (10,):
        if hosts < ranks:
            yield Topology.of_hosts([rank % hosts for rank in range(ranks)])
    if ranks > 2:
        yield Topology.of_hosts([0] * (ranks - 1) + [1])
        yield Topology.of_hosts([rank * rank % 5 for rank in range(ranks)])
    if ranks > 2 and few:
        yield Topology.of_hosts([0] * (ranks // 4) + [1] * (ranks - ranks // 4))


def placements(n: int) -> Iterator[Topology]:
    yield from any_placements(n)
    turns = random.Random(n)
    for hosts in (2, 3, 9, 12) if n > 2 else ():
        yield Topology.of_hosts([turns.randrange(hosts) for _ in range(n)])


def schedules(operation: str, name: str, n: int) -> Iterator[Schedule]:
    for topology in placements(n):
        for root in roots(operation, n):
            yield make_schedule(operation, name, topology, root)


def check(schedule: Schedule) -> dict[int, Layout]:
    """Every shard, and the workspace; the layouts of all ranks."""
    ranks = range(schedule.topology.ranks)
    for shard in range(schedule.shards):
        prove(schedule, shard)
    layouts = {rank: lay_out(schedule, rank) for rank in ranks}
    assert workspace(schedule) == needed(layouts.values()), schedule
    return layouts


def prove(schedule: Schedule, shard: int) -> None:
    lowered = schedule.lowered(shard)
    check_shard(schedule.operation, shard, schedule.topology.ranks, schedule.root, lowered)


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize("n", [*range(1, 9), 11])
def test_what_each_rank_lowers_alone_fits(operation: str, name: str, n: int) -> None:
    for schedule in schedules(operation, name, n):
        check(schedule)


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize("n", [pytest.param(16, marks=STORM), 17])
def test_the_same_on_more_ranks(operation: str, name: str, n: int) -> None:
    if OPERATIONS[operation].pieces == "pairs":  # n * n shards
        n -= 7
    for topology in placements(n):
        check(make_schedule(operation, name, topology, n // 3))


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize("n", [4, 5, pytest.param(8, marks=STORM)])
def test_plans_are_those_of_the_whole(operation: str, name: str, n: int) -> None:
    """Also where each rank works out for itself what its neighbours send it."""
    for schedule in schedules(operation, name, n):
        layouts = check(schedule)
        for rank in range(n):
            plan = make_plan(schedule, rank)
            assert plan == make_plan(schedule, rank, layouts)
            assert plan == make_plan(schedule, rank, {})  # as it is made for many ranks
            assert plan.rank == rank
            assert plan.member == schedule.topology.local_index[rank]
            assert plan.peers == sorted({rank for rank, _, _, _ in plan.messages})


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize(
    "n", [65, *(pytest.param(n, marks=STORM) for n in (72, 96, 100, 128, 129, 192, 256))]
)
def test_beyond_64_ranks_the_workspace_is_enough(operation: str, name: str, n: int) -> None:
    """What the rule sets aside, against the count of all ranks."""
    if OPERATIONS[operation].pieces == "pairs" and n > 72:  # n * n shards
        pytest.skip("minutes")
    turns = random.Random(f"{operation} {name} {n}")
    equal = blocks_of(turns.choice([size for size in range(1, n) if n % size == 0]))
    for topology in [equal, *turns.sample(MANY_ON_SEVERAL_HOSTS, 1)]:
        root = turns.randrange(n) if OPERATIONS[operation].rooted else 0
        schedule = make_schedule(operation, name, topology(n), root)
        set_aside, need = workspace(schedule), needed(lay_out(schedule, r) for r in range(n))
        assert all(map(int.__ge__, set_aside, need)), (schedule, set_aside, need)
        if n & (n - 1) == 0 and topology in EQUAL_BLOCKS:
            most = Workspace(*(each + -(-each // 16) for each in need[:2]), need.steps)
            assert all(map(int.__le__, set_aside, most)), (schedule, set_aside, need)


@pytest.mark.parametrize(
    ("operation", "name", "hosts", "root"),
    [
        ("reduce", "tree", "7,8,8,8,8,8,8,8,8,6", 41),
        ("reduce_scatter", "hierarchical", "33,8,8,8,8,1", 0),
    ],
)
def test_among_uneven_hosts_every_rank_counts(
    operation: str, name: str, hosts: str, root: int
) -> None:
    """The neediest rank is on a host that is neither the largest nor the smallest."""
    n = sum(map(int, hosts.split(",")))
    schedule = make_schedule(operation, name, Topology.parse(hosts, n), root)
    assert workspace(schedule) == needed(lay_out(schedule, rank) for rank in range(n))


def blocks_of(size: int) -> Callable[[int], Topology]:
    return lambda n: Topology.of_hosts([rank // size for rank in range(n)])


def in_turn(hosts: int) -> Callable[[int], Topology]:
    return lambda n: Topology.of_hosts([rank % hosts for rank in range(n)])


def at_random(hosts: int) -> Callable[[int], Topology]:
    return lambda n: Topology.of_hosts(random.Random(n).choices(range(hosts), k=n))


EQUAL_BLOCKS = [blocks_of(size) for size in (1, 2, 4, 8, 16, 32, 64)]
MANY_ON_SEVERAL_HOSTS = [
    *EQUAL_BLOCKS,
    *(blocks_of(size) for size in (3, 6, 12, 25)),
    *(in_turn(hosts) for hosts in (2, 3, 8, 10)),
    *(at_random(hosts) for hosts in (3, 12)),
    lambda n: Topology.parse(f"{n - 9},1,8", n),
    lambda n: Topology.parse(f"1,{n - 30},7,22", n),
]


def on_large() -> list[Any]:
    """Every operation by every algorithm on a large topology, in turns; the rest: `make storm`."""
    found = []
    for place, (operation, name) in enumerate(KINDS):
        first = place + list(OPERATIONS).index(operation)
        for turn, (label, topology) in enumerate(LARGE.items()):
            usual = (first + turn) % len(LARGE) == 0 or (name, label) == ("hierarchical", "uneven")
            slow = (name, label) in (("ring", "dealt out"), ("direct", "64x64"))
            marks = [] if usual and not slow else [STORM]
            case = f"{operation}-{name}-{label}"
            found.append(pytest.param(operation, name, topology, id=case, marks=marks))
    return found


@pytest.mark.parametrize(("operation", "name", "topology"), on_large())
def test_some_shards_of_many_ranks(operation: str, name: str, topology: Topology) -> None:
    n = topology.ranks
    turns = random.Random(n)
    for root in (0, n // 3) if OPERATIONS[operation].rooted else (0,):
        schedule = make_schedule(operation, name, topology, root)
        for shard in {0, schedule.shards - 1, turns.randrange(schedule.shards)}:
            prove(schedule, shard)


@pytest.mark.parametrize(
    ("operation", "name"),
    [pytest.param(*kind, marks=() if kind[0] == "all_reduce" else STORM) for kind in KINDS],
)
def test_a_rank_never_looks_at_all(
    operation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it looks at grows as n log n, times the ranks of its host, and has no square in it."""
    looked_at = 0
    of_each: list[int] = []

    def counting(transfers: Callable[..., list[Transfer]]) -> Callable[..., list[Transfer]]:
        def counted(*arguments: object) -> list[Transfer]:
            nonlocal looked_at
            found = transfers(*arguments)
            looked_at += 1 + sum(1 + len(each.leaves or ()) for each in found)
            return found

        return counted

    algorithm = ALGORITHMS[name]
    spied = {each: counting(transfers) for each, transfers in algorithm.transfers.items()}
    monkeypatch.setattr(Schedule, "lowered", None)
    for topology in (Topology.parse("32x4", 128), Topology.parse("64x4", 256)):
        n = topology.ranks
        looked_at = 0
        schedule = make_schedule(operation, name, topology)
        spying = dataclasses.replace(
            schedule, algorithm=dataclasses.replace(algorithm, transfers=spied)
        )
        assert make_plan(spying, n // 2) == make_plan(schedule, n // 2)
        # Four ranks of its host, and for the workspace two for each bit of the number of ranks.
        assert looked_at < 8 * n * n.bit_length() * (4 + 2 * n.bit_length())
        of_each.append(looked_at)
    assert of_each[1] < 3 * of_each[0]  # of twice the ranks; a square would come to 4


@pytest.mark.parametrize(
    ("transfers", "says"),
    [
        ([Transfer(0, 2, 0, ((2, 3),)), Transfer(1, 3, 0, ((2, 3),))], "second time"),
        ([Transfer(0, 1, 0, ((1, 2),)), Transfer(1, 0, 2, ((0, 1),))], "carries other leaves"),
        ([Transfer(0, 0, 1, None)], "carries other leaves"),
        ([Transfer(0, 1, 0, None), Transfer(1, 2, 0, None)], "result a second time"),
        ([Transfer(0, 1, 0, None), Transfer(1, 0, 2, ((0, 1),))], "carries other leaves"),
    ],
)
def test_transfers_that_make_no_sense(transfers: list[Transfer], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        lower(OPERATIONS["all_reduce"], 0, 4, 0, 0, transfers)


def test_ranges() -> None:
    assert merged([]) == ()
    assert merged([(4, 6), (0, 2), (2, 4), (7, 8)]) == ((0, 6), (7, 8))
    assert ranges_of([5, 3, 4, 9]) == ((3, 6), (9, 10))


@pytest.mark.parametrize("n", range(2, 20))
def test_a_partial_is_what_combining_leaves_comes_to(n: int) -> None:
    turns = random.Random(n)
    for _ in range(30):
        leaves = turns.sample(range(n), turns.randrange(1, n))
        partial: set[tuple[int, int]] = set()
        for leaf in leaves:
            node = leaf, leaf + 1
            while (other := sibling(node, n)) in partial:
                partial.remove(other)
                node = parent(node, n)
            partial.add(node)
        assert nodes_of(ranges_of(leaves), n) == sorted(partial)
