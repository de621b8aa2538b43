"""Ranks that mpiexec starts find each other, and end together."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from tests.launchers import NAMES, find

PROGRAM = """
import sys
import numpy as np
import pycollective as pc

for turn, algorithm in enumerate(("auto", "ring", "tree"), 1):
    with pc.init(timeout=30) as comm:
        x = np.full(100_003, turn * (comm.rank + 1.0), np.float32)  # no two turns alike
        comm.all_reduce(x, algorithm=algorithm)
        assert (x == turn * comm.size * (comm.size + 1) / 2).all(), (turn, x)
sys.stdout.write(f"rank {comm.rank} of {comm.size} is fine\\n")
"""

FAILS = """
import numpy as np
import pycollective as pc

comm = pc.init(timeout=30)
if comm.rank == 1:
    raise ValueError("this rank has had enough")
comm.all_reduce(np.ones(10))
"""

LATE = """
import os, sys, time
import pycollective as pc
from mpi4py import MPI

rank, absent, told = MPI.COMM_WORLD.Get_rank(), int(sys.argv[1]), sys.argv[2]
MPI.COMM_WORLD.Barrier()
if rank == absent:
    until = time.monotonic() + 20
    while len(os.listdir(told)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    sys.exit()
try:
    pc.init(timeout=0.3)
except pc.CollectiveTimeout as error:
    sys.stdout.write(f"{error}\\n")
open(f"{told}/{rank}", "w").close()
"""


@pytest.fixture(params=NAMES)
def mpi(request):
    return find(request.param)


@pytest.fixture
def program(tmp_path):
    def write(text):
        (tmp_path / "program.py").write_text(text)
        return str(tmp_path / "program.py")

    return write


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_join(mpi, program, ranks):
    done = mpi.run(ranks, program(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {r} of {ranks} is fine" for r in range(ranks)
    ]


def test_a_rank_that_fails_ends_the_job(mpi, program):
    for _ in range(3):  # the first to end gives the others a moment, for which they may be too slow
        start = time.monotonic()
        done = mpi.run(3, program(FAILS))
        assert done.returncode != 0
        assert "this rank has had enough" in done.stderr
        assert time.monotonic() - start < 20
        told = re.findall(r"CollectiveAborted: .*rank 1 aborted the communicator", done.stderr)
        if len(told) == 2:
            return
    pytest.fail(done.stderr)


@pytest.mark.parametrize("absent", ["0", pytest.param("2", marks=pytest.mark.storm)])
def test_a_rank_that_never_comes(mpi, program, absent, tmp_path):
    says = "rank 0 did not come" if absent == "0" else "rank"
    (tmp_path / "told").mkdir()
    done = mpi.run(3, program(LATE), absent, str(tmp_path / "told"))
    lines = [line for line in done.stdout.splitlines() if "timed out" in line]
    assert len(lines) == 2, done.stdout + done.stderr
    assert all(says in line for line in lines)


def test_the_mpi4py_of_another_mpi():
    """Every rank would see itself alone, and its gradients would never be summed."""
    mpich, other = find("mpich"), find("openmpi")
    command = mpich.command(2, "-c", "import pycollective as pc; pc.init(timeout=20)")
    command[command.index(str(mpich.folder / "bin" / "python"))] = str(other.folder / "bin/python")
    done = subprocess.run(
        command, env=other.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "mpiexec has started 2 ranks, and mpi4py sees 1" in done.stderr
