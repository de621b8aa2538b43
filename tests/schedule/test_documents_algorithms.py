"""What algorithms.md says in numbers and formulas, against what proved schedules send."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pycollective.cli.schedule_messages import messages
from pycollective.schedule import ALGORITHMS, Topology, algorithms_for, make_schedule
from pycollective.schedule.algorithms.hierarchical import FEW_HOSTS
from tests.schedule.proved import Proved

PAGE = (Path(__file__).parents[2] / "docs" / "inside" / "algorithms.md").read_text()
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
TYPES = {"fp32": (4, 4), "bf16": (2, 4), "fp64": (8, 8)}


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, without the two lines of its head.

    An empty first cell stands for the one above it.
    """
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for above, row in pairwise(rows):
        row[0] = row[0] or above[0]
    return rows


def value(formula: str, **variables: float) -> float:
    """A formula of the page, with these values."""
    assert re.fullmatch(r"`[\w\s·/+()-]+`", formula), formula
    expression = formula.strip("`").replace("·", "*")
    # It comes from our own page, and can name nothing but its variables.
    return float(eval(expression, {"__builtins__": {}, "log2": math.log2}, variables))


@cache
def proved(operation: str, algorithm: str, topology: Topology) -> Proved:
    return Proved(make_schedule(operation, algorithm, topology))


def sent(traffic: Proved, algorithm: str, element: int, accumulator: int) -> float:
    """By the busiest rank, or by a ring's ranks on average."""
    each = traffic.bytes_sent(element, accumulator)
    return sum(each) / len(each) if algorithm == "ring" else max(each)


@cache
def sent_across(operation: str, algorithm: str, topology: Topology) -> NDArray[np.float64]:
    """What each host sends to others, by kind as in `KINDS`, as multiples of the whole buffer."""
    schedule = make_schedule(operation, algorithm, topology)
    sent = np.zeros((len(topology.hosts), 3))
    for (_, source, target), kinds in messages(schedule).items():
        here, there = topology.host_of[source], topology.host_of[target]
        sent[here] += kinds * (here != there)
    return sent / schedule.shards


def powers(first: int, last: int) -> list[int]:
    return [1 << power for power in range(20) if first <= 1 << power <= last]


def cases(label: str) -> Iterator[tuple[str, Topology, dict[str, float]]]:
    """Algorithm, topology and variables for which a row of the first table holds."""
    name, _, hosts = label.partition(", ")
    if name != "hierarchical":
        assert not hosts
        for n in powers(4, 64):
            yield name, Topology.single_host(n), {"n": n}
        return
    most = {f"up to {FEW_HOSTS} hosts": range(2, FEW_HOSTS + 1), "more hosts": range(9, 33)}[hosts]
    for n in powers(4, 64):
        for h in powers(2, n // 2):
            if h in most:
                yield name, Topology.parse(f"{h}x{n // h}", n), {"n": n, "h": h, "p": n // h}


FIRST = table("| Algorithm | Operation | Steps")
NUMBERS = table("| Algorithm | 8 ranks: fp32")
LINKS = table("| Algorithm | all_reduce | reduce_scatter")


@pytest.mark.parametrize("row", FIRST, ids=lambda row: " ".join(row[:2]))
def test_steps_messages_and_bytes(row: list[str]) -> None:
    label, operation, steps, messages, size = row
    tried = 0
    for name, topology, variables in cases(label):
        traffic = proved(operation, name, topology)
        assert value(steps, **variables) == traffic.steps, topology
        assert value(messages, **variables) == max(traffic.messages), topology
        for element, accumulator in TYPES.values():
            said = value(size, s=element, a=accumulator, **variables)
            is_ = sent(traffic, name, element, accumulator)
            assert said == pytest.approx(is_, rel=1e-12), topology
        tried += 1
    assert tried >= 3


def test_every_algorithm_and_operation_has_a_row() -> None:
    rows = {(label.partition(",")[0], operation) for label, operation, *_ in FIRST}
    assert rows == {
        (name, operation)
        for name in ALGORITHMS
        for operation in OPERATIONS
        if name in algorithms_for(operation)
    }
    assert [row[0] for row in LINKS] == list(ALGORITHMS)
    assert [row[0].partition(" ")[0] for row in NUMBERS] == list(ALGORITHMS)
    for name in ALGORITHMS:
        assert PAGE.count(f"\n**{name}.**") == 1


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row[0])
def test_bytes_as_numbers(row: list[str]) -> None:
    name = row[0].partition(" ")[0]
    hosts = ("2x4", "8x8") if name == "hierarchical" else ("1x8", "1x64")
    numbers = iter(row[1:])
    for topology, ranks in zip(hosts, (8, 64), strict=True):
        traffic = proved("all_reduce", name, Topology.parse(topology, ranks))
        for element, accumulator in TYPES.values():
            assert next(numbers) == f"{sent(traffic, name, element, accumulator):.2f}"
    assert next(numbers, None) is None


@pytest.mark.parametrize("row", LINKS, ids=lambda row: row[0])
@pytest.mark.parametrize("column", [1, 2, 3], ids=OPERATIONS)
# Those of 64 ranks take three quarters of the time.
@pytest.mark.parametrize(
    "numbers", [powers(4, 32), pytest.param([64], marks=pytest.mark.storm)], ids=["few", "more"]
)
def test_bytes_between_hosts(row: list[str], column: int, numbers: list[int]) -> None:
    name, operation = row[0], OPERATIONS[column - 1]
    if operation not in algorithms_for(operation) and not row[column]:
        assert name not in algorithms_for(operation)
        return
    for n in numbers:
        for h in powers(2, n // 2):
            topology = Topology.parse(f"{h}x{n // h}", n)
            for element, accumulator in TYPES.values():
                each = sent_across(operation, name, topology) @ [element, accumulator, element]
                is_ = each.mean() if name == "ring" else each.max()
                said = value(row[column], s=element, a=accumulator, n=n, h=h, p=n // h)
                assert said == pytest.approx(is_, rel=1e-12), topology


def test_the_largest_partial_of_a_ring() -> None:
    assert "up to `2·(log2(n) - 1)` nodes" in PAGE
    for n in powers(4, 64):
        sent = messages(make_schedule("reduce_scatter", "ring", Topology.single_host(n)))
        assert max(kinds.sum() for kinds in sent.values()) == 2 * (math.log2(n) - 1)


def test_the_example_says_what_it_returns() -> None:
    (example,) = re.findall(r"```python\n(from pycollective.schedule.*?)```", PAGE, re.S)
    *before, last = example.strip().splitlines()
    call, _, said = last.partition("  # ")
    names: dict[str, object] = {}
    exec("\n".join(before), names)
    assert eval(call, names) == said.strip('"')
