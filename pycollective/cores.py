"""The cores of ranks: which each gets, whether there are enough, and what else uses them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pycollective.errors import ConfigurationError

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_LOAD = Path("/proc/stat")
_LOOK_SECONDS = 0.2  # Linux counts in ticks of 10 ms
BUSY = 0.3  # cores that others use, from which on it is worth a line
# How many ranks a launcher has started on this host: pycollective run and torchrun, Open MPI, MPICH
# and Intel MPI.
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def in_turn() -> list[int]:
    """Return the cores that this process may use, in the order in which ranks get them.

    One hardware thread of each physical core comes first, NUMA node by NUMA node, then the second
    ones. Where the system does not say how they lie, the order is that of their numbers.
    """
    cores = os.sched_getaffinity(0)
    node_of = {
        core: int(path.parent.name.removeprefix("node"))
        for path in _NODES.glob("node[0-9]*/cpulist")
        for core in _listed(path)
    }

    def place(core: int) -> tuple[int, int, int]:
        siblings = _listed(_CPUS / f"cpu{core}/topology/thread_siblings_list") & cores
        return len([each for each in siblings if each < core]), node_of.get(core, 0), core

    return sorted(cores, key=place)


def _listed(path: Path) -> set[int]:
    """Return the numbers of a file such as ``0-3,8``; none where it cannot be read."""
    try:
        parts = path.read_text().strip().split(",")
    except OSError:
        return set()
    bounds = [part.split("-") for part in parts if part]
    return {core for each in bounds for core in range(int(each[0]), int(each[-1]) + 1)}


def cores_of(ranks: int) -> list[int]:
    """Return each rank's core: those of `in_turn`, again from the first where ranks are more."""
    cores = in_turn()
    return [cores[rank % len(cores)] for rank in range(ranks)]


def cores_together(communicator: Any) -> list[int]:
    """Return each rank's core, on all ranks; every rank must call it.

    A rank that a launcher has pinned has its own, others theirs of `cores_of`. Cores that this
    process may not use are left out, such as those that only other hosts have.
    """
    own = np.array([cores_of(communicator.size)[communicator.rank]], np.int64)
    every = np.empty(communicator.size, np.int64)
    communicator.all_gather(every, own)
    return [core for core in every.tolist() if _may_use(core)]


def _may_use(core: int) -> bool:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return False
    os.sched_setaffinity(0, mask)
    return True


def one_each(ranks: int) -> list[int]:
    """Return a core for each rank, no two the same.

    Raises:
        ConfigurationError: there are more ranks than cores.
    """
    cores = in_turn()
    if ranks > len(cores):
        raise ConfigurationError(
            f"--pin gives each rank a core of its own, and there are {len(cores)} for {ranks} "
            "ranks: start fewer ranks, or leave --pin out"
        )
    return cores[:ranks]


def shared_by(ranks: int, cores: int) -> str:
    """Return a sentence where so many ranks must share so many cores, else ""."""
    if ranks <= cores:
        return ""
    return f"{ranks} ranks share {cores} core{'s' * (cores > 1)}, so they take turns"


def shared_here() -> str:
    """Return that sentence for the ranks of this launch on this host, outside one for two ranks.

    Launchers may pin ranks, so their cores are this rank's and those of the process that started
    it. Where that may use more than the ranks do, nothing is said.
    """
    cores = os.sched_getaffinity(0)
    told = [os.environ.get(name, "") for name in _RANKS_HERE]
    ranks = next((int(each) for each in told if each.isdigit()), 0)
    if ranks:
        with suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(os.getppid())
    return shared_by(ranks or 2, len(cores))


def used_by_others(seconds: float = _LOOK_SECONDS) -> float:
    """Return how many of this process's cores others use while it sleeps so long: 0.0 to all.

    What a virtual machine's host takes counts too. 0.0 where the system does not say.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    used = 0.0
    for core, (busy, total) in after.items():
        if core in before and total > before[core][1]:
            used += (busy - before[core][0]) / (total - before[core][1])
    return used


def _ticks() -> dict[int, tuple[int, int]]:
    """Return the busy and all ticks of each core that this process may use."""
    try:
        lines = [line.split() for line in _LOAD.read_text().splitlines()]
    except OSError:
        return {}
    ticks = {}
    for core in os.sched_getaffinity(0):
        for fields in (each[1:9] for each in lines if each and each[0] == f"cpu{core}"):
            # user, nice, system, idle, iowait, irq, softirq, steal; guests count as users.
            counts = [int(each) for each in fields]
            ticks[core] = (sum(counts) - sum(counts[3:5]), sum(counts))
    return ticks


def busy(used: float, cores: int) -> str:
    """Return a sentence where others use so many of the cores that it matters, else ""."""
    if used < BUSY:
        return ""
    return f"other processes use {used:.1f} of {cores} cores"
