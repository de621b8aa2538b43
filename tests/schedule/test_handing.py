"""One rank's steps, found without looking at the others', against the lowering of all ranks."""

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
from pycollective.schedule.algorithms.base import Algorithm, Room
from pycollective.schedule.assemble import assemble
from pycollective.schedule.handing import Handing, lower_rank, merged, nodes_of, ranges_of
from pycollective.schedule.layout import Layout, counted, lay_out, lay_out_all, room
from pycollective.schedule.steps import RankSteps
from tests.schedule.placements import any_placements

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


def placements(n: int) -> Iterator[Topology]:
    yield from any_placements(n)
    turns = random.Random(n)
    for hosts in (2, 3, 9, 12) if n > 2 else ():
        yield Topology.of_hosts([turns.randrange(hosts) for _ in range(n)])


def schedules(operation: str, name: str, n: int) -> Iterator[Schedule]:
    for topology in placements(n):
        for root in roots(operation, n):
            yield make_schedule(operation, name, topology, root)


def lowered_whole(schedule: Schedule) -> list[dict[int, RankSteps]]:
    """By rank and shard, from all moves of all shards."""
    found: list[dict[int, RankSteps]] = [{} for _ in range(schedule.topology.ranks)]
    for shard in range(schedule.shards):
        for rank, steps in schedule.lowered(shard).items():
            found[rank][shard] = steps
    return found


def check(schedule: Schedule) -> dict[int, Layout]:
    """Every rank's steps, and the room for all; the layouts that the whole comes to."""
    whole = lowered_whole(schedule)
    for rank, own in enumerate(whole):
        assert dict(schedule.lowered_for(rank)) == own, (schedule, rank)
    layouts = {rank: lay_out(schedule, rank, own.items()) for rank, own in enumerate(whole)}
    assert room(schedule) == counted(layouts.values()), schedule
    return layouts


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize("n", [*range(1, 9), 11])
def test_each_ranks_steps_and_the_room_are_those_of_the_whole(
    operation: str, name: str, n: int
) -> None:
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
def test_programs_are_those_of_the_whole(operation: str, name: str, n: int) -> None:
    """Also where each rank works out for itself what its neighbours hand it."""
    for schedule in schedules(operation, name, n):
        layouts = check(schedule)
        assert lay_out_all(schedule) == layouts
        for rank in range(n):
            program = assemble(schedule, rank)
            assert program == assemble(schedule, rank, layouts)
            assert program == assemble(schedule, rank, {})  # as it is made for many ranks
            assert program.rank == rank
            assert program.member == schedule.topology.local_index[rank]
            assert program.far == sorted({rank for rank, _, _, _ in program.messages})


