"""A rank that fails in a hook, a backward that is given up, states that are let go of."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycollective import CollectiveMismatch, ConfigurationError
from tests.compression.players import SOON, ends_with, held_by
from tests.harness import await_
from tests.torch.compressed import (
    HOOKS,
    Bucket,
    Given,
    digest_of,
    given,
    group_of,
    ranks_of,
    state_of,
)
from tests.torch.groups import standing_group

ranks = ranks_of(__name__, 2, scope="function")
four = ranks_of(__name__, 4, scope="function")
TIMEOUT = 8  # seconds, of groups over Gloo


def fails_alone(comm, what):
    """How backward ends where something of rank 0 alone fails, while that rank lives on."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.001)
    state = state_of(model, "one_bit", "2x1", group)
    model.register_comm_hook(state, HOOKS["one_bit"])
    if comm.rank == 0 and what == "scale":
        state.set_loss_scale(lambda: {}["scale"])
    elif comm.rank == 0 and what == "scale of 0":
        state.set_loss_scale(0.0)
    elif comm.rank == 0:  # as when it was replaced after the state was made
        del state._names[id(getattr(model.module, what))]
    comm.barrier()  # every rank has made its state, and is told in backward
    return ends_with(lambda: model(given(comm.rank, 0)).backward())


CAUSES = {
    "scale": "KeyError",
    "scale of 0": "ConfigurationError",
    "w": "ConfigurationError",  # of the last bucket
    "v": "ConfigurationError",  # of the first
}


@pytest.mark.parametrize("what", CAUSES)
def test_what_fails_in_one_ranks_hook_ends_every_backward(ranks, what):
    failed, other = ranks(fails_alone, what)
    assert failed[0] == CAUSES[what]
    assert other[0] == "CollectiveAborted"
    assert CAUSES[what] in other[1]
    assert max(failed[2], other[2]) < SOON


_alive = []  # states that are not let go of, by which the others would be told


def differently_called(comm, codec, topology, options):
    """How a call over Gloo ends that ranks 0 and 2 make of a, and ranks 1 and 3 of b."""
    standing_group(comm)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    shapes = {"a": (128, 128), "b": (16384,)}
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in shapes.items()]
    _alive.append(state_of(pairs, codec, topology, group, **options))
    name = "b" if comm.rank % 2 else "a"
    return ends_with(lambda: _alive[-1].all_reduce({name: torch.ones(shapes[name])}))


@pytest.mark.parametrize(
    ("codec", "topology", "options", "waiting"),
    [
        ("top_k", "2x2", {"density": 0.01}, 0),
        pytest.param("one_bit", "1,3", {}, 1, marks=pytest.mark.storm),
    ],
)
def test_ranks_of_a_host_that_differ_are_told_at_once(four, codec, topology, options, waiting):
    """A rank that is alone on its host may wait for the others until the group's timeout."""
    for name, text, taken in four(differently_called, codec, topology, options)[waiting:]:
        assert name == CollectiveMismatch.__name__, text
        assert taken < TIMEOUT - 1


def held_up(state):
    """Make the next exchange wait: an event that it has begun, and one that lets it go on."""
    began, go_on = threading.Event(), threading.Event()
    codec = state._feedback.codec
    exchange = codec.all_reduce

    def wait(*given):
        codec.all_reduce = exchange
        began.set()
        assert go_on.wait(20)
        return exchange(*given)

    codec.all_reduce = wait
    return began, go_on


def given_up(comm, codec):
    """A step after a backward that ended between its buckets, and one without it: what is held."""
    group, model = group_of(comm, "pycollective"), Given()
    found = []
    for abandoned in (True, False):
        state = state_of(model, codec, "2x1", group)
        if abandoned:
            began, go_on = held_up(state)
            state._hook(Bucket(model, {"v": given(comm.rank, 0)["v"]}, last=False))
            assert began.wait(20)
            threading.Timer(0.5, go_on.set).start()
        mine = {"w": given(comm.rank, 1)["w"]}
        with state.step():
            if abandoned:
                assert go_on.wait(20)
            assert state.all_reduce(mine)
        held = {name: each.tobytes() for name, each in held_by(state).items()}
        found.append((digest_of(mine.values()), held))
    return found[0] == found[1], sorted(found[0][1])


@pytest.mark.parametrize("codec", HOOKS)
def test_a_step_does_not_commit_what_a_given_up_backward_left(ranks, codec):
    for same, held in ranks(given_up, codec):
        assert same
        assert "worker of w" in held


def called_back(comm):
    """What a future's callback is told that calls a collective of the state it belongs to."""
    group, model = group_of(comm, "pycollective"), Given()
    state = state_of(model, "one_bit", "2x1", group)
    said = []

    def callback(future):
        every = given(comm.rank, 0)
        calls = state.flush, state.state_dict, lambda: state.all_reduce(every)
        for call in (*calls, state.step, state.close):
            try:
                call()
            except ConfigurationError as error:
                said.append(str(error))
        return future.value()

    began, go_on = held_up(state)
    future = state._hook(Bucket(model, given(comm.rank, 0), last=True)).then(callback)
    assert began.wait(20)
    go_on.set()
    await_(future.done, 20)
    return said, len(state.flush())


def test_a_callback_cannot_wait_for_itself(ranks):
    for said, flushed in ranks(called_back):
        assert len(said) == 5
        assert all("from a callback" in each for each in said)
        assert flushed == 2


def exchanging():
    return [each for each in threading.enumerate() if each.name == "pycollective-worker"]


def let_go(comm, how):
    """Threads of states that were let go of without a close."""
    group = group_of(comm, "pycollective")
    gc.collect()
    before = len(exchanging())
    for step in range(3):
        model = Given()
        state = state_of(model, "int8", "2x1", group)
        if how == "called":
            state.all_reduce(given(comm.rank, step))
        else:
            state._hook(Bucket(model, given(comm.rank, step), last=True)).wait()
    during = len(exchanging())
    del state
    gc.collect()
    await_(lambda: len(exchanging()) <= before, 20)
    return during > before


@pytest.mark.parametrize("how", ["called", "hooked"])
def test_a_state_let_go_of_leaves_no_thread(ranks, how):
    assert all(ranks(let_go, how))
