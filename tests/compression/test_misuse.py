"""Ranks that differ, and calls that cannot be: an error on every rank, before anything moves."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

from pycollective import CollectiveError, CollectiveMismatch, ConfigurationError
from pycollective.compression import Int8State, OneBitState, TopKState
from pycollective.compression.groups import groups_of_communicator
from tests.compression.players import KINDS, SHAPES, digest, gradients, held_by, make

HOSTS = (0, 0, 1, 1)

# What rank 2 does otherwise: kind, shapes, options.
OTHERS = {
    "codec": ("int8", SHAPES, {"chunk": 256}),
    "chunk": ("one_bit", SHAPES, {"chunk": 512}),
    "chunk of int8": ("int8", SHAPES, {"chunk": 512}),
    "between": ("one_bit", SHAPES, {"between": "ranks"}),
    "dense_steps": ("one_bit", SHAPES, {"dense_steps": 5}),
    "density": ("top_k", SHAPES, {"density": 0.02}),
    "by": ("top_k", SHAPES, {"by": "chunk"}),
    "values": ("top_k", SHAPES, {"values": "float16"}),
    "exchange": ("top_k", SHAPES, {"exchange": "region"}),
    "warm_up": ("top_k", SHAPES, {"warm_up": 3}),
    "decay": ("top_k", SHAPES, {"decay": 0.9}),
    "shape": ("one_bit", {**SHAPES, "w": (100, 70)}, {}),
    "name": ("one_bit", {"u" if n == "w" else n: s for n, s in SHAPES.items()}, {}),
    "one more": ("one_bit", {**SHAPES, "more": (2, 3)}, {}),
    "what is compressed": ("one_bit", SHAPES, {"compress": lambda name, shape: name == "w"}),
}


def made(comm, call):
    """How making a state ends: the error, how long it took, whether groups were made."""
    splits, start = comm._splits, time.monotonic()
    try:
        call(comm)
    except (CollectiveError, ConfigurationError) as error:
        taken = time.monotonic() - start
        return type(error).__name__, str(error), taken, comm._splits > splits
    return None


def differently_made(comm, what):
    kind, shapes, options = OTHERS[what]
    if comm.rank != 2:
        kind = "one_bit" if what == "codec" else kind
        shapes, options = SHAPES, {}
    of, common = KINDS[kind]
    return made(comm, lambda ranks: of(shapes, ranks, **{**common, **options}))


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_that_make_different_states_are_told_before_there_are_groups(pool, what):
    for name, said, taken, groups in pool(4).call(differently_made, what):
        assert name == CollectiveMismatch.__name__
        assert "rank(s) [2]" in said
        assert taken < 20  # not at the operations' timeout, which is 30 s
        assert not groups


def unsaid(name, shape):
    raise ValueError("cannot say")


# Arguments that cannot be.
REFUSED = {
    "no density": lambda ranks: TopKState(SHAPES, ranks, density=0),
    "high density": lambda ranks: TopKState(SHAPES, ranks, density=1.5),
    "by": lambda ranks: TopKState(SHAPES, ranks, density=0.1, by="row"),
    "values": lambda ranks: TopKState(SHAPES, ranks, density=0.1, values="float64"),
    "exchange": lambda ranks: TopKState(SHAPES, ranks, density=0.1, exchange="ring"),
    "warm_up": lambda ranks: TopKState(SHAPES, ranks, density=0.1, warm_up=-1),
    "decay": lambda ranks: TopKState(SHAPES, ranks, density=0.1, decay=1.1),
    "decay in words": lambda ranks: TopKState(SHAPES, ranks, density=0.1, decay="none"),
    "chunk": lambda ranks: OneBitState(SHAPES, ranks, chunk=100),
    "large chunk": lambda ranks: Int8State(SHAPES, ranks, chunk=1 << 20),
    "between": lambda ranks: OneBitState(SHAPES, ranks, between="racks"),
    "dense_steps": lambda ranks: OneBitState(SHAPES, ranks, dense_steps=-1),
    "fewer dense_steps": lambda ranks: OneBitState(SHAPES, ranks, dense_steps=0.5),
}


def made_wrongly(comm, what, everywhere):
    call = REFUSED[what]
    if comm.rank != 2 and not everywhere:
        call = lambda ranks: OneBitState(SHAPES, ranks)  # noqa: E731
    return made(comm, call)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks_before_there_are_groups(pool, what):
    for name, _, _, groups in pool(4).call(made_wrongly, what, True):
        assert (name, groups) == (ConfigurationError.__name__, False)
    outcomes = pool(4).call(made_wrongly, what, False)
    refusal = outcomes[2][1]
    for rank, (name, said, taken, groups) in enumerate(outcomes):
        assert not groups
        assert taken < 20
        if rank == 2:
            assert name == ConfigurationError.__name__
        else:
            assert name == CollectiveMismatch.__name__
            assert f"refused on rank(s) [2]: ConfigurationError: {refusal}" in said


def failed_to_say(comm):
    """One rank's `compress` raises an error of its own."""
    compress = unsaid if comm.rank == 2 else None
    try:
        OneBitState(SHAPES, comm, compress=compress)
    except (ValueError, CollectiveMismatch) as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_of_the_callers_is_raised_where_it_was_and_told_elsewhere(pool):
    outcomes = pool(4).call(failed_to_say)
    assert outcomes.pop(2) == ("ValueError", "cannot say")
    for name, said in outcomes:
        assert name == CollectiveMismatch.__name__
        assert "rank(s) [2]: ValueError: cannot say" in said


