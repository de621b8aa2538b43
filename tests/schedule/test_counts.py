"""The formulas, and the prices they come to, against what the schedules themselves do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pycollective.order import Node, sibling
from pycollective.planning.elements import ELEMENTS
from pycollective.schedule import ALGORITHMS, Topology, algorithms_for, make_schedule
from pycollective.schedule.cost import TYPICAL, counts, price
from pycollective.schedule.counts import Load, Phase
from pycollective.schedule.proof import verify
from tests.schedule.observed import Busiest, observe
from tests.schedule.placements import BOTH, MORE_RANKS, RANKS, any_placements, blocks

ALL = [(operation, name) for name, each in ALGORITHMS.items() for operation in each.moves]
FEW_OR_NONE = 1e-9


def weight(load: Load, wide: float) -> float:
    return load.leaves + load.nodes * wide + load.results


def counted(phase: Phase, wide: float) -> Busiest:
    return Busiest(
        phase.steps,
        phase.local.messages,
        phase.across.messages,
        weight(phase.local, wide),
        weight(phase.across, wide),
        phase.adds,
    )


def pairs(
    operation: str, algorithm: str, topology: Topology, wide: float
) -> Iterator[tuple[Busiest, Busiest]]:
    """What a schedule does in each phase, and what the formula says."""
    seen = observe(operation, algorithm, topology)
    first = 0
    for phase in counts(operation, algorithm, topology):
        yield seen.busiest(first, phase.steps, wide), counted(phase, wide)
        first += phase.steps
    assert first == len(seen.steps), (operation, algorithm, topology)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_formula_for_all_that_it_can_do(algorithm: str) -> None:
    assert ALGORITHMS[algorithm].counts.keys() == ALGORITHMS[algorithm].moves.keys()


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
def test_what_is_observed_is_what_the_proof_counts(operation: str, algorithm: str) -> None:
    for topology in (Topology.parse("4x2", 8), Topology.of_hosts([0, 1, 0, 2, 1, 0, 3])):
        traffic = verify(make_schedule(operation, algorithm, topology))
        seen = observe(operation, algorithm, topology)
        for rank in range(topology.ranks):
            mine = [
                buffers
                for step in seen.steps
                for (source, _), buffers in step.sent.items()
                if source == rank
            ]
            assert len(mine) == traffic.messages[rank]
            kinds = [sum(kind) for kind in zip(*mine, strict=True)] or [0, 0, 0]
            assert kinds == [traffic.leaves[rank], traffic.nodes[rank], traffic.results[rank]]
            assert sum(step.adds[rank] for step in seen.steps) == traffic.adds[rank]


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, pytest.param(64, marks=pytest.mark.storm)])
def test_formulas_are_exact_for_powers_of_two_in_blocks(
    operation: str, algorithm: str, ranks: int
) -> None:
    for topology in blocks(ranks):
        for wide in (1, 2):
            for seen, said in pairs(operation, algorithm, topology, wide):
                assert vars(said) == pytest.approx(vars(seen), abs=FEW_OR_NONE), topology


@pytest.mark.parametrize(
    "ranks", [*RANKS, *(pytest.param(n, marks=pytest.mark.storm) for n in MORE_RANKS)]
)
def test_on_one_host_formulas_are_exact_for_any_number_of_ranks(ranks: int) -> None:
    """But for halving-doubling, whose ranks hold unequal numbers of shards."""
    for operation, algorithm in ALL:
        if algorithm != "halving_doubling" and operation != "all_to_all":
            for wide in (1, 2):
                for seen, said in pairs(operation, algorithm, Topology.single_host(ranks), wide):
                    assert vars(said) == pytest.approx(vars(seen), abs=FEW_OR_NONE), algorithm


def total(of: list[Busiest], what: str) -> float:
    return sum(getattr(each, what) for each in of)


# How far a formula's sum over all phases may lie from what a schedule does, for up to 33 ranks in
# any placement. Where it is far off it counts little: the one rank of a second host, or messages of
# ranks on a host much smaller than the others.
WITHIN = {
    "direct": {},
    "ring": {"local": (0.9, 1), "across": (0.8, 1)},
    "tree": {"local": (1, 2), "across": (1, 11)},
    "halving_doubling": {"across_messages": (0.75, 1), "local": (0.75, 1.3), "across": (0.8, 1.8)},
    "recursive_doubling": {"local": (1, 1.1), "across": (1, 1.12)},
    "hierarchical": {"across_messages": (1, 2), "across": (0.66, 1.34), "adds": (0.97, 2.4)},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("numbers", BOTH, ids=["few", "more"])
def test_formulas_elsewhere_are_as_near_as_is_said(algorithm: str, numbers: list[int]) -> None:
    for ranks in numbers:
        for topology in any_placements(ranks):
            for operation in ALGORITHMS[algorithm].moves:
                if operation == "all_to_all" and ranks > 16:
                    continue
                for wide in (1, 2):
                    both = list(pairs(operation, algorithm, topology, wide))
                    seen, said = [one for one, _ in both], [other for _, other in both]
                    for what in vars(Busiest(0, 0, 0, 0, 0, 0)):
                        low, high = WITHIN[algorithm].get(what, (1, 1))
                        is_, says = total(seen, what), total(said, what)
                        where = operation, topology, wide, what, is_, says
                        assert low * is_ - FEW_OR_NONE <= says, where
                        assert says <= high * is_ + FEW_OR_NONE, where


def observed_prices(
    operation: str, algorithm: str, topology: Topology, sizes: Sequence[int], wide: float
) -> list[float]:
    """The prices of what a schedule does, each step by its busiest; a ring's in one."""
    seconds = [0.0] * len(sizes)
    for now, _ in pairs(operation, algorithm, topology, wide):
        link = TYPICAL.across if now.across_messages else TYPICAL.local
        start = now.steps * link.latency + now.local_messages * TYPICAL.local.message
        start += now.across_messages * TYPICAL.across.message
        byte = now.local * TYPICAL.local.byte + now.across * TYPICAL.across.byte
        byte += now.adds * wide * TYPICAL.add
        seconds = [each + start + size * byte for each, size in zip(seconds, sizes, strict=True)]
    return seconds


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("numbers", BOTH, ids=["few", "more"])
def test_prices_are_within_an_eighth_below_and_a_half_above(
    algorithm: str, numbers: list[int]
) -> None:
    sizes = 1 << 10, 1 << 17, 1 << 26
    for ranks in filter(lambda ranks: ranks > 1, numbers):
        for topology in any_placements(ranks):
            for operation in ("all_reduce", "reduce_scatter", "all_gather"):
                if algorithm not in algorithms_for(operation):
                    continue
                observed = observed_prices(operation, algorithm, topology, sizes, 2)
                for size, is_ in zip(sizes, observed, strict=True):
                    says = price(
                        operation, algorithm, topology, size, ELEMENTS["bfloat16"], TYPICAL
                    )
                    assert 0.875 * is_ < says < 1.5 * is_, (operation, topology, size, is_, says)


