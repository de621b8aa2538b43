"""Mailboxes in GPUs' memory are freed, and not before all peers have unmapped them, which the
stand-in's contexts do not survive. On the stand-in."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np

import pycollective as pc
from pycollective import _core
from tests.cuda import standin
from tests.cuda.arrays import on_its_gpu, starting
from tests.harness import Ranks, results

started = starting(__name__)


def used(comm):
    """The bytes of the rank's GPU that are taken; its context is well."""
    gc.collect()
    driver = standin.Driver()
    with driver.context(comm.device):
        assert driver("cuStreamSynchronize", None) == 0
    return (4 << 30) - driver.free_bytes(comm.device)


def made(comm, color=0):
    """A communicator that kernels have served, or None."""
    other = comm.split(color)
    if other is not None:
        assert other.device_path[0] == "peer", other.device_path
        array = on_its_gpu(other, np.ones(1000, np.float32))
        other.all_reduce(array)
        assert (array.to_numpy() == other.size).all()
    return other


def come_and_go(comm):
    """Whoever has a later communicator frees of the one before what nobody maps any more; who is
    left out of it maps it still."""
    taken = []
    for turn in range(6):
        for color in (0, None if comm.rank == turn % comm.size else 0):
            if (other := made(comm, color)) is not None:
                other.close()
        del other
        taken.append(used(comm))
        comm.barrier()
    assert comm.failure is None
    return taken


def test_mailboxes_are_freed_after_all_have_unmapped_them():
    with started(3) as ranks:
        for taken in results(ranks.call(come_and_go)):
            assert max(taken[3:]) <= max(taken[:3])


def late_work(comm):
    """Rank 1 leaves a failed communicator, and makes another, while a launch of it waits still."""
    taken = []
    for _ in range(2):
        other = comm.split(0)
        stream = _core.DeviceStream(comm.device)
        array = on_its_gpu(other, np.ones(1000, np.float32), stream=stream)
        other.all_reduce(array)
        array.to_numpy()
        release = None
        if comm.rank == 1:
            release = standin.Driver().hold(comm.device, stream.handle)
        other.all_reduce(array)
        comm.barrier()
        if comm.rank == 1:
            other.abort("enough")
        with suppress(pc.CollectiveError):
            other.close()
        del other
        comm.barrier()
        alone = comm.split(0 if comm.rank == 0 else None)
        comm.barrier()
        if release:
            threading.Timer(0.2, release).start()
        alone = comm.split(0 if comm.rank == 1 else None)
        del alone, array
        time.sleep(0.3)
        for _ in range(2):
            made(comm).close()
            comm.barrier()
        taken.append(used(comm))
    return taken


def test_what_is_under_way_when_its_communicator_is_left_is_awaited():
    with started(2) as ranks:
        for taken in results(ranks.call(late_work)):
            assert taken == taken[:1] * 2


HELD = {}


def lives(_, step):
    """With each life of `init` and close goes the node, and with it what this rank had of peers."""
    if step == "begin":
        HELD["comm"] = comm = pc.init(device="cuda")
        assert comm.device_path[0] == "peer", comm.device_path
        array = on_its_gpu(comm, np.ones(1000, np.float32))
        comm.all_reduce(array)
        array.to_numpy()
        return used(comm)
    if step == "close":
        HELD["comm"].close()
    else:
        HELD.clear()
    gc.collect()
    return 0


def test_one_life_after_the_other_takes_no_more():
    env = standin.environment(devices=8)
    with Ranks(2, module=__name__, variables=env, join=False, timeout=60) as ranks:
        taken = []
        for _ in range(9):
            taken += results(ranks.call(lives, "begin"))
            for step in ("close", "drop"):
                results(ranks.call(lives, step))
        # In use, and of those before what a peer may be late to unmap.
        assert max(taken) <= 3 * min(taken)


def unmapped_badly(comm, code):
    """Of rank 1 one peer's mailbox does not get unmapped, at first or for ever."""
    other = made(comm)
    other.close()
    del other
    comm.barrier()
    if comm.rank == 1:
        standin.Driver().fail("cuIpcCloseMemHandle", 1, code)
    for rank in (1, 0, 0):
        with suppress(pc.ConfigurationError):
            comm.split(0 if comm.rank == rank else None)
        comm.barrier()
    if comm.rank == 1 and code == 700:
        return None
    return used(comm)


def test_a_mailbox_that_stays_mapped_is_not_freed():
    for code in (999, 700):  # unknown, once; an illegal address, for good
        with started(2) as ranks:
            first, second = results(ranks.call(unmapped_badly, code))
            assert first > 0, (first, second)


def in_a_fork(comm):
    before = comm.split(0)
    before.use_device("cuda")
    assert before.device_path[0] == "peer"
    before.close()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.use_device("cuda")
        except pc.ConfigurationError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    said = os.read(read_end, 4096).decode()
    comm.barrier()
    comm.use_device("cuda")
    made(comm).close()
    return status, said, comm.failure


def test_a_fork_leaves_all_to_its_parent():
    with Ranks(2, module=__name__, variables=standin.environment(devices=8)) as ranks:
        for status, said, failure in results(ranks.call(in_a_fork)):
            assert (status, failure) == (0, None)
            assert "this process is a fork" in said


def killed_beside_its_fork(comm):
    """What a dead rank mapped nobody maps any more, though a child of it lives."""
    others = comm.split(0 if comm.rank < 2 else None)
    all_of_them = made(comm)
    if comm.rank == 2:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 20
    while all_of_them.failure is None and time.monotonic() < until:
        with suppress(pc.CollectiveError):
            all_of_them.barrier()
    all_of_them.close()
    del all_of_them
    taken = []
    for _ in range(3):
        made(others).close()
        others.barrier()
        taken.append(used(comm))
    return taken


def test_a_dead_rank_maps_nothing():
    with started(3) as ranks:
        first, second, killed = ranks.call(killed_beside_its_fork)
        assert killed.exit_code == -signal.SIGKILL
        for each in (first, second):
            assert each.error is None, each.error
            assert each.result[1] <= each.result[0]


def while_another_thread_unmaps(comm):
    """The lock of the interpreter is free, and whoever drops the communicator does not wait."""
    other = made(comm)
    other.close()
    comm.barrier()
    stream = _core.DeviceStream(comm.device)
    release = standin.Driver().hold(comm.device, stream.handle)
    thread = threading.Thread(target=comm.split, args=(0,))
    thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    del other
    gc.collect()
    took = time.monotonic() - begun
    release()
    thread.join()
    return took


def test_dropping_waits_for_no_gpu():
    with started(2) as ranks:
        assert max(results(ranks.call(while_another_thread_unmaps))) < 5
