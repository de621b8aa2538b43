"""Failures through torch: typed, named, on every rank, never a hang and never a crash."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch
from pycollective import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailure,
)
from tests.harness import await_, results, run_ranks
from tests.torch.groups import backend_of, join, standing_group

pytestmark = pytest.mark.alone  # how soon is part of it


@contextmanager
def new_group(comm, timeout=30.0):
    """A group that may fail: the ranks and their default group live on."""
    standing_group(comm)
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    yield group
    dist.destroy_process_group(group)


def raised(call, group):
    """What `call` raises, what the next call of another kind raises, and how soon (seconds)."""
    first = second = None
    try:
        call()
    except Exception as error:
        first = error
    start = time.monotonic()
    try:
        dist.barrier(group)
    except Exception as error:
        second = error
    return first, second, time.monotonic() - start


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
    return raised(loss.backward, dist.group.WORLD)


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
        assert seconds < 5


CALLS = {
    "sync": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "wait": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "objects": lambda group: dist.all_gather_object([None, None], 1, group=group),
}


def late(comm, how, told):
    """Rank 1 comes after the group's time is over: once rank 0 has been told."""
    with new_group(comm) as group:
        group.set_timeout(datetime.timedelta(seconds=0.5))  # not that of joining
        assert backend_of(group).options._timeout == datetime.timedelta(seconds=0.5)
        if comm.rank == 1:
            await_(told.exists)
        try:
            return raised(lambda: CALLS[how](group), group)
        finally:
            told.touch()


@pytest.mark.parametrize("how", CALLS)
def test_a_timeout_names_the_absentee_everywhere(pool, how, tmp_path):
    for first, second, _ in pool(2).call(late, how, tmp_path / "told"):
        assert isinstance(first, CollectiveTimeout), first
        assert "rank(s) 1 have not called it" in str(first)
        assert "after its timeout of 0.5 s" in str(first)
        assert isinstance(second, CollectiveTimeout)


def per_operation_timeout(comm, told):
    with new_group(comm) as group:
        if comm.rank == 1:
            await_(told.exists)
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.3)
        start = time.monotonic()
        first, _, _ = raised(lambda: group.allreduce([torch.ones(1)], options).wait(), group)
        told.touch()
        return first, time.monotonic() - start


def test_an_operation_may_have_a_timeout_of_its_own(pool, tmp_path):
    (error, seconds), _ = pool(2).call(per_operation_timeout, tmp_path / "told")
    assert isinstance(error, CollectiveTimeout)
    assert seconds < 10  # the group's is 30 s


def mismatch(comm):
    with new_group(comm) as group:
        tensor = torch.full((8,), float(comm.rank))
        op = dist.ReduceOp.MAX if comm.rank == 1 else dist.ReduceOp.SUM
        first, second, _ = raised(lambda: dist.all_reduce(tensor, op, group), group)
        return first, second, tensor.tolist()


def test_a_mismatch_names_both_sides_and_moves_nothing(pool):
    for rank, (first, second, values) in enumerate(pool(2).call(mismatch)):
        assert isinstance(first, CollectiveMismatch), first
        assert "rank 0" in str(first)
        assert "rank 1" in str(first)
        assert isinstance(second, CollectiveMismatch)
        assert values == [float(rank)] * 8


def aborting(comm):
    with new_group(comm) as group:
        if comm.rank == 1:
            time.sleep(0.3)
            group.abort()
        return raised(lambda: dist.all_reduce(torch.ones(4), group=group), group)


def test_abort_needs_no_peer_and_ends_every_call(pool):
    for first, second, _ in pool(2).call(aborting):
        assert isinstance(first, CollectiveAborted)
        assert "rank 1 aborted the communicator" in str(first)
        assert isinstance(second, CollectiveAborted)


def failing_subgroup(comm):
    """One group's failure is its own: the default group works on."""
    standing_group(comm)
    pair = dist.new_group([0, 1])
    error = type(None)
    if comm.rank < 2:
        odd = torch.ones(2 + comm.rank)
        error = type(raised(lambda: dist.all_reduce(odd, group=pair), pair)[0])
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.destroy_process_group(pair)
    return error, tensor.tolist()


def test_a_groups_failure_leaves_other_groups_alone(pool):
    outcomes = pool(3).call(failing_subgroup)
    assert [error for error, _ in outcomes] == [CollectiveMismatch, CollectiveMismatch, type(None)]
    assert all(values == [3.0, 3.0] for _, values in outcomes)


def interrupted(comm, how, told):
    with new_group(comm) as group:
        if comm.rank == 1:
            await_(told.exists)
            return raised(lambda: CALLS[how](group), group)[0]
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            CALLS[how](group)
        told.touch()
        return time.monotonic() - start


@pytest.mark.parametrize("how", ["sync", "wait"])
def test_ctrl_c_ends_a_blocked_call_and_tells_the_peers(pool, how, tmp_path):
    seconds, error = pool(2).call(interrupted, how, tmp_path / "told")
    assert 0.2 < seconds < 10
    assert isinstance(error, CollectiveAborted)
    assert "rank 0 was interrupted" in str(error)


def destroy_in_a_handler(comm, folder):
    join(comm)
    group = dist.group.WORLD
    communicator = backend_of(group).communicator

    def handle(*_):
        dist.destroy_process_group()
        (folder / "handled").touch()

    def interrupt():
        await_(lambda: communicator.pending)
        os.kill(os.getpid(), signal.SIGTERM)

    if comm.rank == 0:
        signal.signal(signal.SIGTERM, handle)
        threading.Thread(target=interrupt).start()
    else:
        await_((folder / "handled").exists)
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except CollectiveAborted as error:
        return str(error), communicator.closed, dist.is_initialized()
    return None


def test_a_signal_handler_may_destroy_the_group_whose_call_it_interrupts(tmp_path):
    said = "rank 0 aborted the communicator: a signal handler closed it in the middle of a call"
    (own, *here), (others, *there) = results(run_ranks(destroy_in_a_handler, 2, tmp_path))
    assert own == said
    assert others.startswith(f"all_reduce refused: this communicator failed before: {said}")
    assert (here, there) == ([True, False], [False, True])
