"""Asynchronous work: it overlaps, its futures complete once and chain, and nothing is lost."""

from __future__ import annotations

import datetime
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycollective import CollectiveTimeout, ConfigurationError
from tests.harness import await_, results, run_ranks
from tests.torch.groups import process_group, standing_group

MEGABYTE = 1 << 18  # floats


def overlap(comm, issued: Path):
    """The collective ends while this thread computes and never looks."""
    standing_group(comm)
    tensor = torch.full((16 * MEGABYTE,), float(comm.rank + 1))
    if comm.rank == 1:
        await_(issued.exists)
    work = dist.all_reduce(tensor, async_op=True)
    issued.touch()  # for which rank 1 waits before it calls
    deadline = time.monotonic() + 20
    while tensor[-1].item() != 3.0 and time.monotonic() < deadline:
        torch.ones(1000).sum()
    ended = tensor[-1].item() == 3.0
    assert work.wait()
    return ended, bool((tensor == 3).all())


def test_a_collective_goes_on_while_the_caller_computes(pool, tmp_path):
    assert pool(2).call(overlap, tmp_path / "issued") == [(True, True)] * 2


def not_yet(comm):
    """A work whose peer has not come is under way, and says so."""
    standing_group(comm)
    gate = dist.new_group()
    if comm.rank == 1:
        dist.barrier()  # not before rank 0 has looked
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, group=gate, async_op=True)
    seen = None
    if comm.rank == 0:
        future = work.get_future()
        seen = work.is_completed(), work.is_success(), future.done()
        with pytest.raises(
            CollectiveTimeout,
            match="wait timed out after its timeout of 50 ms; the operation goes on",
        ):
            work.wait(datetime.timedelta(milliseconds=50))
        dist.barrier()
    assert work.wait()
    assert work.get_future().wait()[0] is not None
    assert work.is_completed()
    assert work.exception() is None
    assert torch.equal(work.result()[0], torch.full((4,), 2.0))
    dist.destroy_process_group(gate)
    return seen


def test_a_work_under_way_says_so_and_a_wait_can_run_out(pool):
    assert pool(2).call(not_yet)[0] == (False, False, False)


def futures(comm):
    standing_group(comm)
    tensor = torch.arange(4.0) + comm.rank
    future = dist.all_reduce(tensor, async_op=True).get_future()
    (value,) = future.wait()
    assert value.data_ptr() == tensor.data_ptr()
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    twice = doubled.then(lambda f: f.value() * 2)
    strided = torch.ones(4, 2)[:, 0]
    work = dist.all_reduce(strided, async_op=True)
    assert work.get_future() is not None
    assert work.get_future().wait()[0].tolist() == [2.0] * 4
    assert strided.tolist() == [2.0] * 4
    chained = twice.wait().tolist()  # before others write to what it reads
    after_the_end = dist.all_reduce(tensor, async_op=True)
    after_the_end.wait()
    assert after_the_end.get_future().done()
    return chained


def test_futures_hold_the_outputs_and_chain(pool):
    # 0+1, 1+2, ... summed over 2 ranks, twice, then doubled twice
    for got in pool(2).call(futures):
        assert got == [8.0, 24.0, 40.0, 56.0]


def callbacks_that_wait(comm, count):
    """Each callback of rank 0 blocks in a second collective, to which rank 1 comes in the opposite
    order: all of them wait at once, the first until the last has had its turn."""
    standing_group(comm)
    groups = [dist.new_group() for _ in range(count)]
    tensors = [torch.full((4,), float(i)) for i in range(count)]

    def chain(future, group):
        second = dist.all_reduce(future.value()[0], group=group, async_op=True)
        return second.get_future().wait()[0], threading.get_ident()

    if comm.rank == 0:
        started = []
        for tensor, group in zip(tensors, groups, strict=True):
            first = dist.all_reduce(tensor, group=group, async_op=True).get_future()
            started.append(first.then(lambda f, group=group: chain(f, group)))
        dist.barrier()
        ended = [future.wait() for future in started]
    else:
        dist.barrier()
        for tensor, group in zip(tensors, groups, strict=True):
            dist.all_reduce(tensor, group=group)
        for tensor, group in reversed(list(zip(tensors, groups, strict=True))):
            dist.all_reduce(tensor, group=group)
        ended = [(tensor, 0) for tensor in tensors]
    for group in groups:
        dist.destroy_process_group(group)
    return [tensor[0].item() for tensor, _ in ended], len({thread for _, thread in ended})


