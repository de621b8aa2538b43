"""Failures through torch: typed, named, on every rank, never a hang and never a crash."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch
from pycollective import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailure,
)
from tests.harness import results, run_ranks
from tests.torch.groups import backend_of, join, process_group


def raised(call):
    """What `call` raises, and what the next call of another kind raises at once."""
    try:
        call()
    except Exception as error:
        first = error
    else:
        return None, None, 0.0
    start = time.monotonic()
    try:
        dist.barrier()
    except Exception as error:
        return first, error, time.monotonic() - start
    return first, None, 0.0


def backward_with_a_death(comm, hook):
    join(comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.2
    )
    if hook:
        model.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    for _ in range(3):
        model(torch.ones(2, 256)).sum().backward()
    loss = model(torch.ones(2, 256)).sum()
    if comm.rank == 1:
        # In the middle: when the third of the layers' gradients is there, after a bucket has gone.
        model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model(torch.ones(2, 256)).sum().backward()
    return raised(loss.backward)


@pytest.mark.parametrize("hook", [False, True])
def test_a_rank_that_dies_in_backward_is_named_by_backward(hook):
    outcomes = run_ranks(backward_with_a_death, 3, hook)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        first, second, seconds = results([outcomes[rank]])[0]
        assert isinstance(first, PeerFailure), first
        assert f"rank 1 (pid {outcomes[1].pid}) died" in str(first)
        assert isinstance(second, PeerFailure)
        assert "refused" in str(second)
        assert seconds < 0.2


def late(comm, how):
    """Rank 1 comes after the group's time is over."""
    join(comm, timeout=1.0)
    if comm.rank == 1:
        time.sleep(2)

    def call():
        if how == "sync":
            dist.all_reduce(torch.ones(4))
        elif how == "wait":
            dist.all_reduce(torch.ones(4), async_op=True).wait()
        elif how == "future":
            dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
        elif how == "callback":
            future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
            future.then(lambda f: f.value()[0]).wait()
        elif how == "functional":
            from torch.distributed import _functional_collectives as functional

            functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum().item()
        elif how == "barrier":
            dist.barrier()
        elif how == "objects":
            dist.all_gather_object([None, None], comm.rank)

    return raised(call)


@pytest.mark.parametrize(
    "how", ["sync", "wait", "future", "callback", "functional", "barrier", "objects"]
)
def test_a_timeout_names_the_absentee_everywhere(how):
    outcomes = results(run_ranks(late, 2, how))
    for first, second, _ in outcomes:
        # torch wraps what a Python callback raises.
        assert isinstance(first, RuntimeError if how == "callback" else CollectiveTimeout), first
        assert "CollectiveTimeout" in str(first) or isinstance(first, CollectiveTimeout)
        assert "rank(s) 1 have not called it" in str(first)
        assert isinstance(second, CollectiveTimeout)


def per_operation_timeout(comm):
    with process_group(comm, timeout=60) as group:
        if comm.rank == 1:
            time.sleep(1.5)
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.5)
        start = time.monotonic()
        error, _, _ = raised(lambda: group.allreduce([torch.ones(1)], options).wait())
        return error, time.monotonic() - start


def test_an_operation_may_have_a_timeout_of_its_own():
    (error, seconds), _ = results(run_ranks(per_operation_timeout, 2))
    assert isinstance(error, CollectiveTimeout)
    assert seconds < 1.4


def mismatch(comm, kind):
    with process_group(comm):
        tensor = torch.full((8,), float(comm.rank))
        odd = comm.rank == 1

        def call():
            if kind == "count":
                dist.all_reduce(tensor[: 5 if odd else 8])
            elif kind == "dtype":
                dist.all_reduce(tensor.double() if odd else tensor)
            elif kind == "reduce op":
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
            elif kind == "operation":
                dist.broadcast(tensor, 0) if odd else dist.all_reduce(tensor)
            elif kind == "root":
                dist.broadcast(tensor, 1 if odd else 0)

        first, second, _ = raised(call)
        return first, second, tensor.tolist()


@pytest.mark.parametrize("kind", ["count", "dtype", "reduce op", "operation", "root"])
def test_a_mismatch_names_both_sides_and_moves_nothing(kind):
    for rank, (first, second, values) in enumerate(results(run_ranks(mismatch, 2, kind))):
        assert isinstance(first, CollectiveMismatch), first
        assert "rank 0" in str(first)
        assert "rank 1" in str(first)
        assert isinstance(second, CollectiveMismatch)
        assert values == [float(rank)] * 8


def aborting(comm):
    with process_group(comm) as group:
        if comm.rank == 1:
            threading.Timer(0.3, group.abort).start()
        return raised(lambda: dist.all_reduce(torch.ones(4))) if comm.rank == 0 else _later()


def _later():
    time.sleep(0.6)
    return raised(lambda: dist.all_reduce(torch.ones(4)))


def test_abort_needs_no_peer_and_ends_every_call():
    for first, second, _ in results(run_ranks(aborting, 2)):
        assert isinstance(first, CollectiveAborted)
        assert "rank 1 aborted the communicator" in str(first)
        assert isinstance(second, CollectiveAborted)


def failing_subgroup(comm):
    """One group's failure is its own: the default group works on."""
    with process_group(comm):
        pair = dist.new_group([0, 1])
        error = None
        if comm.rank < 2:
            try:
                dist.all_reduce(torch.ones(2 + comm.rank), group=pair)
            except CollectiveError as caught:
                error = type(caught)
            assert int(backend_of(pair)._get_sequence_number_for_group()) == 1
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return error, tensor.tolist()


def test_a_groups_failure_leaves_other_groups_alone():
    outcomes = results(run_ranks(failing_subgroup, 3))
    assert [error for error, _ in outcomes] == [CollectiveMismatch, CollectiveMismatch, None]
    assert all(values == [3.0, 3.0] for _, values in outcomes)


def interrupted(comm, how):
    join(comm)
    if comm.rank == 1:
        time.sleep(0.8)
        return raised(lambda: dist.all_reduce(torch.ones(4)))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        if how == "sync":
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4), async_op=True).wait()
    except KeyboardInterrupt:
        return time.monotonic() - start
    return None


@pytest.mark.parametrize("how", ["sync", "wait"])
def test_ctrl_c_ends_a_blocked_call_and_tells_the_peers(how):
    seconds, (first, _, _) = results(run_ranks(interrupted, 2, how))
    assert 0.2 < seconds < 0.8
    assert isinstance(first, CollectiveAborted)
    assert "rank 0 was interrupted" in str(first)
