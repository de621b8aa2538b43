"""A state that goes dense for good: DDP's own hooks, and nothing lost on the way there."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from tests.compression.test_choice import Clock
from tests.harness import Ranks, results
from tests.torch.compressed import HOOKS, Given, digest_of, given, group_of, state_of

BACKENDS = {"pycollective": pct.all_reduce_hook, "gloo": default_hooks.allreduce_hook}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, timeout=100.0, module=__name__) as started:
        yield lambda function, *args: results(started.call(function, *args))


def averages(model, comm, steps, spoil=None):
    """Digests of each step's averages; rank 1's gradient of `v` is infinite in step `spoil`."""
    found = []
    for step in range(steps):
        gradients = given(comm.rank, step)
        if step == spoil and comm.rank == 1:
            gradients["v"][3, 3] = float("inf")
        model.zero_grad()
        model(gradients).backward()
        found.append(digest_of(p.grad for p in model.parameters()))
    return found


def on_one_host(comm, backend, codec):
    """What a state on one host gives, what the dense hook gives, and the state's counts."""
    group = group_of(comm, backend)
    found = []
    for hook in (BACKENDS[backend], HOOKS[codec]):
        model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.001)
        state = None if hook is BACKENDS[backend] else state_of(model, codec, "1x4", group)
        model.register_comm_hook(state or group, hook)
        found.append(averages(model, comm, 3, spoil=1))
    return found, state.stats()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_on_one_host_the_hooks_are_the_dense_one(ranks, codec, backend):
    for (dense, ours), stats in ranks(on_one_host, backend, codec):
        assert ours == dense
        assert stats["way"] == "dense"
        assert (stats["steps"], stats["steps_given_up"], stats["payload_bytes"]) == (3, 0, 0)
        assert stats["dense_calls"] > 3  # several buckets a step


def settle(comm, backend, codec):
    """Auto is made to go dense: what came of all steps but what was put in, and what is held."""
    group = group_of(comm, backend)
    model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.001)
    state = state_of(model, codec, "4x1", group, when="auto")
    model.register_comm_hook(state, HOOKS[codec])
    state._choice.clock = Clock(state, {"compressed": 9.0, "dense": 1.0})  # a bucket
    error = {
        name: torch.zeros(p.shape, dtype=torch.float64) for name, p in Given().named_parameters()
    }
    ways = []
    for step in range(9):
        ways.append(state.stats()["way"])
        every = [given(rank, step) for rank in range(comm.size)]
        model.zero_grad()
        model(every[comm.rank]).backward()
        for name, p in model.module.named_parameters():
            error[name] += p.grad - sum(each[name].double() for each in every) / 4
    held = max((float(each.abs().max()) for each in state.flush().values()), default=0.0)
    return ways, max(float(each.abs().max()) for each in error.values()), held


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_what_was_held_comes_before_the_hooks_are_dense_ones(ranks, codec, backend):
    for ways, error, held in ranks(settle, backend, codec):
        assert ways == ["compressed", "dense"] * 3 + ["dense"] * 3
        assert error < 1e-4
        assert held == 0


def unknown(comm):
    """A state of another model, on one host as elsewhere."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group)
    state = state_of(Given(), "int8", "1x4", group)
    model.register_comm_hook(state, pct.int8_hook)
    model(given(comm.rank, 0)).backward()


def test_a_state_of_another_model_is_refused_on_one_host_too(ranks):
    with pytest.raises(Exception, match="the state was not given"):
        ranks(unknown)
