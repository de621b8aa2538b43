"""Saving, loading, flushing and forgetting: between steps, by all ranks, the same on each."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pycollective import CollectiveMismatch, ConfigurationError
from pycollective.compression import OneBitState
from pycollective.compression.groups import groups_of_communicator
from tests.compression.players import (
    KINDS,
    TOPOLOGIES,
    digest,
    gradients,
    held_by,
    make,
    noted_splits,
)

HOSTS = (0, 0, 1, 1)
SHAPES = {"w": (64, 120), "v": (40, 128), "small": (40,)}


def stepped(comm, kind="one_bit", steps=2):
    state = make(comm, HOSTS, kind, SHAPES)
    for step in range(steps):
        state.all_reduce(gradients(1, comm.rank, step, SHAPES))
    return state


CALLS = {
    "flush": lambda state, saved: state.flush(),
    "reset": lambda state, saved: state.reset(),
    "state_dict": lambda state, saved: state.state_dict(),
    "load_state_dict": lambda state, saved: state.load_state_dict(saved),
}


def within(comm, what):
    """What is said within a step, and whether the step is as if nothing had been asked."""
    state, beside = stepped(comm), stepped(comm)
    saved = state.state_dict()
    outputs = []
    for each in (state, beside):
        mine = gradients(1, comm.rank, 2, SHAPES)
        small = {"small": mine.pop("small")}
        with each.step():
            each.all_reduce(mine)
            if each is state:
                with pytest.raises(ConfigurationError) as raised:
                    CALLS[what](state, saved)
            each.all_reduce(small)
        outputs.append(digest({**mine, **small}) + digest(held_by(each)))
    CALLS[what](state, saved)  # after it all is well
    return str(raised.value), outputs[0] == outputs[1], state.stats()["steps"]


@pytest.mark.parametrize("what", CALLS)
def test_what_is_between_steps_is_refused_within_one(pool, what):
    for said, same, steps in pool(4).call(within, what):
        assert f"{what} while a step is under way" in said
        assert same
        assert steps == 3


def one_within(comm, what):
    """Rank 2 alone is in a step: how the others' call ends, and when."""
    state = stepped(comm)
    saved = state.state_dict()
    start = time.monotonic()
    try:
        if comm.rank == 2:
            with state.step():
                CALLS[what](state, saved)
        else:
            CALLS[what](state, saved)
    except (ConfigurationError, CollectiveMismatch) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("what", ["flush", "state_dict", "load_state_dict"])
def test_no_rank_waits_for_one_that_refuses(pool, what):
    for rank, (name, said, taken) in enumerate(pool(4).call(one_within, what)):
        assert name == ("ConfigurationError" if rank == 2 else "CollectiveMismatch")
        assert "while a step is under way" in said
        assert taken < 20  # the operations' timeout is 30 s


