"""A state on one host is dense, and so are the first steps that are asked for: the contract's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
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

BACKENDS = ("pycollective", "gloo")


ranks = ranks_of(__name__, 4)


def beside_the_dense_hook(comm, backend, codec, topology, spoil, **options):
    """Each step's averages by the dense hook and by ours, what ours held then, and its counts.

    Rank 1's gradient of `v` is infinite in step `spoil`.
    """
    group = group_of(comm, backend)
    found, held = [], []
    for hook in (pct.all_reduce_hook, HOOKS[codec]):
        model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.001)
        state = None
        if hook is HOOKS[codec]:
            state = state_of(model, codec, topology, group, **options)
        model.register_comm_hook(state or group, hook)
        averages = []
        for step in range(4):
            gradients = given(comm.rank, step)
            if step == spoil and comm.rank == 1:
                gradients["v"][3, 3] = float("inf")
            model.zero_grad()
            model(gradients).backward()
            averages.append(digest_of(p.grad for p in model.parameters()))
            if state:
                held.append(state.stats()["residual_bytes"])
        found.append(averages)
    return *found, held, state.stats()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_on_one_host_the_hooks_are_the_dense_one(ranks, codec, backend):
    outcomes = ranks(partial(beside_the_dense_hook, spoil=1), backend, codec, "1x4")
    for dense, ours, held, stats in outcomes:
        assert ours == dense
        assert held == [0] * 4
        assert stats["way"] == "dense"
        assert (stats["steps"], stats["steps_given_up"], stats["payload_bytes"]) == (4, 0, 0)
        assert stats["dense_calls"] > 4  # several buckets a step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_the_hooks_start_densely(ranks, codec, backend):
    call = partial(beside_the_dense_hook, spoil=None, dense_steps=2)
    for dense, ours, held, stats in ranks(call, backend, codec, "2x2"):
        assert ours[:2] == dense[:2]
        assert ours[2] != dense[2]
        assert ours[3] != dense[3]
        assert held[:2] == [0, 0]
        assert held[2] > 0
        assert (stats["steps"], stats["way"]) == (4, "compressed")


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