def test_callbacks_may_wait_for_other_collectives(pool):
    (values, threads), (others, _) = pool(2).call(callbacks_that_wait, 12)
    assert values == others == [i * 4.0 for i in range(12)]
    assert threads == 12


def grad_mode_in_callback(comm):
    standing_group(comm)
    dist.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
    with torch.no_grad():
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        return future.then(lambda f: torch.is_grad_enabled()).wait()


def test_callbacks_see_the_issuers_grad_mode(pool):
    assert pool(2).call(grad_mode_in_callback) == [False, False]


def futures_at_every_moment(comm, turns):
    """Asks for the future before, while and after the progress thread says that it is done."""
    standing_group(comm)
    total = 0.0
    for turn in range(turns):
        tensor = torch.full((20_000,), 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        pause = time.perf_counter() + turn % 40 * 2e-6
        while time.perf_counter() < pause:
            pass
        total += work.get_future().then(lambda f: f.value()[0][-1].item()).wait()
    return total


def test_a_future_asked_for_at_any_moment_completes_once(pool):
    assert pool(2).call(futures_at_every_moment, 300) == [600.0] * 2


def forgotten(comm):
    """Works that nobody keeps: the tensors must live until the core is done with them."""
    standing_group(comm)
    dist.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
    kept = [torch.full((MEGABYTE,), 1.0) for _ in range(4)]
    for tensor in kept:
        dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(torch.full((MEGABYTE,), 1.0), async_op=True)  # only the core has this one
        dist.all_reduce(torch.from_numpy(np.ones(MEGABYTE, np.float32)), async_op=True)
    strided = torch.ones(MEGABYTE, 2)[:, 0]
    dist.all_reduce(strided, async_op=True)
    dist.barrier()
    deadline = time.monotonic() + 10
    while not bool((strided == 2).all()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [bool((tensor == 2).all()) for tensor in [*kept, strided]]


def test_works_that_nobody_keeps_still_happen(pool):
    assert pool(2).call(forgotten) == [[True] * 5] * 2


def callback_during_destroy(comm):
    entered = threading.Event()
    ran = []
    with process_group(comm):
        if comm.rank == 1:
            time.sleep(0.1)

        def slow(future):
            entered.set()
            time.sleep(0.3)
            ran.append(future.value()[0].sum().item())

        dist.all_reduce(torch.ones(4), async_op=True).get_future().then(slow)
    return ran


def test_destroying_a_group_waits_for_its_callbacks():
    assert results(run_ranks(callback_during_destroy, 2)) == [[8.0], [8.0]]


def fork_with_work_pending(comm):
    """A child is forked while futures wait; it tries to use the group, and ends normally."""
    standing_group(comm)
    dist.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
    tensor = torch.ones(1 << 16)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0].sum().item())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(ConfigurationError, match="this process is a fork"):
                dist.all_reduce(torch.ones(1))
            with pytest.raises(ConfigurationError, match="this process is a fork"):
                dist.all_reduce(torch.ones(1), async_op=True)
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    value = future.wait()
    dist.barrier()
    return status, value, tensor[-1].item()


def test_a_forked_child_is_refused_and_harms_nobody():
    # Fresh ranks: in one that has had torch.profiler a forked child may crash or hang.
    assert results(run_ranks(fork_with_work_pending, 2)) == [(0, 2.0 * (1 << 16), 2.0)] * 2
