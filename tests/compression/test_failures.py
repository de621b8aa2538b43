"""One rank fails, or does otherwise than the others: all are told, long before any timeout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pycollective import CollectiveMismatch, ConfigurationError
from pycollective.compression.groups import groups_of_communicator
from pycollective.compression.header import header_bytes
from tests.compression.players import (
    KINDS,
    SHAPES,
    SOON,
    digest,
    ends_with,
    gradients,
    held_by,
    make,
)

_alive = []  # states that are not let go of, by which the others would be told


def own(comm, host_of, kind, shapes=SHAPES):
    """A state with groups of its own, which do not live through the test."""
    of, options = KINDS[kind]
    _alive.append(of(shapes, groups_of_communicator(comm, host_of=host_of), **options))
    return _alive[-1]


# A payload that only one rank reads.


def damaged(comm, kind):
    """What came to rank 1 from rank 0 is not what was sent."""
    shapes = {"w": (64, 120)}
    state, out = own(comm, (0, 1, 2, 3), kind, shapes), np.empty(64 * 30, np.float32)

    def scatter(step):
        state.reduce_scatter(out, gradients(1, comm.rank, step, shapes)["w"], "w")

    scatter(0)
    across = state._feedback.groups.across
    whole = across.all_to_all

    def damage(rows):
        came = whole(rows)
        came[0, header_bytes(len(shapes)) :] = 0xFF
        return came

    if comm.rank == 1:
        across.all_to_all = damage
    before = digest(held_by(state))
    found = ends_with(lambda: scatter(1))
    return *found, digest(held_by(state)) == before


@pytest.mark.parametrize("kind", ["top_k", "top_k of chunks"])
def test_a_damaged_payload_is_a_mismatch_on_every_rank(pool, kind):
    for name, text, taken, same in pool(4).call(damaged, kind):
        assert name == CollectiveMismatch.__name__
        assert "a damaged message" in text  # as rank 1 saw it
        assert taken < SOON
        assert same


def damaged_length(comm, kind, host_of, length):
    """How long a message is that comes to rank 1 from rank 0 is not what rank 0 said."""
    state = own(comm, host_of, kind)
    state.all_reduce(gradients(1, comm.rank, 0))
    ends = state._feedback.groups
    group = ends.local if ends.local.size > 1 else ends.across
    whole = group.all_gather

    def damage(row):
        assert row.nbytes < 1 << 20  # no memory is asked for by what rank 0 did not say
        came = whole(row)
        if row.nbytes in (8, 8 * group.size):
            came.view(np.int64)[0, 0] = length
        return came

    if comm.rank == 1:
        group.all_gather = damage
    before = digest(held_by(state))
    found = ends_with(lambda: state.all_reduce(gradients(1, comm.rank, 1)))
    return *found, digest(held_by(state)) == before


@pytest.mark.parametrize("length", [1 << 33, 1 << 62, -8])
@pytest.mark.parametrize(
    ("host_of", "waiting"),
    [((0, 1, 2, 3), 4), ((0, 0, 1, 1), 2)],  # what a host hands on within it is for it alone
)
def test_a_damaged_length_is_a_mismatch_on_every_rank(pool, host_of, waiting, length):
    outcomes = pool(4).call(damaged_length, "top_k", host_of, length)
    for name, text, taken, same in outcomes[:waiting]:
        assert name == CollectiveMismatch.__name__
        assert f"rank 0 tells of a message of {length} bytes" in text
        assert taken < SOON
        assert same


def shortened(comm):
    """How a call ends in which a rank tells all others of a message that ends in its header."""
    state = own(comm, (0, 1, 2, 3), "top_k")
    across = state._feedback.groups.across
    whole = across.all_gather

    def shorten(row):
        came = whole(row)
        if row.nbytes == 8:
            lengths = came.view(np.int64)
            lengths[lengths.argmin()] = 8
        return came

    across.all_gather = shorten
    return ends_with(lambda: state.all_reduce(gradients(1, comm.rank, 0)))


def test_a_message_that_ends_in_its_header_is_a_mismatch(pool):
    for name, text, _ in pool(4).call(shortened):
        assert (name, "a message of a wrong length" in text) == (CollectiveMismatch.__name__, True)


def lengthened(comm, host_of, way):
    """How a call ends in which rank 2 sends messages with four bytes behind their values."""
    shapes = {"w": (64, 120)}
    state, out = own(comm, host_of, "top_k", shapes), np.empty(64 * 30, np.float32)
    by_way = {
        "all_reduce": lambda mine: state.all_reduce({"w": mine}),
        "reduce_scatter": lambda mine: state.reduce_scatter(out, mine, "w"),
    }
    by_way[way](gradients(1, comm.rank, 0, shapes)["w"])
    comm.barrier()
    kernels = state._feedback.codec._kernels
    pack = kernels.pack
    if comm.rank == 2:
        kernels.pack = lambda *given: pack(*given) + 4
    before = digest(held_by(state))
    found = ends_with(lambda: by_way[way](gradients(1, comm.rank, 1, shapes)["w"]))
    return *found, digest(held_by(state)) == before


@pytest.mark.parametrize("way", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_a_message_with_bytes_behind_its_values_is_a_mismatch(pool, host_of, way):
    for name, text, taken, same in pool(4).call(lengthened, host_of, way):
        assert name == CollectiveMismatch.__name__
        assert "a damaged message" in text
        assert taken < SOON
        assert same


# Calls that are not the same.

ONE_HOST = (0, 0, 0, 0)  # where no message says what it is about
TWO = {"a": (70, 100), "b": (70, 100)}
DIFFERENT = [
    *itertools.product(
        [(0, 1, 2, 3), (0, 0, 1, 1)],
        ["one_bit", "top_k"],
        ["order", "fewer", "scale"],
    ),
    *itertools.product([ONE_HOST], ["one_bit"], ["name", "order", "type", "scale", "steps"]),
]


def differently_called(comm, host_of, kind, what):
    """How a call ends in which rank 3 passes or scales something else; what is held after it."""
    shapes = TWO if host_of == ONE_HOST else SHAPES
    state = own(comm, host_of, kind, shapes)
    state.all_reduce(gradients(1, comm.rank, 0, shapes))
    comm.barrier()  # else who still waits for the first step's last message is told in that
    before = digest(held_by(state))
    mine = gradients(1, comm.rank, 1, shapes)
    if what == "name":
        name = "b" if comm.rank == 3 else "a"
        mine = {name: mine[name]}
    elif comm.rank != 3:
        pass
    elif what == "order":
        mine = dict(reversed(mine.items()))
    elif what == "fewer":
        del mine["v"]
    elif what == "type":
        mine = {name: each.astype(np.float16) for name, each in mine.items()}
    elif what == "steps":
        state._feedback.steps += 1
    else:
        state.set_loss_scale(2.0)
    found = ends_with(lambda: state.all_reduce(mine))
    return *found, digest(held_by(state)) == before or (comm.rank == 3 and what == "scale")


@pytest.mark.parametrize(("host_of", "kind", "what"), DIFFERENT)
def test_ranks_that_call_differently_are_told(pool, host_of, kind, what):
    outcomes = pool(4).call(differently_called, host_of, kind, what)
    told = [name == CollectiveMismatch.__name__ for name, *_ in outcomes]
    assert any(told) if host_of == (0, 0, 1, 1) else all(told)
    for name, text, taken, same in outcomes:
        assert name
        assert taken < SOON
        assert same
        if host_of == ONE_HOST:
            assert ("loss scale" if what == "scale" else "other parameters") in text


# Errors of one rank, where the others are in a collective.


def fails_alone(comm, what):
    """Rank 0's memory, or its function for the loss scale, fails."""
    state = own(comm, (0, 0, 1, 1), "one_bit")
    state.all_reduce(gradients(1, comm.rank, 0))
    comm.barrier()  # every rank has left the last call, and is told in the next

    def fail(*_):
        raise MemoryError("no more")

    if comm.rank == 0:
        state.set_loss_scale(fail)
        residuals = state._feedback.codec.residuals["worker"]
        residuals.of = residuals.saved = fail
    calls = {
        "all_reduce": lambda: state.all_reduce(gradients(1, comm.rank, 1)),
        "flush": state.flush,
        "state_dict": state.state_dict,
    }
    return ends_with(calls[what])


