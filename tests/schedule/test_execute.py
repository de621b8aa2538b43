"""The steps, executed as they are meant, give the contract's bits."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import reference
from pycollective.schedule import (
    OPERATIONS,
    Schedule,
    Topology,
    algorithms_for,
    make_schedule,
)
from tests.inputs import awkward, order_sensitive, same_bits
from tests.schedule.execute import Stuck, execute
from tests.schedule.mutations import OneSendLess, Rotated

ALL = [(op, name) for op in OPERATIONS for name in algorithms_for(op)]
REDUCING = [(op, name) for op, name in ALL if OPERATIONS[op].reduces]
# Ranks, and the host of each.
TOPOLOGIES = {
    "1 rank": [0],
    "2 ranks": [0, 0],
    "3 ranks": [0, 0, 0],
    "6 ranks": [0] * 6,
    "7 ranks, 4 and 3": [0, 0, 0, 0, 1, 1, 1],
    "8 ranks, blocks of 2": [0, 0, 1, 1, 2, 2, 3, 3],
    "11 ranks, 10 hosts": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3],
    "13 ranks, round-robin": [rank % 3 for rank in range(13)],
}


def made(operation: str, algorithm: str, hosts: list[int]) -> Schedule:
    root = len(hosts) - 1 if OPERATIONS[operation].rooted else 0
    return make_schedule(operation, algorithm, Topology.of_hosts(hosts), root)


def expected(
    schedule: Schedule, inputs: list[np.ndarray], op: str = "sum"
) -> list[np.ndarray | None]:
    """The reference's answer for each rank."""
    name, ranks, root = schedule.operation.name, len(inputs), schedule.root
    nothing: list[np.ndarray | None] = [None] * ranks
    if name == "reduce":
        return [*nothing[:root], reference.reduce(inputs, op), *nothing[root + 1 :]]
    if name == "broadcast":
        return [inputs[root]] * ranks
    if name == "gather":
        return [*nothing[:root], np.concatenate(inputs), *nothing[root + 1 :]]
    if name == "scatter":
        return [inputs[root][part] for part in reference.shards(len(inputs[root]), ranks)]
    if name in ("all_gather", "all_to_all"):
        return list(getattr(reference, name)(inputs))
    return list(getattr(reference, name)(inputs, op))


def agree(schedule: Schedule, inputs: list[np.ndarray], op: str = "sum", seed: int = 0) -> bool:
    """Whether every rank ends with the reference's bits."""
    pairs = zip(execute(schedule, inputs, op, seed), expected(schedule, inputs, op), strict=True)
    return all(a is b if a is None or b is None else same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("hosts", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize(("operation", "algorithm"), ALL)
def test_every_rank_ends_with_the_references_bits(
    operation: str, algorithm: str, hosts: list[int]
) -> None:
    count = 12 * len(hosts)
    for seed, dtype in enumerate(("float32", "bfloat16")):
        inputs = awkward(dtype, len(hosts), count)
        assert agree(made(operation, algorithm, hosts), inputs, seed=seed), dtype


@pytest.mark.parametrize(("operation", "algorithm"), REDUCING)
def test_every_operation_in_every_type(operation: str, algorithm: str) -> None:
    schedule = made(operation, algorithm, TOPOLOGIES["7 ranks, 4 and 3"])
    for dtype in ("float16", "float64", "int8", "int64"):
        for op in ("sum", "avg", "prod"):
            assert agree(schedule, awkward(dtype, 7, 70), op), (dtype, op)


@pytest.mark.parametrize("algorithm", algorithms_for("all_reduce"))
@pytest.mark.parametrize("count", [0, 1, 5, 17])
def test_counts_that_shards_do_not_divide(algorithm: str, count: int) -> None:
    inputs = order_sensitive("bfloat16", 6, count)
    assert agree(made("all_reduce", algorithm, [0] * 6), inputs)


@pytest.mark.parametrize("algorithm", algorithms_for("all_reduce"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotated_leaves_are_caught(algorithm: str, dtype: str) -> None:
    """The inputs can tell: what passes here with leaves rotated would pass with any order."""
    schedule = made("all_reduce", algorithm, [0] * 6)
    inputs = order_sensitive(dtype, 6, 240)
    assert agree(schedule, inputs)
    assert not agree(Rotated.of(schedule), inputs)


def test_a_wait_for_ever_is_seen() -> None:
    schedule = OneSendLess.of(made("all_reduce", "ring", [0] * 3))
    with pytest.raises(Stuck, match="ranks wait"):
        execute(schedule, order_sensitive("float32", 3, 6))
