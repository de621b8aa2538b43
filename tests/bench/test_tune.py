"""What `pycollective bench --tune` times: real inputs each turn, and one result for all."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective.bench.tune import turns
from pycollective.schedule import algorithms_for


class Alone:
    """A communicator of one rank that counts; of a `wrong` algorithm the last bit is off."""

    rank, size = 0, 1

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.turns: list[np.ndarray] = []
        self.starts = True

    def barrier(self) -> None:
        self.starts = True

    def all_reduce(self, x: np.ndarray, op: str = "sum", algorithm: str = "auto") -> None:
        if op == "max":
            return
        if self.starts:
            self.turns.append(x.copy())
            self.starts = False
        x += 1
        if algorithm == self.wrong:
            x.view(np.uint32)[-1] ^= 1


def test_each_turn_begins_with_the_same_inputs() -> None:
    alone = Alone()
    taken = turns(alone, "all_reduce", 4096, "float32", rounds=2)
    assert list(taken) == list(algorithms_for("all_reduce"))
    assert len(alone.turns) >= 3 * len(taken)
    inputs = alone.turns[0]
    assert len(np.unique(inputs)) > 900
    timed = alone.turns[-2 * len(taken) :]
    assert all(np.array_equal(each, inputs) for each in timed)


def test_other_bits_are_not_timed() -> None:
    with pytest.raises(AssertionError, match="all_reduce of 4096 bytes: tree makes other bits"):
        turns(Alone("tree"), "all_reduce", 4096, "float32", rounds=1)
