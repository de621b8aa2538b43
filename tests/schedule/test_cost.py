"""What the model makes of the formulas' counts: the price. (Against what schedules do:
`test_counts.py`.)"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import ConfigurationError
from pycollective.planning.elements import ELEMENTS
from pycollective.schedule import ALGORITHMS, Topology
from pycollective.schedule.cost import TYPICAL, Link, Links, price

ALL = [(operation, name) for name, each in ALGORITHMS.items() for operation in each.moves]
BF16, FP32 = ELEMENTS["bfloat16"], ELEMENTS["float32"]


MANY = 20_000
LARGE: dict[str, Callable[[], Topology]] = {
    "one host": lambda: Topology.single_host(MANY),
    "blocks of 8": lambda: Topology.parse(f"{MANY // 8}x8", MANY),
    "a rank a host": lambda: Topology.parse(f"{MANY}x1", MANY),
    "uneven": lambda: Topology.of_hosts([i // 3 if i < MANY // 2 else -1 for i in range(MANY)]),
    "in turn": lambda: Topology.of_hosts([i % (MANY // 8) for i in range(MANY)]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", LARGE)
def test_twenty_thousand_ranks_are_priced_at_once(algorithm: str, placement: str) -> None:
    topology = LARGE[placement]()
    begin = time.process_time()
    seconds = price("all_reduce", algorithm, topology, 1 << 26, BF16, TYPICAL)
    took = time.process_time() - begin
    assert seconds > 0
    assert took < 2, f"{took:.1f} s"  # below 0.2 s on the machine this was written on


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


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
def test_alone_nothing_costs(operation: str, algorithm: str) -> None:
    assert price(operation, algorithm, Topology.single_host(1), 1 << 30, BF16, TYPICAL) == 0


@pytest.mark.parametrize(
    ("operation", "algorithm", "size", "says"),
    [
        ("all_reduce", "direct", -1, "-1 bytes"),
        ("all_reduce", "rings", 1, "unknown algorithm 'rings'"),
        ("all_to_all", "ring", 1, "there are direct"),
        ("all_reduced", "ring", 1, "no schedules for 'all_reduced'"),
    ],
)
def test_what_cannot_be_priced(operation: str, algorithm: str, size: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        price(operation, algorithm, Topology.single_host(2), size, BF16, TYPICAL)
