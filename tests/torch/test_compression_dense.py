"""A state on one host is dense: DDP's own hooks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from pycollective import ConfigurationError
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

BACKENDS = {"pycollective": pct.all_reduce_hook, "gloo": default_hooks.allreduce_hook}


ranks = ranks_of(__name__, 4)


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


def passed_on(comm, codec):
    """How often a state that is dense for good looked into a bucket, and whether another is known.

    The averages, and what is counted.
    """
    group, model, other = group_of(comm, "pycollective"), Given(), Given()
    state = state_of(model, codec, "1x4", group)
    bucket = Bucket(model, given(comm.rank, 0))
    for _ in range(4):
        HOOKS[codec](state, bucket).wait()
    beside = Bucket(model, given(comm.rank, 0))
    for _ in range(4):
        pct.all_reduce_hook(group, beside).wait()
    said = []
    for strange in (
        Bucket(other, {"w": given(comm.rank, 0)["w"]}),
        Bucket(model, {name: each.double() for name, each in given(comm.rank, 0).items()}),
    ):
        with pytest.raises(ConfigurationError) as raised:
            state._hook(strange)
        said.append(str(raised.value))
    counts = state.stats()["steps"], state.stats()["dense_calls"]
    return bucket.looks, torch.equal(bucket.buffer(), beside.buffer()), counts, said


@pytest.mark.parametrize("codec", HOOKS)
def test_a_bucket_is_looked_into_once_where_all_is_dense_for_good(ranks, codec):
    for looks, same, counts, (unknown, wide) in ranks(passed_on, codec):
        assert looks == 1
        assert same
        assert counts == (4, 4)
        assert "the state was not given" in unknown
        assert "float64" in wide
