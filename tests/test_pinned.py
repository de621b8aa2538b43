"""Ranks that have a core each, as mpiexec and srun pin them, keep it while they wait."""

from __future__ import annotations

import os

import pytest

from tests.launchers import NAMES, python, run_text

# How often rank 0 gives its core away, of so many waits of 2 ms.
WAITS = 40
PROGRAM = f"""
import os, resource, time
import numpy as np

cores = sorted(os.sched_getaffinity(0))
names = "PYCOLLECTIVE_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = int(next(filter(None, map(os.environ.get, names))))
os.sched_setaffinity(0, {{cores[int("PLACES"[rank])]}})
import pycollective as pc

comm = pc.init(timeout=30)
x, fewest = np.ones(10, np.float32), {WAITS}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range({WAITS}):
        if comm.rank == 1:
            time.sleep(0.002)
        comm.all_reduce(x)
    fewest = min(fewest, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
comm.close()
if rank == 0:
    print("RANK", fewest)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
@pytest.mark.parametrize("name", ["run", *NAMES])
def test_a_rank_that_is_pinned_looks_on(name, tmp_path):
    done = run_text(tmp_path, name, PROGRAM.replace("PLACES", "01"), 2, "2")
    assert int(done.stdout.split("RANK")[1]) < WAITS / 2, done.stdout


@pytest.mark.parametrize("name", ["run", *NAMES])
def test_ranks_that_are_pinned_to_one_core_sleep(name, tmp_path):
    """The masks of all count: each has a core, and it is the same."""
    done = run_text(tmp_path, name, PROGRAM.replace("PLACES", "00"), 2, "2")
    assert int(done.stdout.split("RANK")[1]) > WAITS / 2, done.stdout


def test_a_misspelt_wish_is_refused():
    done = python("-c", "import pycollective as pc; pc.init()", status=1, PYCOLLECTIVE_MOVE="Off")
    assert "ConfigurationError: PYCOLLECTIVE_MOVE=Off is not one of on, off" in done.stderr
