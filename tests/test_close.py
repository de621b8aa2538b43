"""close() with something under way: in another thread, under Ctrl-C, in a fork, at exit."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective.bootstrap import shutdown
from tests.harness import Ranks, asleep, await_, results, run_ranks

pytestmark = pytest.mark.alone  # how soon is part of it

MIB = 1 << 20


def close_while_pending(comm, folder):
    if comm.rank == 1:
        await_(lambda: comm.failure is not None)
        try:
            comm.barrier()
        except pc.CollectiveAborted as error:
            return str(error), time.monotonic()
    comm.all_reduce(np.zeros(1000, np.float32), async_op=True)
    (folder / "pending").touch()
    try:
        comm.close()
    except KeyboardInterrupt:
        return comm.closed, time.monotonic()
    return None, 0


def test_ctrl_c_interrupts_close_which_closes_all_the_same(tmp_path):
    with Ranks(2, module=__name__) as ranks:
        pid = ranks.joined().pids[0]
        sent = []

        def interrupt():
            await_((tmp_path / "pending").exists)
            await_(lambda: asleep(pid))  # in close
            sent.append(time.monotonic())
            os.kill(pid, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        (closed, at), (told, _) = results(ranks.call(close_while_pending, tmp_path))
    assert closed is True
    assert at - sent[0] < 0.3
    assert "rank 0" in told
    assert "interrupted" in told


def leave_a_thread_in_recv(comm):
    def receive():
        try:
            comm.recv(np.zeros(1), 1 - comm.rank)
        except pc.CollectiveError as error:
            ended.append(error)

    ended = []
    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    while not comm.pending and not ended:  # the other may be through already
        time.sleep(0.001)
    cpu = time.process_time()
    start = time.monotonic()
    shutdown.leave_all()  # what the end of the process calls
    took, cpu = time.monotonic() - start, time.process_time() - cpu
    thread.join(5)
    return took, cpu, [type(error).__name__ for error in ended]


def test_a_thread_that_still_receives_does_not_keep_the_process():
    for took, cpu, ended in results(run_ranks(leave_a_thread_in_recv, 2)):
        assert took < 1
        assert cpu < 0.2
        assert ended == ["CollectiveAborted"]


def fork_meanwhile(comm):
    """Fork again and again while the progress thread takes and releases its locks."""
    statuses = []
    x = np.ones(MIB, np.float32)
    for _ in range(30):
        works = [comm.all_reduce(x, op="max", async_op=True) for _ in range(8)]
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # ends a child that waits for a lock
            refused = 0
            try:
                works[-1].wait()
            except pc.ConfigurationError:
                refused = 1
            shutdown.leave_all()
            assert comm.closed
            os._exit(refused if not works[-1].done() else 1)
        statuses.append(os.waitpid(pid, 0)[1])
        for work in works:
            work.wait()
    return [os.waitstatus_to_exitcode(status) for status in statuses], float(x[-1])


def test_children_forked_amid_operations_leave_at_once():
    for statuses, value in results(run_ranks(fork_meanwhile, 2)):
        assert statuses == [1] * 30
        assert value == 1


def work_under_a_timer(comm):
    """A profiler's signals interrupt whatever the kernel does for us."""
    caught = []
    signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for _ in range(20):
            with comm.split(0) as group:  # commits memory
                if group.rank == 0:
                    time.sleep(0.05)  # the others look whether it lives
                group.barrier()
                work = group.send(np.zeros(10), (group.rank + 1) % group.size, async_op=True)
                group.recv(np.zeros(10), (group.rank - 1) % group.size)
                work.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return len(caught)


def test_signals_with_handlers_harm_nothing():
    assert min(results(run_ranks(work_under_a_timer, 3))) > 100
