"""What groups cost, and that nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pycollective as pc
from tests.harness import ROOT, await_, committed, counts, results, run_ranks

MIB = 1 << 20


def test_sixteen_ranks_take_at_most_64_mb():
    assert sum(results(run_ranks(committed, 16))) <= 64_000_000


def make_many(comm, groups):
    before = counts()
    made = [comm.split(0) for _ in range(groups)]
    for i, each in enumerate(made):
        x = np.full(5000, i + 1, np.float32)
        each.all_reduce(x)
        assert (x == comm.size * (i + 1)).all(), i
    arrays = [np.full(5000, groups + i + 1, np.float32) for i in range(groups)]
    order = np.random.default_rng(comm.rank).permutation(groups)  # another on each rank
    works = {i: made[i].all_reduce(arrays[i], async_op=True) for i in order}
    for i in order[::-1]:
        works[i].wait(timeout=30)
        assert (arrays[i] == comm.size * (groups + i + 1)).all(), i
    return committed(comm), before, counts()


def test_hundreds_of_groups_share_one_segment_and_one_thread():
    answers = results(run_ranks(make_many, 4, 300))
    # Scaled to the 16 ranks for which the bound of 64 MB is given.
    assert sum(each[0] for each in answers) * 4 <= 5 * 64_000_000
    for _, (threads, files, maps), (threads_after, files_after, maps_after) in answers:
        assert threads_after <= threads + 1
        assert files_after <= files
        assert maps_after == maps


def make_and_close(comm):
    first = None
    for i in range(300):  # a page that each kept would be more than the bound
        sub = comm.split(0)
        x = np.full(10, i + 1, np.float32)
        sub.all_reduce(x)
        assert (x == comm.size * (i + 1)).all(), i  # in memory that another group had before
        sub.close()
        if i == 20:
            first = committed(comm)
    return first, committed(comm)


def test_closed_groups_give_their_memory_back():
    for early, late in results(run_ranks(make_and_close, 3)):
        assert late <= early + MIB


def blocked_cpu_seconds(comm):
    x = np.ones(10, np.float32)
    comm.all_reduce(x, async_op=True).wait(timeout=10)
    before = resource.getrusage(resource.RUSAGE_SELF)
    if comm.rank == 1:
        time.sleep(1.5)
        pending = comm.all_reduce(x, async_op=True)
    else:
        pending = comm.all_reduce(x, async_op=True)
        time.sleep(1.0)
    pending.wait(timeout=10)
    if comm.rank == 0:
        comm.barrier()
    else:
        time.sleep(1.0)
        comm.barrier()
    time.sleep(0.5)  # idle
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.alone  # how long it takes is part of it
def test_waiting_and_idling_burn_no_core():
    for seconds in results(run_ranks(blocked_cpu_seconds, 2)):
        assert seconds < 0.3  # of 3 s


def left_behind():
    sockets = [
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "@pycollective" in line
    ]
    return {*sockets, *os.listdir("/dev/shm")}


PROGRAM = """
import os, signal, sys
import numpy as np
import pycollective as pc
comm = pc.init(timeout=20)
x = np.ones(1_000_000, np.float32)
comm.all_reduce(x)
pending = comm.all_reduce(x, async_op=True)
open(f"{sys.argv[2]}/{comm.rank}", "w").close()
if sys.argv[1] == "normal":
    pending.wait(timeout=10)
if sys.argv[1] == "exception":
    raise SystemExit("an exception") if comm.rank else ValueError("an exception")
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.alone  # it looks at the whole machine
@pytest.mark.parametrize("how", ["normal", "exception", "kill", "kill the launcher"])
def test_nothing_is_left_behind(tmp_path, how):
    before = left_behind()
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    begun.mkdir()
    program.write_text(PROGRAM + ("import time; time.sleep(60)" if "launcher" in how else ""))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", "-n", "3", str(program), how, str(begun)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    if how == "kill the launcher":
        await_(lambda: len(os.listdir(begun)) == 3)
        assert len(ranks_of(program)) == 3
        assert left_behind() - before
        launcher.send_signal(signal.SIGKILL)
    status = launcher.wait(60)
    assert (status == 0) == (how == "normal")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (ranks_of(program) or left_behind() - before):
        time.sleep(0.1)
    assert ranks_of(program) == []
    assert left_behind() - before == set()


def ranks_of(program):
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(program) in each.read_text() and "pycollective\0run" not in each.read_text():
                found.append(each.parent.name)
        except OSError:
            continue  # it ended just now
    return found


def split_short_of_memory(comm):
    from pycollective import host_memory

    before = counts()
    usual = host_memory.headroom
    if comm.rank == 1:
        host_memory.headroom = lambda: host_memory.Headroom(100_000, "the limit of a test")
    said, memory = [], []
    for _ in range(100):
        try:
            comm.split(0)
        except pc.ConfigurationError as error:
            said.append(str(error))
            memory.append(committed(comm))
    host_memory.headroom = usual
    with comm.split(0) as group:
        group.barrier()
    return said, memory, [after - at for after, at in zip(counts(), before, strict=True)]


def test_a_split_without_memory_is_refused_on_every_rank_and_costs_nothing():
    for rank, (said, memory, grown) in enumerate(results(run_ranks(split_short_of_memory, 3))):
        assert len(said) == 100
        if rank == 1:
            assert "the limit of a test leaves 0.1 MiB" in said[0]
        else:
            assert said[0].startswith("split: refused on rank(s) 1: ConfigurationError: ")
        assert memory[-1] <= memory[5]
        assert grown == [0] * len(grown)


def split_evenly(comm):
    sub = comm.split(comm.rank % 2, key=-comm.rank)
    x = np.array([comm.rank], np.int64)
    members = np.empty(sub.size, np.int64)
    sub.all_gather(members, x)
    none = comm.split(None if comm.rank == 0 else 7)
    return sub.rank, members.tolist(), none is None


def test_split_orders_by_key_and_leaves_out_who_asks():
    assert results(run_ranks(split_evenly, 5)) == [
        (2, [4, 2, 0], True),
        (1, [3, 1], False),
        (1, [4, 2, 0], False),
        (0, [3, 1], False),
        (0, [4, 2, 0], False),
    ]


def fork_a_child_that_looks(comm):
    """What of this rank's memory a fork holds that lives on."""
    comm.all_reduce(np.ones(1000, np.float32))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        os.write(write, str(sum("memfd:pycollective" in each for each in held)).encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        count = int(told.read())
    os.waitpid(child, 0)
    with comm.split(0) as group:  # whose memory is made by the descriptor that the child closed
        group.all_reduce(np.ones(1000, np.float32))
    return count


def test_a_fork_that_lives_on_keeps_nothing_of_a_dead_ranks_memory():
    assert results(run_ranks(fork_a_child_that_looks, 2)) == [0, 0]
