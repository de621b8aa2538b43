"""What states keep in memory, against what docs/reference/compression.md says."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.compression.players import KINDS, TOPOLOGIES, gradients, make, residuals_of, size_of

SHAPES = {f"w{number}": (64, 256) for number in range(24)}
COUNT = sum(size_of(SHAPES).values())
LARGEST = max(size_of(SHAPES).values())


def kept(comm, host_of, kind):
    """Bytes kept after two steps, and what is held by kind."""
    state = make(comm, host_of, kind, SHAPES)
    for step in range(2):
        state.all_reduce(gradients(1, comm.rank, step, SHAPES))
    return state.stats()["residual_bytes"], {
        kind: sum(held.size for _, held in of) for kind, of in residuals_of(state)
    }


@pytest.mark.parametrize("host_of", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_residuals_take_8_bytes_an_element_of_share_and_region(pool, kind, host_of):
    outcomes = pool(4).call(kept, host_of, kind)
    for nbytes, held in outcomes:
        assert nbytes == 8 * sum(held.values())
    hosts = max(host_of) + 1
    assert sum(held["worker"] for _, held in outcomes) == hosts * COUNT
    assert sum(held.get("server", 0) for _, held in outcomes) in (0, COUNT)


def cleared(comm, kind, how):
    """Bytes kept after a flush, a reset or a load on one host, where all is dense; a step later."""
    state = make(comm, (0, 1, 2, 3), kind, SHAPES)
    for step in range(2):
        state.all_reduce(gradients(2, comm.rank, step, SHAPES))
    if how == "dense":
        saved = state.state_dict()
        state = make(comm, (0, 0, 0, 0), kind, SHAPES)
        state.load_state_dict(saved)
    else:
        getattr(state, how)()
    after = state.stats()["residual_bytes"]
    state.all_reduce(gradients(2, comm.rank, 2, SHAPES))
    return after, state.stats()["residual_bytes"]


@pytest.mark.parametrize("kind", ["one_bit", "top_k"])
def test_what_holds_nothing_has_no_memory(pool, kind):
    for how in ("flush", "reset"):
        assert [after for after, _ in pool(4).call(cleared, kind, how)] == [0] * 4


@pytest.mark.parametrize("kind", ["one_bit", "top_k"])
def test_one_host_keeps_4_bytes_an_element_until_they_are_delivered(pool, kind):
    assert pool(4).call(cleared, kind, "dense") == [(4 * COUNT, 0)] * 4


def flushed(comm, kind):
    """The most memory that a flush had at once, beyond what was there."""
    state = make(comm, (0, 1, 2, 3), kind, SHAPES)
    state.all_reduce(gradients(3, comm.rank, 0, SHAPES))
    tracemalloc.start()
    try:
        state.flush()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_a_flush_has_all_hosts_residuals_of_one_parameter_at_a_time(pool, kind):
    hosts = 4
    most = 4 * COUNT + 4 * (2 * hosts + 4) * LARGEST + (64 << 10)
    for peak in pool(4).call(flushed, kind):
        assert 4 * COUNT <= peak <= most < 4 * hosts * COUNT
