"""Ranks that differ, and calls that cannot be: an error on every rank, before anything moves."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

from pycollective import CollectiveError, CollectiveMismatch, ConfigurationError
from pycollective.compression import Int8State, OneBitState, TopKState
from pycollective.compression.groups import ends_of_communicator
from tests.compression.players import KINDS, SHAPES, digest, ends_of, gradients, held_by, make

HOSTS = (0, 0, 1, 1)

# What rank 2 does otherwise: kind, shapes, options.
OTHERS = {
    "chunk": ("one_bit", SHAPES, {"chunk": 512}),
    "density": ("top_k", SHAPES, {"density": 0.02}),
    "values": ("top_k", SHAPES, {"values": "float16"}),
    "exchange": ("top_k", SHAPES, {"exchange": "region"}),
    "shape": ("one_bit", {**SHAPES, "w": (100, 70)}, {}),
    "name": ("one_bit", {"u" if n == "w" else n: s for n, s in SHAPES.items()}, {}),
    "one more": ("one_bit", {**SHAPES, "more": (2, 3)}, {}),
    "what is compressed": ("one_bit", SHAPES, {"compress": lambda name, shape: name == "w"}),
    "codec": ("int8", SHAPES, {"chunk": 256}),
}


def differently_made(comm, what):
    kind, shapes, options = OTHERS[what]
    if comm.rank != 2:
        kind, shapes, options = kind if kind != "int8" else "one_bit", SHAPES, {}
    try:
        make(comm, HOSTS, kind, shapes, **options)
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_that_make_different_states_are_told(pool, what):
    for said in pool(4).call(differently_made, what):
        assert said is not None
        assert "rank(s) [2]" in said


def differently_called(comm, host_of, kind, what):
    """How a call ends in which rank 3 passes or scales something else; what is held after it."""
    ends = ends_of_communicator(comm, host_of=host_of)  # the group does not live through it
    of, options = KINDS[kind]
    state = of(SHAPES, ends, **options)
    state.all_reduce(gradients(1, comm.rank, 0))
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
    """Arguments that one rank alone can tell are wrong: no other rank calls anything."""
    made = [
        lambda ends: TopKState(SHAPES, ends, density=0),
        lambda ends: TopKState(SHAPES, ends, density=1.5),
        lambda ends: TopKState(SHAPES, ends, density=0.1, by="row"),
        lambda ends: TopKState(SHAPES, ends, density=0.1, values="float64"),
        lambda ends: TopKState(SHAPES, ends, density=0.1, exchange="ring"),
        lambda ends: TopKState(SHAPES, ends, density=0.1, warm_up=-1),
        lambda ends: TopKState(SHAPES, ends, density=0.1, decay=1.1),
        lambda ends: OneBitState(SHAPES, ends, chunk=100),
        lambda ends: Int8State(SHAPES, ends, chunk=1 << 20),
        lambda ends: OneBitState(SHAPES, ends, when="sometimes"),
    ]
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
    for call, arguments in [
        *((each, (ends_of(comm, HOSTS),)) for each in made),
        *((state.all_reduce, (each,)) for each in called),
    ]:
        try:
            call(*arguments)
            said.append(None)
        except ConfigurationError as error:
            said.append(str(error))
    untouched = bool((w == 1).all()) and digest(held_by(state)) == before
    assert state.all_reduce(gradients(2, comm.rank, 1))
    return said, untouched


def test_what_cannot_be_is_refused_before_anything_moves(pool):
    for said, untouched in pool(4).call(refused):
        assert all(said), said
        assert untouched
