"""Ranks that have a core each keep it for half a millisecond of a wait."""

from __future__ import annotations

import os

import pytest

from tests.launchers import NAMES, python, run_text

# Rank 0 awaits rank 1 so often, 0.1 ms each time, beside a process that computes for ever. If it
# gave its core away, it would have it back a time slice later: 3 or 4 ms.
CALLS = 50
PROGRAM = f"""
import os, subprocess, sys, time
import numpy as np

cores = sorted(os.sched_getaffinity(0))
names = "PYCOLLECTIVE_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = int(next(filter(None, map(os.environ.get, names))))
os.sched_setaffinity(0, {{cores[rank]}})
import pycollective as pc

comm = pc.init(timeout=30)
if rank == 0:
    text = "import time; end = time.time() + 20\\nwhile time.time() < end: pass"
    hog = subprocess.Popen([sys.executable, "-c", text])
x, least = np.ones(10, np.float32), 1e9
for _ in range(5):
    start = time.perf_counter()
    for _ in range({CALLS}):
        if rank == 1:
            time.sleep(0.0001)
        comm.all_reduce(x)
    least = min(least, time.perf_counter() - start)
if rank == 0:
    hog.kill()
    print("RANK", least / {CALLS} * 1e3)
comm.close()
"""


@pytest.mark.alone  # what else runs would take the core as well
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
@pytest.mark.parametrize("name", ["run", *NAMES])
def test_a_rank_that_is_pinned_keeps_its_core(name, tmp_path):
    done = run_text(tmp_path, name, PROGRAM, 2, "2")
    assert float(done.stdout.split("RANK")[1]) < 1.2, done.stdout


def test_a_misspelt_wish_is_refused():
    done = python("-c", "import pycollective as pc; pc.init()", status=1, PYCOLLECTIVE_MOVE="Off")
    assert "ConfigurationError: PYCOLLECTIVE_MOVE=Off is not one of on, off" in done.stderr
