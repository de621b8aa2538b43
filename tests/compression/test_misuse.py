"""Ranks that differ, and calls that cannot be: an error on every rank, before anything moves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pycollective import CollectiveMismatch, ConfigurationError
from tests.compression.players import (
    SHAPES,
    SOON,
    by_face,
    digest,
    ends_with,
    gradients,
    held_by,
    open_groups,
    state_of,
)

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
    "warm_up": ("top_k", SHAPES, {"warm_up": 3}),
    "decay": ("top_k", SHAPES, {"decay": 0.9}),
    "shape": ("one_bit", {**SHAPES, "w": (100, 70)}, {}),
    "name": ("one_bit", {"u" if n == "w" else n: s for n, s in SHAPES.items()}, {}),
    "one more": ("one_bit", {**SHAPES, "more": (2, 3)}, {}),
    "what is compressed": ("one_bit", SHAPES, {"compress": lambda name, shape: name == "w"}),
}


def unsaid(name, shape):
    raise ValueError("cannot say")


# Arguments that cannot be: kind, options.
REFUSED = {
    "no density": ("top_k", {"density": 0}),
    "high density": ("top_k", {"density": 1.5}),
    "by": ("top_k", {"by": "row"}),
    "values": ("top_k", {"values": "float64"}),
    "exchange": ("top_k", {"exchange": "ring"}),
    "the exchange that is gone": ("top_k", {"exchange": "region"}),
    "warm_up": ("top_k", {"warm_up": -1}),
    "decay": ("top_k", {"decay": 1.1}),
    "decay in words": ("top_k", {"decay": "none"}),
    "chunk": ("one_bit", {"chunk": 100}),
    "large chunk": ("int8", {"chunk": 1 << 20}),
    "between": ("one_bit", {"between": "racks"}),
    "dense_steps": ("one_bit", {"dense_steps": -1}),
    "fewer dense_steps": ("one_bit", {"dense_steps": 0.5}),
    "an error of the caller's": ("one_bit", {"compress": unsaid}),
}


def made(comm, face, kind, shapes, options):
    """How making a state ends: the error, how long it took, how many groups were made."""
    with open_groups(face) as count:
        found = ends_with(lambda: state_of(comm, face, kind, None, shapes, **options))
        return *found, count()


def differently_made(comm, face, what):
    """Rank 2 alone makes another state."""
    state_of(comm, face, "one_bit").close()  # the caller's own group is there from here on
    kind, shapes, options = OTHERS[what]
    if comm.rank != 2:
        kind = "one_bit" if what == "codec" else kind
        shapes, options = SHAPES, {}
    return made(comm, face, kind, shapes, options)


@pytest.mark.parametrize(
    ("face", "what"),
    by_face(OTHERS, ["codec", "between", "dense_steps", "shape"]),
    indirect=["face"],
)
def test_ranks_that_make_different_states_are_told_before_there_are_groups(face, what):
    for name, said, taken, groups in face(differently_made, what):
        assert name == CollectiveMismatch.__name__
        assert "rank(s) [2]" in said
        assert taken < SOON
        assert groups == 0


def made_of_the_same(comm, face):
    exchange = "gather" if comm.rank == 2 else "auto"
    state_of(comm, face, "top_k", None, exchange=exchange).close()
    return "made"


def test_the_names_of_the_one_exchange_are_the_same(face):
    assert face(made_of_the_same) == ["made"] * 4


def made_wrongly(comm, face, what, everywhere):
    state_of(comm, face, "one_bit").close()
    kind, options = REFUSED[what] if comm.rank == 2 or everywhere else ("one_bit", {})
    return made(comm, face, kind, SHAPES, options)


@pytest.mark.parametrize(
    ("face", "what"),
    by_face(REFUSED, ["high density", "values", "chunk", "an error of the caller's"]),
    indirect=["face"],
)
def test_what_cannot_be_is_refused_on_all_ranks_before_there_are_groups(face, what):
    own = "ValueError" if what == "an error of the caller's" else ConfigurationError.__name__
    for name, _, _, groups in face(made_wrongly, what, True):
        assert (name, groups) == (own, 0)
    outcomes = face(made_wrongly, what, False)
    refusal = outcomes[2][1]
    for rank, (name, said, taken, groups) in enumerate(outcomes):
        assert groups == 0
        assert taken < SOON
        if rank == 2:
            assert name == own
        else:
            assert name == CollectiveMismatch.__name__
            assert f"refused on rank(s) 2: {own}: {refusal}" in said


def refused(comm, face):
    """Gradients that one rank alone can tell are wrong: no other rank calls anything."""
    state = state_of(comm, face, "one_bit", HOSTS)
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
        {"v": np.ones(SHAPES["v"], np.float32), "z": w},
        *([{"w": frozen}, {"w": w.tolist()}] if face == "numpy" else []),
        *([{"w": w.astype(">f4")}] if face == "numpy" else []),  # other numbers than fp32 reads
    ]
    ends = [ends_with(lambda each=each: state.all_reduce(each)) for each in called]
    said = [text if name == ConfigurationError.__name__ else "" for name, text, _ in ends]
    untouched = bool((w == 1).all()) and digest(held_by(state)) == before
    assert state.all_reduce(gradients(2, comm.rank, 1))
    return said, untouched


def test_gradients_that_cannot_be_are_refused_before_anything_moves(face):
    for said, untouched in face(refused):
        assert all(said), said
        assert "6900 elements" in said[0]
        assert "'z'" in said[1]
        assert "float64" in said[2]
        assert "float8" in said[3]
        assert all("contiguous" in each for each in said[4:6])
        assert untouched
