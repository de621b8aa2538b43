"""What a schedule's steps send and add, and the price that the model makes of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective.cli.schedule_messages import messages
from pycollective.planning.tuning_table import ELEMENTS
from pycollective.schedule import ALGORITHMS, Topology, make_schedule
from pycollective.schedule.cost import TYPICAL, Link, Links, counts, price

ALL = [(operation, name) for name, each in ALGORITHMS.items() for operation in each.transfers]
BF16, FP32 = ELEMENTS["bfloat16"], ELEMENTS["float32"]


PLACEMENTS = [
    Topology.parse("1x1", 1),
    Topology.parse("1x7", 7),
    Topology.parse("4x2", 8),
    Topology.parse("13x1", 13),
    Topology.of_hosts([0, 1, 0, 2, 1, 0, 3]),
]


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("topology", PLACEMENTS, ids=str)
def test_counts_are_those_of_all_messages(
    operation: str, algorithm: str, topology: Topology
) -> None:
    schedule = make_schedule(operation, algorithm, topology)
    shards = topology.ranks if schedule.operation.pieces == "pairs" else schedule.shards
    steps = defaultdict(list)
    for (step, source, target), kinds in messages(schedule).items():
        steps[step].append((source, target, kinds @ [1, 2, 1]))
    said = counts(operation, algorithm, topology)
    assert len(said) == len(steps)
    for cost, number in zip(said, sorted(steps), strict=True):
        # Within a host a rank's, one way; across hosts a host's, messages both ways together.
        found: tuple[Counter[object], ...] = Counter(), Counter()
        sizes: tuple[Counter[object], ...] = Counter(), Counter()
        for source, target, size in steps[number]:
            here, there = topology.host_of[source], topology.host_of[target]
            far = here != there
            for way, who in (("out", here if far else source), ("in", there if far else target)):
                found[far]["both" if far else way, who] += 1
                sizes[far][way, who] += size
        for load, far in ((cost.local, False), (cost.across, True)):
            assert load.messages == max(found[far].values(), default=0)
            most = max(sizes[far].values(), default=0) / shards
            assert load.leaves + 2 * load.nodes + load.results == pytest.approx(most)


@given(
    case=st.sampled_from(ALL),
    topology=st.sampled_from(["1x8", "8x1", "2x4", "3,3,2", "1x7"]),
    element=st.sampled_from(list(ELEMENTS.values())),
    sizes=st.lists(st.integers(0, 1 << 40), min_size=2, max_size=2),
)
@settings(deadline=None)
def test_more_bytes_never_cost_less(case, topology, element, sizes) -> None:
    operation, algorithm = case
    ranks = 7 if topology == "1x7" else 8
    where = Topology.parse(topology, ranks)
    less, more = sorted(sizes)
    prices = [price(operation, algorithm, where, size, element, TYPICAL) for size in (less, more)]
    assert prices[0] <= prices[1]
    if more > less:
        assert prices[0] < prices[1]


FREE = Links(Link(0, 0, 0), Link(0, 0, 0), 0)


@pytest.mark.parametrize(
    ("links", "seconds"),
    [
        # An all-reduce by direct, 1,000 bytes of bf16, of 8 ranks on 2 hosts of 4.
        (replace(FREE, local=Link(1, 0, 0)), 0),  # both steps cross hosts
        (replace(FREE, across=Link(1, 0, 0)), 2),
        (replace(FREE, local=Link(0, 1, 0)), 2 * 3),
        (replace(FREE, across=Link(0, 1, 0)), 2 * (4 * 4 + 4 * 4)),
        (replace(FREE, local=Link(0, 0, 1)), 2 * 3 * 1000 / 8),
        (replace(FREE, across=Link(0, 0, 1)), 2 * 4 * 4 * 1000 / 8),
        (replace(FREE, add=1), 7 * 2000 / 8),  # 7 of each shard, in fp32
    ],
)
def test_a_price_by_hand(links: Links, seconds: float) -> None:
    topology = Topology.parse("2x4", 8)
    assert price("all_reduce", "direct", topology, 1000, BF16, links) == pytest.approx(seconds)


def test_nodes_are_priced_in_the_accumulators_type() -> None:
    byte = replace(FREE, local=Link(0, 0, 1))
    topology = Topology.single_host(8)
    prices = [
        price("reduce_scatter", "halving_doubling", topology, 1000, element, byte)
        for element in (FP32, BF16)
    ]
    # Half a buffer of leaves, then three eighths in nodes.
    assert prices == pytest.approx([875, 500 + 2 * 375])