def without_gradients(comm):
    return ends_with(lambda: own(comm, (0, 0, 1, 1), "top_k").all_reduce({}))


def test_no_gradients_are_refused(pool):
    for name, text, _ in pool(4).call(without_gradients):
        assert (name, "no gradients" in text) == (ConfigurationError.__name__, True)


@pytest.mark.parametrize("what", ["all_reduce", "flush", "state_dict"])
def test_an_error_of_one_rank_ends_the_others_waiting(pool, what):
    failed, *others = pool(4).call(fails_alone, what)
    assert failed[:2] == ("MemoryError", "no more")
    for name, text, taken in others:
        assert name == "CollectiveAborted"
        assert "MemoryError: no more" in text
        assert taken < SOON


# The one way in which density 1 is not dense.


def zeros(comm):
    """Two steps at density 1 of gradients that are -0.0 in places, and the dense averages."""
    shapes = {"w": (64, 120)}
    state = make(comm, (0, 1, 2, 3), "top_k", shapes, density=1.0, values="float32")
    found = []
    for step in range(2):
        mine = gradients(9, comm.rank, step, shapes)["w"]
        mine[:7] = -0.0
        want = mine.copy()
        state.all_reduce({"w": mine})
        comm.all_reduce(want, "avg")
        found.append((bool((mine == want).all()), mine[7:].tobytes() == want[7:].tobytes()))
    return found


