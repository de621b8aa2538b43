"""Leaving without saying so: the end of a process that never closed, and forks that join anew."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pycollective as pc
from pycollective.join.store import StoreClient, StoreServer
from tests.harness import ROOT, results, run_ranks
from tests.launch.test_launcher import OUTLIVE, timed

PROGRAM = """
import sys
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


def run(end, begun):
    """What rank 1 sees when rank 0 ends in this way."""
    return subprocess.run(
        [
            *(*timed(_NOTICE=30), "-n", "2"),  # rank 1 calls once rank 0 has failed
            *(sys.executable, "-c", OUTLIVE + PROGRAM.format(end=end), str(begun)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


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
        *(1, "CollectiveAborted", "exits with an exception"),
    ),
    "sudden end": ("os._exit(6)", 6, "PeerFailure", "died"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Three beside each other, as they wait much of their time."""
    folder = tmp_path_factory.mktemp("begun")
    with ThreadPoolExecutor(3) as threads:
        yield {how: threads.submit(run, end, folder / how) for how, (end, *_) in ENDS.items()}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_without_close_is_seen_at_once(how, ended):
    _, status, kind, said = ENDS[how]
    done = ended[how].result()
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(kind)
    assert said in done.stdout


def test_ranks_that_all_just_end_have_no_complaints():
    program = "import numpy as np, pycollective as pc; pc.init(timeout=20).all_reduce(np.ones(9))"
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", "run", "-n", "3", sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
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
    address = f"unix:@pycollective-test-{os.getpid()}-{os.urandom(6).hex()}"
    with StoreServer(address):
        assert results(run_ranks(join_in_a_fork, 3, address)) == [(6.0, "60.0")] * 3
