"""What a compressed state keeps: by element, through files; and what it refuses by name."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from pycollective import ConfigurationError
from tests.harness import await_
from tests.torch.compressed import (
    HOOKS,
    Convolution,
    Given,
    digest_of,
    given,
    group_of,
    ranks_of,
    state_of,
)

ranks = ranks_of(__name__, 4)


def channels_last(comm, codec):
    """The worst difference of what is delivered and held from what was put in, by element."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Convolution(), process_group=group)
    state = state_of(model, codec, "2x2", group)
    model.register_comm_hook(state, HOOKS[codec])
    delivered, put_in, weights = 0.0, 0.0, []
    for step in range(3):
        every = [
            torch.randn(20, 30, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(4)
        ]
        model(every[comm.rank].to(memory_format=torch.channels_last)).backward()
        delivered = delivered + model.module.weight.grad.double()
        put_in = put_in + sum(each.double() for each in every) / 4
        weights.append(digest_of([model.module.weight.grad]))
        model.zero_grad()
    held = state.flush()["weight"]
    same_layout = held.stride() == model.module.weight.stride()
    return float((delivered + held.double() - put_in).abs().max()), weights, same_layout


@pytest.mark.parametrize("codec", HOOKS)
def test_channels_last_weights_keep_each_elements_error(ranks, codec):
    outcomes = ranks(channels_last, codec)
    assert max(error for error, *_ in outcomes) < 1e-5
    assert len({tuple(weights) for _, weights, _ in outcomes}) == 1
    assert all(same_layout for *_, same_layout in outcomes)


def saved_and_loaded(comm, codec, folder):
    """The next step of a state, and of states loaded from torch.save and from a checkpoint."""
    group = group_of(comm, "pycollective")
    model = Given()
    state, *others = (state_of(model, codec, "2x2", group) for _ in range(3))
    for step in range(2):
        state.all_reduce(given(comm.rank, step))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    others[0].load_state_dict(torch.load(file))
    torch.distributed.checkpoint.save({"error": state.state_dict()}, checkpoint_id=folder)
    found = {"error": others[1].state_dict()}
    torch.distributed.checkpoint.load(found, checkpoint_id=folder)
    others[1].load_state_dict(found["error"])
    outputs = []
    for each in (state, *others):
        mine = given(comm.rank, 2)
        each.all_reduce(mine)
        outputs.append(digest_of(mine.values()) + str(each.stats()["steps"] > 0))
    return outputs


@pytest.mark.parametrize("codec", HOOKS)
def test_states_go_through_save_and_through_a_checkpoint(ranks, codec, tmp_path):
    outcomes = ranks(saved_and_loaded, codec, str(tmp_path))
    assert len({output for found in outcomes for output in found}) == 1


def refusals(comm):
    """What is said, through backward or at once."""
    group = group_of(comm, "pycollective")
    said = {}

    def attempt(what, call):
        try:
            call()
        except ConfigurationError as error:
            said[what] = str(error)

    def backward(what, state, model=None, dtype=torch.float32):
        ddp = DistributedDataParallel(model or Given(dtype), process_group=group)

        made = state(ddp)
        ddp.register_comm_hook(made, pct.one_bit_hook)
        if comm.rank and isinstance(made, pct.OneBitState):  # what rank 0 tells is there first
            await_(lambda: made._feedback.groups.all._backend().communicator.failure, 20)
        attempt(what, lambda: ddp(given(comm.rank, 0, dtype)).backward())

    backward("another state", lambda ddp: pct.Int8State(ddp, group=group))
    backward("no state", lambda ddp: None)
    backward("another model", lambda ddp: pct.OneBitState(Given(), group=group))
    backward("fp64", lambda ddp: pct.OneBitState(ddp, group=group), dtype=torch.float64)
    state = pct.OneBitState(Given(), group=group)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1), (80, 90), check_invariants=False)
    attempt("sparse", lambda: state.all_reduce({"w": sparse}))
    return said


def test_what_cannot_be_is_refused_by_name(ranks):
    for said in ranks(refusals):
        assert "OneBitState, not a Int8State" in said["another state"]
        assert "OneBitState, not a NoneType" in said["no state"]
        assert "the state was not given" in said["another model"]
        assert "float64" in said["fp64"]
        assert "dense CPU tensor" in said["sparse"]
