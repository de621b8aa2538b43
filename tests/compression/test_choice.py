"""`when="auto"`: compressed and dense in turn, one verdict of all ranks, nothing lost by it."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective.compression.arrays import OfNumpy
from tests.compression.players import KINDS, SHAPES, digest, gradients, make, wide


class Clock:
    """Says that every timed call took as long as the test wants.

    Attributes:
        asked: how often it was looked at.
    """

    def __init__(self, state, seconds):
        self._state, self._seconds, self._now = state, seconds, 0.0
        self._started, self.asked = False, 0

    def __call__(self):
        self.asked += 1
        if self._started:
            self._now += self._seconds[self._state.stats()["way"]]
        self._started = not self._started
        return self._now


def decide(comm, kind, host_of, seconds, seed, steps, warm_up=0):
    """The way of each step, the verdict, the worst error of what came and is held, and digests."""
    state = make(comm, host_of, kind, when="auto", **({"warm_up": warm_up} if warm_up else {}))
    mine = {way: each[comm.rank] for way, each in seconds.items()}
    state._choice.clock = Clock(state, mine)
    ways, outputs = [], []
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        every = [gradients(seed, rank, step) for rank in range(comm.size)]
        ways.append(state.stats()["way"])
        assert state.all_reduce(every[comm.rank])
        outputs.append(digest(every[comm.rank]))
        for name in SHAPES:
            total[name] += wide(every[comm.rank][name])
            total[name] -= sum(wide(gradients(seed, r, step)[name]) for r in range(4)) / 4
    held = state.flush()
    most = max(float(abs(each).max(initial=0)) for each in held.values())
    error = max(
        float(abs(total[name] + wide(held.get(name, np.zeros(1)))).max(initial=0)) for name in total
    )
    return ways, state.stats()["why"], error, outputs, most


# On the slowest rank compressed takes less, and more, though most ranks see it otherwise.
FASTER = {"compressed": [1.0, 1.0, 5.0, 1.0], "dense": [0.5, 0.5, 0.5, 6.0]}
SLOWER = {"compressed": [1.0, 7.0, 1.0, 1.0], "dense": [2.0, 2.0, 2.0, 6.0]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_all_ranks_go_by_the_slowest_ones_best_time(pool, kind, host_of):
    for seed, (seconds, way) in enumerate([(FASTER, "compressed"), (SLOWER, "dense")]):
        outcomes = pool(4).call(decide, kind, host_of, seconds, seed, 9)
        for ways, why, error, outputs, most in outcomes:
            assert ways == ["compressed", "dense"] * 3 + [way] * 3
            assert "ms compressed and" in why
            assert outputs == outcomes[0][3]
            assert (most == 0) == (way == "dense")  # all that was held has gone by then
            assert error < 1e-4  # nothing was lost when the residuals were given up
    assert "7000.00 ms compressed and 6000.00 ms dense" in outcomes[0][1]


def test_a_warm_up_tells_nothing(pool):
    outcomes = pool(4).call(decide, "top_k", (0, 1, 2, 3), SLOWER, 5, 12, 4)
    for ways, *_ in outcomes:
        assert ways == ["compressed"] * 4 + ["compressed", "dense"] * 3 + ["dense"] * 2


def other_steps(comm):
    """The ways where steps are of different parameters."""
    state = make(comm, (0, 1, 2, 3), "int8", when="auto")
    state._choice.clock = Clock(state, {"compressed": 1.0, "dense": 2.0})
    ways = []
    for step in range(13):
        every = gradients(11, comm.rank, step)
        ways.append(state.stats()["way"])
        state.all_reduce({"w": every["w"]} if step % 2 else every)
    return ways


def test_only_steps_of_the_same_parameters_are_compared(pool):
    for ways in pool(4).call(other_steps):
        # Every second step is of one parameter alone, and goes as the one that follows.
        assert ways[::2] == ["compressed", "dense"] * 3 + ["compressed"]


class Seen:
    """What one call of a state does, in order: looks at the clock, collectives of all ranks."""

    def __init__(self, state, flat):
        self.events = []
        self._of = (state._choice, "clock"), (state._ends.all, "average"), (flat, "is_finite")
        self._of += ((state._ends.all, "all_gather"),)

    def __enter__(self):
        self._were = [getattr(of, name) for of, name in self._of]
        for (of, name), was in zip(self._of, self._were, strict=True):
            setattr(of, name, lambda *args, name=name, was=was: self._note(name, was, args))
        return self.events

    def _note(self, name, was, args):
        self.events.append(name)
        return was(*args)

    def __exit__(self, *_):
        for (of, name), was in zip(self._of, self._were, strict=True):
            setattr(of, name, was)


def timed(comm):
    """What a dense call does in a trial."""
    state = make(comm, (0, 1, 2, 3), "int8", when="auto")
    state.all_reduce(gradients(3, comm.rank, 0))
    assert state.stats()["way"] == "dense"
    with Seen(state, OfNumpy) as events:
        state.all_reduce(gradients(3, comm.rank, 1))
    return events


def test_what_a_dense_call_does_for_good_is_timed(pool):
    for events in pool(4).call(timed):
        # The ranks wait for each other; compare; average; look whether each of four is finite.
        assert events[:5] == ["all_gather", "clock", "all_gather", "average", "is_finite"]
        assert events[5:9] == [*["is_finite"] * 3, "clock"]


def plans_made(comm, kind, how):
    """How many plans a whole trial of one bucket makes."""
    state = make(comm, (0, 0, 1, 1), kind, when="auto")
    plans, made = state._exchanged._plans, []
    make_plan = plans._make
    plans._make = lambda bucket: made.append(bucket) or make_plan(bucket)
    out = np.empty(7000 // comm.size, np.float32)
    for step in range(7):
        mine = gradients(4, comm.rank, step)
        if how == "whole":
            state.all_reduce(mine)
        else:
            state.reduce_scatter(out, mine["w"], "w")
    assert not state._choice._trying
    return len(made)


@pytest.mark.parametrize("how", ["whole", "shards"])
@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_a_trial_makes_each_plan_once(pool, kind, how):
    # Dense averages of whole gradients have none; shards go by the exchange either way.
    assert pool(4).call(plans_made, kind, how) == [1 if how == "whole" else 2] * 4
