"""reduce_scatter: each rank its shard of the average, the error kept, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError
from pycollective.compression import compressed_reduce_scatter
from tests.compression.players import KINDS, gradients, make, wide

SHAPES = {"w": (64, 120), "small": (40,)}
EVEN = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 0)]


def shards(comm, host_of, kind, seed, **options):
    """The worst error of delivered and held, what compression changed, and both, of each name."""
    state = make(comm, host_of, kind, SHAPES, **options)
    found = {}
    counts = {name: int(np.prod(shape)) // comm.size for name, shape in SHAPES.items()}
    put_in = {name: np.zeros(count) for name, count in counts.items()}
    came = {name: np.zeros(count) for name, count in counts.items()}
    for step in range(5):
        every = [gradients(seed, rank, step, SHAPES) for rank in range(comm.size)]
        with state.step():
            for name, count in counts.items():
                out = np.empty(count, np.float32)
                before = every[comm.rank][name].tobytes()
                assert compressed_reduce_scatter(out, every[comm.rank][name], state, name)
                assert every[comm.rank][name].tobytes() == before
                mean = sum(wide(each[name]) for each in every).reshape(-1) / comm.size
                put_in[name] += mean[comm.rank * count :][:count]
                came[name] += wide(out)
    state.load_state_dict(state.state_dict())  # goes through the whole, and back
    held = state.flush()
    for name, count in counts.items():
        kept = wide(held.get(name, np.zeros(SHAPES[name]))).reshape(-1)
        error = came[name] + kept[comm.rank * count :][:count] - put_in[name]
        found[name] = float(abs(error).max()), float(abs(came[name] - put_in[name]).max())
    return found, state.stats()


@pytest.mark.parametrize("host_of", EVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_and_what_is_held_are_what_was_put_in(pool, kind, host_of):
    for found, stats in pool(4).call(shards, host_of, kind, EVEN.index(host_of)):
        assert found["w"][0] < 1e-4
        assert found["small"][0] < 1e-5
        if max(host_of):
            assert found["w"][1] > 1e-3, "it was not compressed"
            assert 0 < stats["payload_bytes"] < stats["dense_bytes"]


def dense_shards(comm, host_of):
    """Whether shards of everything are those of a dense average, bit for bit."""
    state = make(comm, host_of, "top_k", SHAPES, density=1.0, values="float32")
    x = gradients(3, comm.rank, len(host_of) + host_of[1], SHAPES)["w"]
    out = np.empty(x.size // comm.size, np.float32)
    state.reduce_scatter(out, x, "w")
    comm.all_reduce(x, "avg")
    return out.tobytes() == x.reshape(comm.size, -1)[comm.rank].tobytes()


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_all_of_it_is_dense(pool, host_of):
    assert all(pool(4).call(dense_shards, host_of))


def not_finite(comm, kind):
    """Whether all outputs were NaN, and the next step as if the bad one had not been."""
    states = [make(comm, (0, 0, 1, 1), kind, SHAPES) for _ in range(2)]
    outs = [np.empty(64 * 30, np.float32) for _ in states]
    good = gradients(7, comm.rank, 0, SHAPES)["w"]
    bad = gradients(7, comm.rank, 1, SHAPES)["w"]
    if comm.rank == 2:
        bad[5, 7] = np.inf
    for state, out in zip(states, outs, strict=True):
        assert state.reduce_scatter(out, good, "w")
    assert not states[0].reduce_scatter(outs[0], bad, "w")
    nan = bool(np.isnan(outs[0]).all())
    for state, out in zip(states, outs, strict=True):
        assert state.reduce_scatter(out, good, "w")
    return nan, outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_as_if_it_had_not_been(pool, kind):
    assert pool(4).call(not_finite, kind) == [(True, True)] * 4


def refused(comm):
    """What is said of shards that cannot be."""
    said = []
    x = np.ones((64, 120), np.float32)

    def attempt(call):
        try:
            call()
        except ConfigurationError as error:
            said.append(str(error))

    uneven = make(comm, (0, 1, 0, 0), "int8", SHAPES)
    attempt(lambda: uneven.reduce_scatter(np.empty(1920, np.float32), x, "w"))
    odd = make(comm, (0, 0, 1, 1), "int8", {"odd": (7, 1033)})
    attempt(lambda: odd.reduce_scatter(np.empty(1, np.float32), np.ones(7231, np.float32), "odd"))
    state = make(comm, (0, 0, 1, 1), "int8", SHAPES)
    attempt(lambda: state.reduce_scatter(np.empty(1921, np.float32), x, "w"))
    state.reduce_scatter(np.empty(1920, np.float32), x, "w")
    attempt(lambda: state.all_reduce({"w": x}))
    state.all_reduce({"small": np.ones(40, np.float32)})
    attempt(
        lambda: state.reduce_scatter(np.empty(10, np.float32), np.ones(40, np.float32), "small")
    )
    return said


def test_what_has_no_shards_is_refused(pool):
    for uneven, odd, short, whole, sharded in pool(4).call(refused):
        assert "as many ranks on every host" in uneven
        assert "cannot be shared out evenly" in odd
        assert "1920 elements, not 1921" in short
        assert "went by reduce_scatter before" in whole
        assert "went by all_reduce before" in sharded
