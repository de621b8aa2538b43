"""What is held, saved and held again: the same next step, the same mean in another world."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from pycollective import ConfigurationError
from tests.compression.players import (
    KINDS,
    SHAPES,
    TOPOLOGIES,
    digest,
    ends_of,
    gradients,
    held_by,
    make,
    state_of,
    wide,
)


def stepped(comm, host_of, kind, seed, steps, **options):
    """A state after some steps."""
    state = make(comm, host_of, kind, **options)
    for step in range(steps):
        state.all_reduce(gradients(seed, comm.rank, step))
    return state


def round_trip(comm, host_of, kind, seed):
    """The next step of a state and of one that was loaded; digests of what was saved."""
    state = stepped(comm, host_of, kind, seed, 3, **warm_up_of(kind))
    saved = pickle.dumps(state.state_dict())
    loaded = make(comm, host_of, kind, **warm_up_of(kind))
    loaded.all_reduce(gradients(seed + 1, comm.rank, 0))  # must leave no trace
    loaded.load_state_dict(pickle.loads(saved))
    found = []
    for each in (state, loaded):
        mine = gradients(seed, comm.rank, 3)
        each.all_reduce(mine)
        found.append(digest(mine) + digest(held_by(each)))
    return found[0] == found[1], saved


def warm_up_of(kind):
    return {"warm_up": 6} if kind.startswith("top_k") else {}


@pytest.mark.parametrize("host_of", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_is_bit_identical_after_a_round_trip(pool, kind, host_of):
    outcomes = pool(4).call(round_trip, host_of, kind, len(kind))
    assert [same for same, _ in outcomes] == [True] * 4
    assert len({saved for _, saved in outcomes}) == 1  # alike on every rank
    assert b"pycollective" not in outcomes[0][1]  # it needs no class of ours to be read


# What a state of four ranks on two hosts saved before the first release.
BEFORE = {
    "version": 1,
    "steps": 2,
    "loss_scale": 2.0,
    "ranks": 4,
    "hosts": 2,
    "codec": {"codec": "one_bit", "chunk": 64, "between": "hosts", "dense_steps": 0},
    "residuals": {
        "worker": {
            "w": np.array([[-1, 2, -2, -2, 1, 4], [6.5, -5, -6, -0.125, 5.75, 12]], np.float32)
        },
        "server": {"w": np.array([-0.75, -3, -0.5, 1, 1, 1], np.float32)},
    },
    "undelivered": {"w": np.array([0, 0, 3, 0, 0, 0], np.float32)},
    "whole": ["w"],
    "sharded": [],
}


def everything(name, shape):
    return True


def loads_before(comm, face):
    shapes = {"w": (6,)}
    state = state_of(comm, face, "one_bit", (0, 0, 1, 1), shapes, chunk=64, compress=everything)
    state.load_state_dict(BEFORE)
    saved = state.state_dict()
    errors = {**saved["residuals"], "undelivered": saved["undelivered"]}
    held = {kind: np.asarray(of["w"]).tolist() for kind, of in errors.items()}
    return saved["steps"], saved["loss_scale"], held


def test_what_was_saved_before_loads(face):
    of_hosts, server = BEFORE["residuals"]["worker"]["w"], BEFORE["residuals"]["server"]["w"]
    held = {"worker": of_hosts, "server": server, "undelivered": BEFORE["undelivered"]["w"]}
    want = 2, 2.0, {kind: errors.tolist() for kind, errors in held.items()}
    assert face(loads_before) == [want] * 4


def loaded_as_saved(comm, exchange):
    """Whether a state holds what another saved, whose exchange was this."""
    state = stepped(comm, (0, 1, 2, 3), "top_k", 7, 2)
    saved = state.state_dict()
    loaded = make(comm, (0, 1, 2, 3), "top_k")
    loaded.load_state_dict({**saved, "codec": {**saved["codec"], "exchange": exchange}})
    return digest(held_by(loaded)) == digest(held_by(state))


@pytest.mark.parametrize("exchange", ["region", "gather"])
def test_what_was_saved_when_there_were_two_exchanges_is_loaded(pool, exchange):
    assert pool(4).call(loaded_as_saved, exchange) == [True] * 4


WORLDS = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 0), (0, 1), (0, 1, 1), (0, 0, 0, 0)]


def save(comm, host_of, kind, seed):
    if ends_of(comm, host_of) is None:
        return None
    state = stepped(comm, host_of, kind, seed, 2)
    return state.state_dict(), state._feedback.keeper.mean()


def load(comm, host_of, kind, saved, seed):
    """The mean error after loading; what two steps deliver, and what is left of all after them."""
    ends = ends_of(comm, host_of)
    if ends is None:
        return None
    state = make(comm, host_of, kind)
    state.load_state_dict(saved)
    mean = total(state)
    delivered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in (5, 6):
        mine = gradients(seed, comm.rank, step)
        put_in = [gradients(seed, rank, step) for rank in range(len(host_of))]
        state.all_reduce(mine)
        for name in mean:
            delivered[name] += wide(mine[name]) - sum(wide(e[name]) for e in put_in) / len(put_in)
    left = state.flush()
    return mean, {name: delivered[name] + wide(left[name]) for name in mean}


def total(state):
    """All that is held, as it adds to the average; nothing is changed by asking."""
    saved = state.state_dict()
    found = {name: each.reshape(SHAPES[name]) for name, each in state.flush().items()}
    state.load_state_dict(saved)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_another_world_keeps_the_mean_error_and_delivers_it(pool, kind):
    for seed, (before, after) in enumerate(zip(WORLDS, WORLDS[1:] + WORLDS[:1], strict=True)):
        saved, mean = pool(4).call(save, before, kind, seed)[0]
        for found in pool(4).call(load, after, kind, saved, seed)[: len(after)]:
            for name, each in mean.items():
                want = wide(each).reshape(SHAPES[name])
                bound = 64 * 2**-24 * max(1.0, abs(want).max())
                assert abs(wide(found[0][name]) - want).max() <= bound, (before, after)
                # Conserved through steps, too: it is not kept for ever where nobody looks.
                assert abs(found[1][name] - want).max() <= 1000 * bound, (before, after)
        if max(before) > 0:
            assert any(each.any() for each in mean.values())


def one_host_delivers(comm, kind, saved):
    """Loaded where nothing is compressed: what the next step gives for gradients of one."""
    state = make(comm, (0, 0, 0, 0), kind)
    state.load_state_dict(saved)
    mine = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    state.all_reduce(mine)
    return mine, state.flush()


@pytest.mark.parametrize("kind", ["one_bit", "top_k"])
def test_a_world_that_goes_dense_delivers_all_at_once(pool, kind):
    saved, mean = pool(4).call(save, (0, 0, 1, 1), kind, 3)[0]
    for mine, left in pool(4).call(one_host_delivers, kind, saved):
        for name, each in mean.items():
            got = mine[name].reshape(-1)
            assert got.tobytes() == (np.float32(1) + each).tobytes()
            assert not left[name].any()


def emptied(comm, host_of, kind, how):
    """After `flush` or `reset`: what is held, and the next step beside a fresh state's."""
    state, fresh = stepped(comm, host_of, kind, 4, 2), make(comm, host_of, kind)
    found = state.flush() if how == "flush" else {}
    state.reset()
    empty = not any(each.any() for each in state._feedback.keeper.mean().values())
    outputs = []
    for each in (state, fresh):
        mine = gradients(4, comm.rank, 2)
        each.all_reduce(mine)
        outputs.append(digest(mine) + digest(held_by(each)))
    shapes = {name: each.shape for name, each in found.items()}
    return empty, outputs[0] == outputs[1], digest(found), shapes


