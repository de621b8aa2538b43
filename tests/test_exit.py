"""Leaving without saying so: the end of a process that never closed, and forks that join anew."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pycollective as pc
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.harness import results, run_ranks
from tests.joining import free_unix
from tests.launch.test_launcher import OUTLIVE, timed
from tests.launchers import python

PROGRAM = """
import os, sys, threading, time
import numpy as np
import pycollective as pc

comm = pc.init(timeout=20)
x = np.ones(1000)
comm.all_reduce(x)
if comm.rank == 0:
    until = time.monotonic() + 20
    while not os.path.exists(sys.argv[1]):  # else its end could come into rank 1's first call
        assert time.monotonic() < until, "rank 1 has not come"
        time.sleep(0.01)
    {end}
else:
    open(sys.argv[1], "w").close()
    outlive_the_others()
    try:
        while True:
            comm.all_reduce(x)
    except pc.CollectiveError as error:
        sys.stdout.write(f"{{type(error).__name__}}: {{error}}\\n")
"""


def launched(command, *program):
    """What `pycollective run` of a program's text with its arguments comes to."""
    return python(*command, sys.executable, "-c", *program, status=None)


PATIENT = [*timed(_NOTICE=30)[1:], "-n", "2"]  # rank 1 calls once rank 0 has failed
USUAL = ["-m", "pycollective", "run", "--no-tag-output", "-n", "2"]


# What ends the main thread, while another that the interpreter joins is blocked in a call.
BESIDE_A_THREAD = """
    threading.Thread(target=comm.recv, args=(x, 1)).start()
    while not comm.pending:
        time.sleep(0.01)
    raise ValueError("bad batch")
"""
BESIDE_AN_EXECUTOR = """
    from concurrent.futures import ThreadPoolExecutor
    threads = ThreadPoolExecutor(1)
    threads.submit(comm.recv, x, 1)
    while not comm.pending:
        time.sleep(0.01)
    raise ValueError("bad batch")
"""
# Ctrl-C cancels the task, and is raised when asyncio has joined its threads.
IN_ASYNCIO = """
    import asyncio, signal
    async def main():
        call = asyncio.create_task(asyncio.to_thread(comm.recv, x, 1))
        while not comm.pending:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await call
    asyncio.run(main())
"""

ENDS = {
    "end": ("pass", 0, "PeerFailure", "closed its communicator"),
    "exit": ("sys.exit(5)", 5, "PeerFailure", "closed its communicator"),
    "dropped": ("del comm", 0, "PeerFailure", "rank 0 (pid"),
    "pending": (
        "keep = comm.all_reduce(x, async_op=True)",
        *(0, "CollectiveAborted", "exits with operations pending"),
    ),
    "exception": (
        "raise ValueError('bad batch')",
        *(1, "CollectiveAborted", "exits with ValueError: bad batch"),
    ),
    "sudden end": ("os._exit(6)", 6, "PeerFailure", "died"),
    "exception beside a thread": (
        BESIDE_A_THREAD,
        *(1, "CollectiveAborted", "exits with ValueError: bad batch"),
    ),
    "exception beside an executor": (
        BESIDE_AN_EXECUTOR,
        *(1, "CollectiveAborted", "exits with ValueError: bad batch"),
    ),
    "Ctrl-C in asyncio": (IN_ASYNCIO, 130, "CollectiveAborted", "rank 0 was interrupted in recv"),
}

if sys.version_info < (3, 11):
    del ENDS["Ctrl-C in asyncio"]  # nothing tells there that asyncio waits for its threads


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Three beside each other, as they wait much of their time."""
    folder = tmp_path_factory.mktemp("begun")
    with ThreadPoolExecutor(3) as threads:
        yield {
            how: threads.submit(
                launched, PATIENT, OUTLIVE + PROGRAM.format(end=end), str(folder / how)
            )
            for how, (end, *_) in ENDS.items()
        }


@pytest.mark.parametrize("how", ENDS)
def test_an_end_without_close_is_seen_at_once(how, ended):
    _, status, kind, said = ENDS[how]
    done = ended[how].result()
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(kind)
    assert said in done.stdout


ANOTHER_PROGRAM = """
import sys, threading
import numpy as np
import pycollective as pc

comm = pc.init(timeout=20)
made = []

def make_another():
    try:
        comm.recv(np.ones(1), 1)
    except pc.CollectiveAborted:  # by the end of the main thread
        made.append(pc.init(timeout=20))

if comm.rank == 0:
    threading.Thread(target=make_another).start()
    raise ValueError("bad batch")

def say_how_it_ends(comm):
    try:
        comm.barrier()
    except pc.CollectiveError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\\n")

say_how_it_ends(comm)
say_how_it_ends(pc.init(timeout=20))
"""


def test_what_a_thread_makes_after_the_exception_is_aborted_too():
    done = launched(PATIENT, ANOTHER_PROGRAM)
    assert done.returncode == 1, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    for each in said:
        assert each.startswith("CollectiveAborted")
        assert "exits with ValueError: bad batch" in each


# Rank 0's threads are blocked while asyncio ends with an exception that is handled; one goes on
# beyond main's end.
GOES_ON = """
import asyncio, sys, threading, time
import numpy as np
import pycollective as pc

comm = pc.init(timeout=20)
x = np.ones(10)

async def fail():
    call = asyncio.create_task(asyncio.to_thread(comm.recv, np.ones(10), 1, tag=1))
    await asyncio.sleep(0.01)
    raise ValueError

def work():
    comm.recv(x, 1)
    threading.main_thread().join()
    reduce()

def reduce():
    for _ in range(100):
        comm.all_reduce(x)
    sys.stdout.write(f"rank {comm.rank} has come to the end\\n")

if comm.rank == 0:
    threading.Thread(target=work).start()
    while not comm.pending:
        time.sleep(0.01)
    try:
        asyncio.run(fail())
    except ValueError:
        comm.send(x, 1)
else:
    time.sleep(0.3)  # several looks of who is blocked
    comm.send(x, 0, tag=1)
    comm.recv(x, 0)
    comm.send(x, 0)
    reduce()
"""


def test_threads_go_on_where_main_just_ends():
    done = launched(USUAL, GOES_ON)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} has come to the end" for rank in range(2)]


def test_ranks_that_all_just_end_have_no_complaints():
    program = "import numpy as np, pycollective as pc; pc.init(timeout=20).all_reduce(np.ones(9))"
    done = launched(USUAL, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def join_in_a_fork(comm, address):
    """The sums of the ranks, and of their children, which use a communicator of their own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = StoreClient(address, timeout=20)
            with pc.init(rank=comm.rank, size=comm.size, store=store, timeout=20) as mine:
                x = np.full(100_000, 10.0 * (mine.rank + 1))
                mine.all_reduce(x, async_op=True).wait(timeout=10)
                os.write(write, str(x[-1]).encode())
            store.close()
        finally:
            os._exit(0)
    os.close(write)
    x = np.full(100_000, comm.rank + 1.0)
    for _ in range(50):
        comm.all_reduce(x.copy())
    comm.all_reduce(x, async_op=True).wait(timeout=10)
    with os.fdopen(read) as answer:
        of_child = answer.read()
    os.waitpid(child, 0)
    comm.barrier()
    return x[-1], of_child


def test_children_of_forks_join_anew_while_their_parents_go_on():
    with StoreServer(address := free_unix()):
        assert results(run_ranks(join_in_a_fork, 3, address)) == [(6.0, "60.0")] * 3