@pytest.mark.parametrize(("operation", "name"), KINDS)
@pytest.mark.parametrize("n", [29, pytest.param(48, marks=STORM)])
def test_the_room_of_many(operation: str, name: str, n: int) -> None:
    """Against each rank's own layout; test_each_ranks_steps... shows that these are right."""
    turns = random.Random(n)
    for topology in (
        Topology.parse(f"1x{n}", n),
        Topology.of_hosts([rank // 4 for rank in range(n)]),
        Topology.of_hosts([rank // 6 for rank in range(n)]),
        Topology.of_hosts([rank % 10 for rank in range(n)]),
        Topology.of_hosts([turns.randrange(12) for _ in range(n)]),
    ):
        schedule = make_schedule(operation, name, topology, n // 3)
        assert room(schedule) == counted(lay_out(schedule, rank) for rank in range(n)), schedule


def on_large() -> list[Any]:
    """Every operation by every algorithm on a large topology, in turns; the rest: `make storm`."""
    found = []
    for place, (operation, name) in enumerate(KINDS):
        first = place + list(OPERATIONS).index(operation)
        for turn, (label, topology) in enumerate(LARGE.items()):
            usual = (first + turn) % len(LARGE) == 0 or (name, label) == ("hierarchical", "uneven")
            marks = [] if usual else [STORM]
            case = f"{operation}-{name}-{label}"
            found.append(pytest.param(operation, name, topology, id=case, marks=marks))
    return found


@pytest.mark.parametrize(("operation", "name", "topology"), on_large())
def test_some_shards_and_ranks_of_many(operation: str, name: str, topology: Topology) -> None:
    n = topology.ranks
    turns = random.Random(n)
    for root in (0, n // 3) if OPERATIONS[operation].rooted else (0,):
        schedule = make_schedule(operation, name, topology, root)
        shards = {0, schedule.shards - 1, turns.randrange(schedule.shards)}
        for shard in shards:
            lowered = schedule.lowered(shard)
            owner, pair = shard % n, shard // n
            for rank in {0, root, owner, pair, n - 1, *turns.sample(range(n), 12)}:
                assert lowered_for(schedule, shard, rank) == lowered.get(rank), (shard, rank)


def lowered_for(schedule: Schedule, shard: int, rank: int) -> RankSteps | None:
    operation, topology, root = schedule.operation, schedule.topology, schedule.root
    handings = schedule.algorithm.handings[operation.name](topology, shard, root, rank)
    return lower_rank(operation, shard, topology.ranks, root, rank, handings)


@pytest.mark.parametrize(("operation", "name"), KINDS)
def test_a_rank_never_looks_at_all(
    operation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it looks at grows as n log n, times the ranks of its host, and has no square in it."""
    looked_at = 0
    of_each: list[int] = []

    def counting(handings: Callable[..., list[Handing]]) -> Callable[..., list[Handing]]:
        def counted(*arguments: object) -> list[Handing]:
            nonlocal looked_at
            found = handings(*arguments)
            looked_at += 1 + sum(1 + len(each.leaves or ()) for each in found)
            return found

        return counted

    algorithm = ALGORITHMS[name]
    spied = {each: counting(handings) for each, handings in algorithm.handings.items()}
    monkeypatch.setattr(Schedule, "lowered", None)
    monkeypatch.setattr(Schedule, "moves", None)
    for topology in (Topology.parse("32x4", 128), Topology.parse("128x4", 512)):
        n = topology.ranks
        looked_at = 0
        schedule = make_schedule(operation, name, topology)
        spying = dataclasses.replace(
            schedule, algorithm=dataclasses.replace(algorithm, handings=spied)
        )
        assert assemble(spying, n // 2) == assemble(schedule, n // 2)
        # Four ranks a host; where there is one shard, each rank once for the room.
        assert looked_at < 8 * n * n.bit_length() * (3 if schedule.shards == 1 else 4)
        of_each.append(looked_at)
    assert of_each[1] < 8 * of_each[0]  # of four times the ranks; a square would come to 16


def spoiled(
    schedule: Schedule, spoil: Callable[[Handing], Handing | None]
) -> Iterator[tuple[int, RankSteps | None]]:
    """Each rank's steps of the middle shard, from handings that are not what they were."""
    operation, topology, root = schedule.operation, schedule.topology, schedule.root
    shard = schedule.shards // 2
    for rank in range(topology.ranks):
        handings = schedule.algorithm.handings[operation.name](topology, shard, root, rank)
        wrong = [each for each in map(spoil, handings) if each is not None]
        yield rank, lower_rank(operation, shard, topology.ranks, root, rank, wrong)


def one_more(each: Handing) -> Handing:
    """As if the last range went one further."""
    if each.leaves is None:
        return each
    *rest, (lo, hi) = each.leaves
    return each._replace(leaves=(*rest, (lo, hi + 1)))


def one_less(each: Handing) -> Handing | None:
    """As if the first range began one later."""
    if each.leaves is None:
        return each
    (lo, hi), *rest = each.leaves
    left = ((lo + 1, hi), *rest) if hi - lo > 1 else tuple(rest)
    return each._replace(leaves=left) if left else None


def elsewhere(each: Handing) -> Handing:
    """As many leaves, but the next ones: no number tells."""
    if each.leaves is None:
        return each
    return each._replace(leaves=tuple((lo + 1, hi + 1) for lo, hi in each.leaves))


@pytest.mark.parametrize("spoil", [one_more, one_less, elsewhere])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_wrong_leaves_are_found(name: str, spoil: Callable[[Handing], Handing | None]) -> None:
    schedule = make_schedule("all_reduce", name, Topology.parse("3x4", 12))
    right = schedule.lowered(schedule.shards // 2)
    found = 0
    try:
        found = sum(steps != right.get(rank) for rank, steps in spoiled(schedule, spoil))
    except (ScheduleError, KeyError):  # KeyError: no such node
        found = 1
    assert found


def test_wrong_room_is_found() -> None:
    schedule = make_schedule("all_reduce", "ring", Topology.parse("2x4", 8))

    def one_too_few(topology: Topology, root: int) -> Room:
        right = schedule.algorithm.room["all_reduce"](topology, root)
        return right._replace(nodes=right.nodes - 1)

    wrong: Algorithm = dataclasses.replace(schedule.algorithm, room={"all_reduce": one_too_few})
    with pytest.raises(AssertionError):
        check(dataclasses.replace(schedule, algorithm=wrong))


@pytest.mark.parametrize(
    ("handings", "says"),
    [
        ([Handing(0, 2, 0, ((2, 3),)), Handing(1, 3, 0, ((2, 3),))], "second time"),
        ([Handing(0, 1, 0, ((1, 2),)), Handing(1, 0, 2, ((0, 1),))], "carries other leaves"),
        ([Handing(0, 0, 1, None)], "carries other leaves"),
        ([Handing(0, 1, 0, None), Handing(1, 2, 0, None)], "result a second time"),
        ([Handing(0, 1, 0, None), Handing(1, 0, 2, ((0, 1),))], "carries other leaves"),
    ],
)
def test_handings_that_make_no_sense(handings: list[Handing], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        lower_rank(OPERATIONS["all_reduce"], 0, 4, 0, 0, handings)


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
