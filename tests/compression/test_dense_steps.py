"""`dense_steps`: the first steps are dense to the bit and hold nothing; then all begins."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compression.players import KINDS, digest, gradients, held_by, make

HOSTS = [(0, 1, 2, 3), (0, 0, 1, 1)]


def started(comm, host_of, kind, dense_steps, spoil=None):
    """Of each step: the averages' digest, the dense ones', what is held, and what stats say."""
    state = make(comm, host_of, kind, dense_steps=dense_steps)
    found = []
    for step in range(dense_steps + 3):
        if step == spoil:
            bad = gradients(1, comm.rank, step)
            if comm.rank == 1:
                bad["w"][3, 4] = np.inf
            assert not state.all_reduce(bad)
        mine, want = (gradients(1, comm.rank, step) for _ in range(2))
        way = state.stats()["way"], state.stats()["why"]
        assert state.all_reduce(mine)
        for each in want.values():
            comm.all_reduce(each, "avg")
        found.append((digest(mine), digest(want), digest(held_by(state)), way))
    fresh = make(comm, host_of, kind)
    for step in range(dense_steps, dense_steps + 3):
        mine = gradients(1, comm.rank, step)
        fresh.all_reduce(mine)
        found.append((digest(mine), digest(held_by(fresh))))
    return found, state.stats()


@pytest.mark.parametrize("host_of", HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_steps_are_dense_and_the_rest_a_fresh_states(pool, kind, host_of):
    for spoil in (None, 1):  # a step that does not count is none of them
        for found, stats in pool(4).call(started, host_of, kind, 2, spoil):
            steps, fresh = found[:5], found[5:]
            for got, want, held, way in steps[:2]:
                assert got == want
                assert held == digest({})
                assert way == ("dense", "the first 2 steps are dense")
            assert [(got, held) for got, _, held, _ in steps[2:]] == fresh
            assert all(got != want for got, want, _, _ in steps[2:])
            assert steps[2][3] == ("compressed", "asked for")
            assert (stats["steps"], stats["steps_given_up"]) == (5, spoil is not None)
            assert (stats["dense_calls"], stats["compressed_calls"]) == (
                2 + stats["steps_given_up"],
                3,
            )


def densities(comm):
    """The density and the way of each step, of a dense start and a warm-up."""
    state = make(comm, HOSTS[0], "top_k", dense_steps=2, warm_up=2)
    found, ways = [], []
    for step in range(6):
        found.append(state.density)
        ways.append(state.stats()["way"])
        state.all_reduce(gradients(2, comm.rank, step))
    return found, ways


def test_the_warm_up_begins_after_the_dense_steps(pool):
    full, least = 1.0, 0.03
    for found, ways in pool(4).call(densities):
        falling = [full * least ** (part / 3) for part in (1, 2)]
        assert found == pytest.approx([falling[0]] * 3 + falling[1:] + [least] * 2)
        assert ways == ["dense"] * 2 + ["compressed"] * 4


def saved(comm, host_of, kind):
    """Ways after a state was saved within the dense start and loaded into another."""
    state, loaded = (make(comm, host_of, kind, dense_steps=3) for _ in range(2))
    state.all_reduce(gradients(3, comm.rank, 0))
    loaded.load_state_dict(state.state_dict())
    ways, same = [], True
    for step in range(1, 5):
        ways.append(loaded.stats()["way"])
        one, other = (gradients(3, comm.rank, step) for _ in range(2))
        state.all_reduce(one)
        loaded.all_reduce(other)
        same &= digest(one) == digest(other)
    return ways, same


@pytest.mark.parametrize("kind", ["one_bit", "top_k"])
def test_the_dense_start_goes_on_where_it_was_saved(pool, kind):
    for ways, same in pool(4).call(saved, HOSTS[1], kind):
        assert ways == ["dense"] * 2 + ["compressed"] * 2
        assert same


def shards(comm):
    """Shards of the dense start, and those of dense averages."""
    state = make(comm, HOSTS[1], "top_k", dense_steps=1)
    x = gradients(4, comm.rank, 0)["w"]
    out = np.empty(x.size // comm.size, np.float32)
    state.reduce_scatter(out, x, "w")
    comm.all_reduce(x, "avg")
    return out.tobytes() == x.reshape(comm.size, -1)[comm.rank].tobytes(), held_by(state)


def test_shards_are_dense_at_the_start_too(pool):
    for same, held in pool(4).call(shards):
        assert same
        assert not held
