"""What tests of joining share; runs in tests and in their ranks."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import numpy as np

import pycollective as pc


def works(comm):
    """Whether all ranks are there and in their places."""
    x = np.zeros(comm.size, np.int64)
    x[comm.rank] = comm.rank + 1
    comm.all_reduce(x)
    return x.tolist() == list(range(1, comm.size + 1))


def failing(join, *args, **options):
    """What joining raises, and how long that took."""
    start = time.monotonic()
    try:
        join(*args, **options)
    except (pc.CollectiveError, pc.ConfigurationError, KeyboardInterrupt) as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def free_place():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def await_listeners_of(pids):
    """The abstract sockets of these processes, once each has one: they wait for the others then."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = Path("/proc/net/unix").read_text().splitlines()
        starts = tuple(f"@pycollective-{pid}-" for pid in pids)
        found = [name for line in lines if (name := line.split()[-1]).startswith(starts)]
        if len(found) == len(pids):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not all of {pids} came to listen")


def clear_launch(variables):
    """Take out of an environment what launchers say in it."""
    names = ("PYCOLLECTIVE_", "MASTER_", "PMI", "OMPI_", "SLURM_", "TORCHELASTIC")
    for name in list(variables):
        if name.startswith(names) or "RANK" in name or name == "WORLD_SIZE":
            del variables[name]