def handed_on_by(circle: Sequence[int], place: int) -> tuple[int, int]:
    """Leaves and nodes of the partials of 1 to n - 1 ranks that end at a place, made one by one."""
    n, leaves, nodes = len(circle), 0, 0
    held: set[Node] = set()
    for back in range(n - 1):
        new = circle[place - back], circle[place - back] + 1
        while (other := sibling(new, n)) in held:
            held.remove(other)
            new = min(new, other)[0], max(new, other)[1]
        held.add(new)
        alone = sum(hi - lo == 1 for lo, hi in held)
        leaves, nodes = leaves + alone, nodes + len(held) - alone
    return leaves, nodes


@pytest.mark.parametrize("ranks", [65, 96, 100, 128, pytest.param(256, marks=pytest.mark.storm)])
@pytest.mark.parametrize("hosts", ["one", "blocks", "in turn"])
def test_a_ring_of_many_finds_its_busiest_rank(ranks: int, hosts: str) -> None:
    size = {"one": ranks, "blocks": 8, "in turn": 0}[hosts]
    topology = Topology.of_hosts([rank // size if size else rank % 10 for rank in range(ranks)])
    (phase,) = counts("reduce_scatter", "ring", topology)
    circle = [rank for host in topology.hosts for rank in host]
    sent = [sum(handed_on_by(circle, place)) for place in range(ranks)]
    host_of = [topology.host_of[rank] for rank in circle]
    near = [host_of[at] == host_of[(at + 1) % ranks] for at in range(ranks)]
    most = {
        way: max((sent[at] / ranks for at in range(ranks) if near[at] == way), default=0)
        for way in (True, False)
    }
    assert phase.local.buffers == pytest.approx(most[True], abs=FEW_OR_NONE)
    assert phase.across.buffers == pytest.approx(most[False], abs=FEW_OR_NONE)
    adds = max(sent[at - 1] - sent[at] for at in range(ranks)) + ranks - 1
    assert phase.adds == adds / ranks


@pytest.mark.parametrize("root", [1, 5, 7])
@pytest.mark.parametrize(("operation", "algorithm"), ALL)
def test_on_one_host_another_root_costs_as_much(operation: str, algorithm: str, root: int) -> None:
    """But for a reduce by tree, which goes to rank 0 first: one step more."""
    topology = Topology.single_host(8)
    first, other = (
        observe(operation, algorithm, topology, each).busiest(0, 99, 1) for each in (0, root)
    )
    if (operation, algorithm) == ("reduce", "tree"):
        assert other.steps == first.steps + 1
    else:
        assert vars(other) == vars(first)