def differently_called(comm, host_of, kind, what):
    """How a call ends in which rank 3 passes or scales something else; what is held after it."""
    ends = groups_of_communicator(comm, host_of=host_of)  # the group does not live through it
    of, options = KINDS[kind]
    state = of(SHAPES, ends, **options)
    state.all_reduce(gradients(1, comm.rank, 0))
    comm.barrier()  # else who still waits for the first step's last message is told in that
    before = digest(held_by(state))
    mine = gradients(1, comm.rank, 1)
    if comm.rank == 3:
        if what == "order":
            mine = dict(reversed(mine.items()))
        elif what == "fewer":
            del mine["v"]
        else:
            state.set_loss_scale(2.0)
    start = time.monotonic()
    try:
        state.all_reduce(mine)
    except CollectiveError as error:
        taken = time.monotonic() - start
        same = digest(held_by(state)) == before or (comm.rank == 3 and what == "scale")
        return type(error).__name__, str(error), taken, same
    return None


@pytest.mark.parametrize("what", ["order", "fewer", "scale"])
@pytest.mark.parametrize("kind", ["one_bit", "top_k", "top_k by region"])
def test_ranks_that_call_differently_are_told(pool, kind, what):
    for host_of in ((0, 1, 2, 3), (0, 0, 1, 1)):
        outcomes = pool(4).call(differently_called, host_of, kind, what)
        names = {name for name, *_ in outcomes}
        assert CollectiveMismatch.__name__ in names
        if host_of == (0, 1, 2, 3):
            assert names == {CollectiveMismatch.__name__}
        for _, _, taken, same in outcomes:
            assert taken < 20  # not at the operations' timeout, which is 30 s
            assert same


def refused(comm):
    """Gradients that one rank alone can tell are wrong: no other rank calls anything."""
    state = make(comm, HOSTS, "one_bit")
    state.all_reduce(gradients(2, comm.rank, 0))
    before = digest(held_by(state))
    w = np.ones(SHAPES["w"], np.float32)
    frozen = w.copy()
    frozen.flags.writeable = False
    called = [
        {"w": w[1:]},
        {"z": w},
        {"w": w.astype(np.float64)},
        {"w": w.astype(ml_dtypes.float8_e4m3fn)},
        {"w": np.ones((70, 200), np.float32)[:, ::2]},
        {"w": np.asfortranarray(w)},
        {"w": frozen},
        {"w": w.tolist()},
        {"v": np.ones(SHAPES["v"], np.float32), "z": w},
    ]
    said = []
    for each in called:
        try:
            state.all_reduce(each)
            said.append(None)
        except ConfigurationError as error:
            said.append(str(error))
    untouched = bool((w == 1).all()) and digest(held_by(state)) == before
    assert state.all_reduce(gradients(2, comm.rank, 1))
    return said, untouched


def test_gradients_that_cannot_be_are_refused_before_anything_moves(pool):
    for said, untouched in pool(4).call(refused):
        assert all(said), said
        assert untouched
