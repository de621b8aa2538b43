"""What comparing a codec with dense calls leaves behind: nothing."""

from __future__ import annotations

import pytest

from pycollective import Communicator
from pycollective.bench.codec import Plan, measure


def measured(comm, codec):
    """The ways of two sizes, and of each communicator that they split off whether it is closed."""
    plan = Plan.of(codec, [1 << 14, 1 << 15], density=0.01, rounds=1)
    made, split = [], Communicator.split

    def noted(*args):
        made.append(split(*args))
        return made[-1]

    Communicator.split = noted
    try:
        ways = [list(measure(comm, plan, size, "ranks")) for size in plan.sizes]
    finally:
        Communicator.split = split
    return ways, [each.closed for each in made]


@pytest.mark.parametrize("codec", ["one_bit", "int8", "top_k"])
def test_the_state_of_each_size_is_closed(pool, codec):
    for ways, closed in pool(2).call(measured, codec):
        assert ways == [[codec, "fp32", "bf16"]] * 2
        assert closed == [True, True]
