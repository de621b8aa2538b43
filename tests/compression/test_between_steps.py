"""Saving, loading, flushing and forgetting: between steps, by all ranks, the same on each."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from pycollective import ConfigurationError
from tests.compression.players import (
    FACES,
    KINDS,
    SOON,
    digest,
    ends_with,
    gradients,
    held_by,
    make,
    open_groups,
    state_of,
)
from tests.turns import in_turns

HOSTS = (0, 0, 1, 1)
SHAPES = {"w": (64, 120), "v": (40, 128), "small": (40,)}


def stepped(comm, face, kind="one_bit", steps=2):
    state = state_of(comm, face, kind, HOSTS, SHAPES)
    for step in range(steps):
        state.all_reduce(gradients(1, comm.rank, step, SHAPES))
    return state


CALLS = {
    "flush": lambda state, saved: state.flush(),
    "reset": lambda state, saved: state.reset(),
    "state_dict": lambda state, saved: state.state_dict(),
    "load_state_dict": lambda state, saved: state.load_state_dict(saved),
}


def within(comm, face, what):
    """What is said within a step, and whether the step is as if nothing had been asked."""
    state, beside = stepped(comm, face), stepped(comm, face)
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
def test_what_is_between_steps_is_refused_within_one(face, what):
    for said, same, steps in face(within, what):
        assert f"{what} while a step is under way" in said
        assert same
        assert steps == 3


def one_within(comm, face, what):
    """Rank 2 alone is in a step: how the others' call ends, and when."""
    state = stepped(comm, face)
    saved = state.state_dict()
    with state.step() if comm.rank == 2 else nullcontext():
        return ends_with(lambda: CALLS[what](state, saved))


@pytest.mark.parametrize("what", ["flush", "state_dict", "load_state_dict"])
def test_no_rank_waits_for_one_that_refuses(face, what):
    for rank, (name, said, taken) in enumerate(face(one_within, what)):
        assert name == ("ConfigurationError" if rank == 2 else "CollectiveMismatch")
        assert "while a step is under way" in said
        assert taken < SOON


def closed(comm, face, steps):
    """What is said of a closed state."""
    state = stepped(comm, face, steps=steps)
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
    said = [ends_with(lambda call=call: call(state, {}))[1] for call in calls]
    return said, state.stats()["steps"]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_closed_state_says_so(face, steps):
    for said, counted in face(closed, steps):
        assert all("was closed" in each for each in said)
        assert counted == steps


def loaded_differently(comm, face, kind, what):
    """Rank 1 loads something else: how it ends, and whether what was held still is."""
    state = stepped(comm, face, kind)
    saved, later = state.state_dict(), stepped(comm, face, kind, 3).state_dict()
    worker = saved["residuals"]["worker"]
    moved = worker["w"] * 1  # of the array's kind or the tensor's
    moved[0, 5] += 1e-3
    others = {
        "steps": later,
        "an element": {
            **saved,
            "residuals": {**saved["residuals"], "worker": {**worker, "w": moved}},
        },
        "undelivered": {
            **saved,
            "undelivered": {**saved["undelivered"], "w": worker["w"][0] * 0 + 1},
        },
        "ways": {**saved, "whole": ["w"]},
        "nothing": {},
    }
    before = digest(held_by(state))
    found = ends_with(lambda: state.load_state_dict(others[what] if comm.rank == 1 else saved))
    return *found, digest(held_by(state)) == before


@pytest.mark.parametrize(
    ("face", "kind", "what"),
    [
        *in_turns(
            FACES[:2], ["int8", "top_k"], ["steps", "an element", "undelivered", "ways", "nothing"]
        ),
        ("gloo", "top_k", "undelivered"),
    ],
    indirect=["face"],
)
def test_ranks_that_load_different_states_are_told(face, kind, what):
    for rank, (name, said, taken, same) in enumerate(face(loaded_differently, kind, what)):
        refuses = what == "nothing" and rank == 1
        assert name == ("ConfigurationError" if refuses else "CollectiveMismatch")
        assert "no state of" in said if what == "nothing" else "rank(s) [1]" in said
        assert taken < SOON
        assert same


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
    calls = (whole, reduce), (sharded, scatter), (free, scatter)
    return [ends_with(lambda state=state, call=call: call(state))[1] for state, call in calls]


@pytest.mark.parametrize("how", ["load", "reset", "flush"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_way_a_parameter_goes_is_the_loaded_states(pool, kind, how):
    for one, other, free in pool(4).call(ways, kind, how):
        assert "went by reduce_scatter before" in one
        assert "went by all_reduce before" in other
        assert bool(free) == (how == "load")


def left_open(comm, face, host_of):
    """How many of the groups that a state has made are open once it is closed."""
    stepped(comm, face, steps=0).close()  # the caller's own group is there from here on
    with open_groups(face) as count:
        state = state_of(comm, face, "one_bit", host_of, SHAPES)
        state.all_reduce(gradients(1, comm.rank, 0, SHAPES))
        state.close()
        return count()


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_closing_leaves_no_group(face, host_of):  # of (0, 0, 0, 1) two ranks have no local shard
    assert face(left_open, host_of) == [0] * 4
