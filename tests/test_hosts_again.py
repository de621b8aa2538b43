"""Communicators between hosts that come after others, or beside processes that leave or fork."""

from __future__ import annotations

import pytest

from tests.launchers import find, launcher

# MPI gives the number of a freed communicator to the next: nothing may come from the old one. All
# numbers grow from call to call, so anything of an earlier one makes a sum too small.
AGAIN = """
import time
import numpy as np
import pycollective as pc
from mpi4py import MPI

for round in range(4):
    comm = pc.init(timeout=10)
    for call, pause in enumerate((0, 0.3 if comm.rank == comm.size - 1 else 0), 2 * round + 1):
        time.sleep(pause)  # who waits says so to whom it awaits
        x = np.full(10, call * (comm.rank + 1.0))
        comm.all_reduce(x)
        assert (x == call * comm.size * (comm.size + 1) / 2).all(), (call, x)
    comm.close()
"""

AFTER_A_FAILURE = """
import numpy as np
import pycollective as pc
from mpi4py import MPI

comm = pc.init(timeout=10)
comm.timeout = 0.3
if comm.rank == 0:
    try:
        comm.send(np.full(3, 666.0), 1)
    except pc.CollectiveTimeout:
        pass
MPI.COMM_WORLD.Barrier()
comm.close()
comm = pc.init(timeout=10)
got = np.full(3, comm.rank + 1.0)
comm.send(got, 1) if comm.rank == 0 else comm.recv(got, 0)
assert (got == 1.0).all(), got
comm.close()
"""

SPLITS = """
import pycollective as pc
from mpi4py import MPI

comm = pc.init(timeout=10)
held = []
try:
    while len(held) < 5000:  # MPICH has numbers for 2,048 communicators
        held.append(MPI.COMM_SELF.Dup())
except MPI.Exception:
    pass
assert 1000 < len(held) < 5000, len(held)
for each in held[-20:]:
    each.Free()
for _ in range(50):
    part = comm.split(0 if comm.rank < 2 else 1)
    part.close()
comm.close()
"""

# Those that need nothing of the leavers go on, although nobody looked when they left.
LEAVERS = """
import os, time
import numpy as np
import pycollective as pc

comm = pc.init(timeout=20)
x = np.ones(10, np.float32)
comm.all_reduce(x)
if comm.rank in (2, 3):
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 0.4
    raise SystemExit
time.sleep(1)
for turn in range(20):
    time.sleep(0.05)
    x[:] = turn if comm.rank == 0 else -1
    comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
    assert (x == turn).all(), (turn, x)
"""


@pytest.fixture
def run(tmp_path):
    def run_ranks(name, text, ranks, topology, *arguments, **options):
        (tmp_path / "program.py").write_text(text)
        program = str(tmp_path / "program.py"), *arguments
        return launcher(name).run(ranks, *program, PYCOLLECTIVE_TOPOLOGY=topology, **options)

    return run_ranks


@pytest.mark.parametrize(("text", "ranks"), [(AGAIN, 3), (AFTER_A_FAILURE, 2)], ids=["end", "fail"])
@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.storm)])
def test_a_communicator_hears_nothing_of_the_one_before(run, text, ranks, mpi):
    done = run(mpi, text, ranks, f"{ranks}x1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.storm
def test_splits_give_back_what_they_take_of_mpi(run):
    find("mpich")
    done = run("mpich", SPLITS, 4, "3,1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.alone
def test_ranks_that_leave_while_nobody_looks_harm_nobody(run):
    done = run("forks", LEAVERS, 4, "4x1")
    assert done.returncode == 0, done.stdout + done.stderr
