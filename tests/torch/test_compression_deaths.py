"""Compressed DDP when a rank dies or groups go: an error on every other rank, soon, and no hang."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycollective import CollectiveAborted, CollectiveError, ConfigurationError, PeerFailure
from tests.harness import await_, results, run_ranks
from tests.joining import failing
from tests.torch.compressed import HOOKS, state_of
from tests.torch.groups import join

LIMIT = 5.0  # seconds until every rank has its error; the groups wait 60


def compressed(comm, backend, codec, topology):
    """DDP of four layers, a bucket each, and its state."""
    join(comm)
    group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(4)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.01, process_group=group
    )
    state = state_of(model, codec, topology, group)
    model.register_comm_hook(state, HOOKS[codec])
    return model, state


def backward(model):
    model(torch.ones(2, 128)).sum().backward()


def with_a_death(comm, backend, codec, topology):
    """What backward raises on the others, and what the state's next call does."""
    model, state = compressed(comm, backend, codec, topology)
    for _ in range(2):
        backward(model)
    calls = state.stats()["compressed_calls"]
    if comm.rank == 1:
        # When the third of the gradients is there: two buckets have gone, at least one is to come.
        def die(_):
            await_(lambda: state.stats()["compressed_calls"] > calls)
            os.kill(os.getpid(), signal.SIGKILL)

        model.module[1].weight.register_hook(die)
    first = failing(lambda: backward(model))
    buckets = state.stats()["compressed_calls"] - calls
    name = "0.weight"
    second = failing(lambda: state.all_reduce({name: torch.ones(128, 128)}))
    return first, second, buckets, state.stats()["steps"]


@pytest.mark.parametrize(
    ("backend", "codec", "topology"),
    [
        ("pycollective", "one_bit", "4x1"),
        ("pycollective", "one_bit", "2x2"),
        ("pycollective", "top_k", "4x1"),
        ("pycollective", "top_k", "2x2"),
        ("gloo", "int8", "2x2"),
        pytest.param("gloo", "int8", "4x1", marks=pytest.mark.storm),
    ],
)
def test_a_rank_that_dies_between_two_buckets_fails_backward_on_all(backend, codec, topology):
    outcomes = run_ranks(with_a_death, 4, backend, codec, topology)
    assert outcomes[1].exit_code == -signal.SIGKILL
    others = results([outcomes[rank] for rank in (0, 2, 3)])
    for first, second, buckets, steps in others:
        for error, seconds in (first, second):
            assert isinstance(error, CollectiveError), error
            assert seconds < LIMIT, error
        assert 1 <= buckets < 4, "it died in the middle"
        assert steps == 2
    errors = [first[0] for first, *_ in others]
    if backend == "gloo":  # a rank may hear of it from another, who has closed its connections
        told = [str(each) for each in errors if isinstance(each, PeerFailure)]
        assert any("rank(s) 1 failed" in each for each in told), errors
        # Rank 3 exchanges with 1 and 2, of which the one dies, and the other may close after it.
        assert "rank(s) 0 failed" not in str(errors[2]) or topology != "2x2", errors
    else:
        assert all(isinstance(each, PeerFailure | CollectiveAborted) for each in errors)
        assert isinstance(errors[0], PeerFailure)  # rank 0 waits for it under either topology
        assert "rank 1" in str(errors[0])
        assert "died" in str(errors[0])


def destroyed(comm, backend, codec, what):
    """One rank destroys while its exchange waits for the other: what both see, and how soon."""
    model, state = compressed(comm, backend, codec, "2x1")
    for _ in range(2):  # in the second DDP rebuilds its buckets, for which all ranks wait
        backward(model)
    seen = []
    if comm.rank == 0:
        thread = threading.Thread(target=lambda: seen.append(failing(lambda: backward(model))))
        thread.start()
        await_(lambda: state._exchange_thread.busy)
        time.sleep(0.2)  # it waits by now
        assert state._exchange_thread.busy
        if what == "destroy":
            dist.destroy_process_group()
        else:
            state._feedback.groups.abort("the test says so")
        thread.join(20)
        assert not thread.is_alive()
    else:
        time.sleep(1)
        seen.append(failing(lambda: backward(model)))
    second = failing(lambda: state.all_reduce({"0.weight": torch.ones(128, 128)}))
    if comm.rank == 0 and what == "abort":
        time.sleep(1.5)  # its process ends next, which the other may see before it is told why
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return seen[0], second


@pytest.mark.alone
def test_an_abort_while_hooks_are_under_way_fails_backward():
    for first, second in results(run_ranks(destroyed, 2, "pycollective", "one_bit", "abort")):
        for error, seconds in (first, second):
            assert isinstance(error, CollectiveAborted), error
            assert "the test says so" in str(error)
            assert seconds < 5


@pytest.mark.alone
def test_groups_destroyed_while_hooks_are_under_way_end_what_has_begun():
    """Or fail it by type; what comes later is refused."""
    typed = CollectiveError | ConfigurationError
    for first, second in results(run_ranks(destroyed, 2, "pycollective", "one_bit", "destroy")):
        assert first[0] is None or isinstance(first[0], typed), first
        assert isinstance(second[0], typed), second
        assert first[1] < 10
        assert second[1] < 5