@pytest.mark.parametrize("how", ["flush", "reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_flush_and_reset_leave_nothing(pool, kind, how):
    for host_of in TOPOLOGIES:
        outcomes = pool(4).call(emptied, host_of, kind, how)
        assert [each[:2] for each in outcomes] == [(True, True)] * 4
        assert len({each[2] for each in outcomes}) == 1
        if how == "flush":
            assert outcomes[0][3] == {"w": SHAPES["w"], "v": SHAPES["v"]}


def cast(errors, dtype):
    """An array or a tensor in another type."""
    if isinstance(errors, np.ndarray):
        return errors.astype(dtype)
    import torch

    return errors.to(getattr(torch, dtype))


class Sparse:
    """Errors with a dtype, of which no array can be made; as sparse tensors are."""

    dtype = np.dtype(np.float32)

    def __array__(self, *_, **__):
        raise TypeError("a sparse layout")


def spoilt(good):
    """States that no state gives, by what is wrong with them."""
    residuals, owed = good["residuals"], good["undelivered"]
    worker = residuals["worker"]
    w = worker["w"]

    def held(errors):
        return {**good, "residuals": {**residuals, "worker": {**worker, "w": errors}}}

    def carried(errors):
        return {**good, "undelivered": {**owed, **errors}}

    return {
        "empty": {},
        "none": None,
        "residuals alone": {"residuals": residuals},
        "another version": {**good, "version": 2},
        "another codec": {**good, "codec": {"codec": "three_bit"}},
        "no codec": {**good, "codec": None},
        "a chunk of a word": {**good, "codec": {**good["codec"], "chunk": "x"}},
        "between planets": {**good, "codec": {**good["codec"], "between": "planets"}},
        "no dense steps": {**good, "codec": {**good["codec"], "dense_steps": -1}},
        "an option more": {**good, "codec": {**good["codec"], "colour": 1}},
        "an option fewer": {**good, "codec": {"codec": good["codec"]["codec"]}},
        "one more residual": {**good, "residuals": {"worker": worker, "mailman": worker}},
        "a parameter fewer": {**good, "residuals": {**residuals, "worker": {"w": w}}},
        "a parameter more": {**good, "residuals": {**residuals, "worker": {**worker, "z": w}}},
        "shorter": held(w[:, :-1]),
        "one host": held(w[:1]),
        "no host": held(w[:0]),
        "NaN": held(w * float("nan")),
        "complex": held(cast(w, "complex64")),
        "wide": held(cast(w, "float64")),
        "integers": held(cast(w, "int32")),
        "no array": held(None),
        "sparse": held(Sparse() if isinstance(w, np.ndarray) else w.to_sparse_csr()),
        "sparse and carried": carried(
            {"w": Sparse() if isinstance(w, np.ndarray) else owed["w"].to_sparse()}
        ),
        "no residuals": {name: each for name, each in good.items() if name != "residuals"},
        "a list of residuals": {**good, "residuals": [worker]},
        "a list of errors": {**good, "residuals": {"worker": [w]}},
        "carried of another size": carried({"w": owed["w"][1:]}),
        "carried of another name": carried({"z": owed["w"]}),
        "carried and small": carried({"bias": owed["w"][:33] * 0 + 1}),
        "carried infinite": carried({"w": owed["w"] + float("inf")}),
        "carried integers": carried({"w": cast(owed["w"], "int64")}),
        "carried of one alone": {**good, "undelivered": {"w": owed["w"]}},
        "nothing carried": {**good, "undelivered": None},
        "scale 0": {**good, "loss_scale": 0.0},
        "scale NaN": {**good, "loss_scale": float("nan")},
        "scale infinite": {**good, "loss_scale": float("inf")},
        "scale of a word": {**good, "loss_scale": "large"},
        "no ranks": {**good, "ranks": 0},
        "more hosts than ranks": {**good, "hosts": 5},
        "steps before the first": {**good, "steps": -1},
        "shards of another": {**good, "sharded": ["z"]},
        "whole and in shards": {**good, "sharded": ["w"]},
        "no shards": {**good, "sharded": None},
    }


def refused(comm, face, kind):
    """What is said of each; whether all was left as it was."""
    state = state_of(comm, face, kind, (0, 0, 1, 1))
    state.set_loss_scale(4.0)
    for step in range(2):
        state.all_reduce(gradients(5, comm.rank, step))
    good = state.state_dict()
    before = digest(held_by(state)), state.stats()
    said = {}
    for what, each in spoilt(good).items():
        try:
            state.load_state_dict(each)
        except Exception as error:
            said[what] = type(error).__name__
        else:
            said[what] = "loaded"
    kept = (digest(held_by(state)), state.stats()) == before
    again = state.state_dict()
    kept &= all(again[key] == good[key] for key in ("steps", "loss_scale", "sharded"))
    state.load_state_dict(good)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigurationError, match=r"save its state_dict\(\)"):
            copied(getattr(state, "of_torch", state))
    return said, kept


@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_what_was_not_saved_is_not_loaded(face, kind):
    for said, kept in face(refused, kind):
        assert said == dict.fromkeys(said, ConfigurationError.__name__)
        assert kept