def test_density_1_is_dense_but_for_the_sign_of_zeros(pool):
    for found in pool(4).call(zeros):
        assert found == [(True, True)] * 2


# Calls of other kinds, which begin in other groups.

OPTIONS = {
    "compressed": {},
    "dense": {"dense_steps": 9},
}


def others_kind(comm, host_of, differ, way, what, calls, kind="one_bit", steps=0):
    """How ranks end of which some call something else, after so many steps."""
    ends = groups_of_communicator(comm, host_of=host_of)
    state_of, options = KINDS[kind]
    _alive.append(state_of(SHAPES, ends, **options, **OPTIONS[way]))
    state, out = _alive[-1], np.empty(7000 // comm.size, np.float32)
    for step in range(steps):
        state.all_reduce(gradients(1, comm.rank, step))
    comm.barrier()  # so that none is still in one of these when another aborts
    mine = gradients(1, comm.rank, steps)
    by_kind = {
        "all_reduce": lambda: state.all_reduce(mine),
        "reduce_scatter": lambda: state.reduce_scatter(out, mine["w"], "w"),
        "flush": state.flush,
    }
    return ends_with(by_kind[calls if comm.rank in differ else what])


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize(
    ("host_of", "differ", "more"),
    [
        *(((0, 0, 1, 1), (3,), ()), ((0, 0, 1, 1), (0, 1), ())),
        *(((0, 1, 0, 0), (1,), ()), ((0, 1, 0, 0), (2,), ())),
        # Top-k's call begins with lengths, in the same group as others' digests and headers.
        *(((0, 1, 2, 3), (0,), ("top_k", steps)) for steps in range(4)),
    ],
)
def test_other_calls_are_a_mismatch_on_every_rank(pool, host_of, differ, more, way):
    pairs = [("all_reduce", "flush"), ("flush", "all_reduce")]
    if host_of == (0, 0, 1, 1):  # shards want as many ranks on every host
        pairs += [("reduce_scatter", "flush")]
    if host_of == (0, 0, 1, 1) or more[1:] == (0,):
        pairs += [("all_reduce", "reduce_scatter")]
    for what, calls in pairs:
        for name, _, taken in pool(4).call(others_kind, host_of, differ, way, what, calls, *more):
            assert name == CollectiveMismatch.__name__, (what, calls)
            assert taken < SOON


def owed_by_others(comm):
    """How a dense call ends that delivers error which one rank alone has forgotten."""
    ends = groups_of_communicator(comm, host_of=(0, 1, 2, 3))
    state_of, options = KINDS["one_bit"]
    _alive.append(state_of(SHAPES, ends, **options, **OPTIONS["dense"]))
    state = _alive[-1]
    state._feedback.carried.add({"w": np.ones(7000, np.float32)}, 1.0)  # as a load on one host does
    if comm.rank == 1:
        state.reset()
    comm.barrier()
    return ends_with(lambda: state.all_reduce(gradients(1, comm.rank, 0)))


def test_a_reset_on_one_rank_is_a_mismatch_and_no_other_average(pool):
    for name, _, taken in pool(4).call(owed_by_others):
        assert name == CollectiveMismatch.__name__
        assert taken < SOON