def closed(comm, steps):
    """What is said of a closed state."""
    state = OneBitState(SHAPES, comm, between="ranks")  # whose groups are its own
    for step in range(steps):
        state.all_reduce(gradients(1, comm.rank, step, SHAPES))
    state.close()
    state.close()
    w = np.ones(SHAPES["w"], np.float32)
    out = np.empty(w.size // comm.size, np.float32)
    calls = [
        *CALLS.values(),
        lambda state, _: state.all_reduce({"w": w}),
        lambda state, _: state.reduce_scatter(out, w, "w"),
        lambda state, _: state.step().__enter__(),
    ]
    said = []
    for call in calls:
        with pytest.raises(ConfigurationError) as raised:
            call(state, {})
        said.append(str(raised.value))
    return said, state.stats()["steps"]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_closed_state_says_so(pool, steps):
    for said, counted in pool(4).call(closed, steps):
        assert all("was closed" in each for each in said)
        assert counted == steps


def loaded_differently(comm, kind, what):
    """Rank 1 loads something else: how it ends, and whether what was held still is."""
    state = stepped(comm, kind)
    saved, later = state.state_dict(), stepped(comm, kind, 3).state_dict()
    worker = saved["residuals"]["worker"]
    moved = worker["w"].copy()
    moved[0, 5] += np.float32(1e-3)
    others = {
        "steps": later,
        "an element": {
            **saved,
            "residuals": {**saved["residuals"], "worker": {**worker, "w": moved}},
        },
        "undelivered": {
            **saved,
            "undelivered": {**saved["undelivered"], "w": np.ones(64 * 120, np.float32)},
        },
        "ways": {**saved, "whole": ["w"]},
        "nothing": {},
    }
    before, start = digest(held_by(state)), time.monotonic()
    try:
        state.load_state_dict(others[what] if comm.rank == 1 else saved)
    except (ConfigurationError, CollectiveMismatch) as error:
        found = type(error).__name__, str(error), time.monotonic() - start
        return *found, digest(held_by(state)) == before
    return None


@pytest.mark.parametrize("what", ["steps", "an element", "undelivered", "ways", "nothing"])
@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_ranks_that_load_different_states_are_told(pool, kind, what):
    for rank, (name, said, taken, same) in enumerate(pool(4).call(loaded_differently, kind, what)):
        refuses = what == "nothing" and rank == 1
        assert name == ("ConfigurationError" if refuses else "CollectiveMismatch")
        assert "no state of" in said if what == "nothing" else "rank(s) [1]" in said
        assert taken < 20
        assert same


def refused(comm, kind):
    """States that cannot be held, beside those of `test_saving`."""
    state = stepped(comm, kind)
    good = state.state_dict()
    before = digest(held_by(state))
    owed = good["undelivered"]
    bad = [
        None,
        {**good, "codec": None},
        {**good, "steps": -1},
        {**good, "ranks": 0},
        {**good, "hosts": 5},
        {**good, "loss_scale": float("nan")},
        {**good, "undelivered": {"w": owed["w"]}},
        {**good, "undelivered": {**owed, "w": owed["w"][:-1]}},
        {**good, "sharded": ["z"]},
        {**good, "sharded": ["w"]},  # and went whole
    ]
    for each in bad:
        with pytest.raises(ConfigurationError):
            state.load_state_dict(each)
    return digest(held_by(state)) == before


@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_what_cannot_be_held_is_refused(pool, kind):
    assert pool(4).call(refused, kind) == [True] * 4


def ways(comm, kind, how):
    """One parameter whole, then as shards: after a state was loaded, reset or flushed."""
    whole, sharded, free = (make(comm, HOSTS, kind, SHAPES) for _ in range(3))
    out = np.empty(64 * 120 // comm.size, np.float32)

    def reduce(state):
        state.all_reduce({"w": gradients(2, comm.rank, 0, SHAPES)["w"]})

    def scatter(state):
        state.reduce_scatter(out, gradients(2, comm.rank, 0, SHAPES)["w"], "w")

    reduce(whole)
    scatter(sharded)
    for state, other in ((whole, reduce), (sharded, scatter)):  # `free` has gone neither way
        other(state)
    if how == "load":
        saved = whole.state_dict(), sharded.state_dict()
        whole.load_state_dict(saved[1])
        sharded.load_state_dict(saved[0])
        free.load_state_dict(saved[0])
    else:
        for state in (whole, sharded):
            getattr(state, how)()
    scatter(whole)
    reduce(sharded)
    said = []
    for state, call in ((whole, reduce), (sharded, scatter), (free, scatter)):
        try:
            call(state)
            said.append("")
        except ConfigurationError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["load", "reset", "flush"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_way_a_parameter_goes_is_the_loaded_states(pool, kind, how):
    for one, other, free in pool(4).call(ways, kind, how):
        assert "went by reduce_scatter before" in one
        assert "went by all_reduce before" in other
        assert bool(free) == (how == "load")


def left_open(comm, host_of):
    """Of the communicators that a state split off, how many are open once it is closed."""
    with noted_splits() as made:
        ends = groups_of_communicator(comm, host_of=host_of)
    state = OneBitState(SHAPES, ends)
    state.all_reduce(gradients(1, comm.rank, 0, SHAPES))
    state.close()
    return sum(not each.closed for each in made)


@pytest.mark.parametrize("host_of", [*TOPOLOGIES, (0, 0, 0, 0)])
def test_closing_leaves_no_communicator(pool, host_of):
    assert pool(4).call(left_open, host_of) == [0] * 4
