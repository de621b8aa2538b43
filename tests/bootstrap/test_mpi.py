"""Under mpiexec no rank waits for one that cannot join: it says so, and all raise at once."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.launchers import NAMES, find

# Each rank tells how each `init` ended in which something goes wrong on one. After each of them all
# ranks join; and then they end as programs do.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import pycollective as pc
from mpi4py import MPI
from pycollective import host_memory
from pycollective.bootstrap import attach, joining, mpi as bootstrap
from pycollective.bootstrap.store import StoreClient, StoreServer

kinds, culprit, seconds = sys.argv[1].split(","), int(sys.argv[2]), float(sys.argv[3])
rank = MPI.COMM_WORLD.Get_rank()
plants = []

def plant(owner, name, act):
    original = getattr(owner, name)
    plants.append((owner, name, original))
    def planted(*args, **options):
        act()
        return original(*args, **options)
    setattr(owner, name, planted)

def raises(error):
    def act():
        raise error
    return act

def dawdle():
    time.sleep(3 * seconds)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)  # the signal ends it

# In a barrier of MPI's who comes early would take a core from the jobs beside this one.
def idle_until_all_come():
    others = [other for other in range(MPI.COMM_WORLD.Get_size()) if other != rank]
    for other in others:
        MPI.COMM_WORLD.send(None, other, tag=99)
    for other in others:
        while not MPI.COMM_WORLD.iprobe(other, tag=99):
            time.sleep(0.001)
        MPI.COMM_WORLD.recv(source=other, tag=99)

def go_wrong(what, asked):
    if what == "shm":
        asked["transport"] = "shm"
    elif what == "no transport":
        asked["transport"] = "carrier pigeon"
    elif what == "no timeout":
        asked["timeout"] = -1.0
    elif what == "topology":
        asked["topology"] = "1,2"
    elif what == "no table":
        asked["tuning"] = "/nowhere/table.json"
    elif what == "no type":
        asked["tuning"] = 5
    elif what == "memory":
        plant(bootstrap, "load", raises(MemoryError()))
    elif what == "before the meeting":
        plant(StoreServer, "start", raises(RuntimeError("can't start new thread")))
        plant(StoreClient, "_connect", raises(OSError(24, "Too many open files")))
    elif what == "in the meeting":
        plant(host_memory, "check", raises(pc.ConfigurationError("the limit of a test")))
    elif what == "interrupted":
        plant(host_memory, "check", interrupt)
    elif what == "transport":
        plant(bootstrap, "MpiTransport", raises(OSError("no way")))
    elif what == "before the duplicate":
        plant(bootstrap.Launch, "transport", interrupt)
    elif what == "late":
        plant(bootstrap.Launch, "transport", dawdle)
    elif what == "slow":
        plant(host_memory, "check", dawdle)
    else:
        raise LookupError(what)

for what in kinds:
    asked = {"timeout": seconds}
    if rank == culprit:
        go_wrong(what, asked)
    if what in ("late", "slow"):
        idle_until_all_come()
    MPI.COMM_WORLD.Barrier()
    start = time.monotonic()
    try:
        pc.init(**asked)
        said = "no error"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - start
    while plants:
        setattr(*plants.pop())
    sys.stdout.write(f"RANK {rank} {what} after {took:.2f} {said}\\n")
    sys.stdout.flush()
    if len(sys.argv) > 4:  # the program goes on without us
        sys.exit()
    if what in ("late", "slow"):
        idle_until_all_come()
    MPI.COMM_WORLD.Barrier()  # what is left behind disturbs no operation of the program's own
    with pc.init(timeout=30) as comm:
        x = np.full(1000, rank + 1.0)
        comm.all_reduce(x)
        assert (x == comm.size * (comm.size + 1) / 2).all()
        with comm.split(0, -comm.rank) as other:
            other.all_reduce(x)
    sys.stdout.write(f"RANK {rank} {what} joined\\n")
"""

# What goes wrong on one rank, and what all of them are told.
OWN = {
    "shm": r"ConfigurationError: .*rank \d was given .*transport .* and rank \d .*transport",
    "topology": r"ConfigurationError: .*rank \d was given topology .* and rank \d topology",
    "no transport": "ConfigurationError: .*'carrier pigeon' is not here",
    "no timeout": "ConfigurationError: .*timeout -1.0 is not",
    "no table": "ConfigurationError: .*/nowhere/table.json",
    "no type": "(TypeError|CollectiveAborted: init was given up: rank {culprit}: )",
    "memory": "(MemoryError|CollectiveAborted: init was given up: rank {culprit}: MemoryError)",
    "before the meeting": "(OSError|RuntimeError|CollectiveAborted: .*rank {culprit}: )",
    "in the meeting": "ConfigurationError: .*the limit of a test",
    "interrupted": "(KeyboardInterrupt|CollectiveAborted: .*rank {culprit}: KeyboardInterrupt)",
}
BETWEEN = {
    "transport": "(OSError|CollectiveAborted: .*rank {culprit}: no way)",
    "before the duplicate": "(KeyboardInterrupt|CollectiveAborted: .*rank {culprit}: Keyboard)",
}


@pytest.fixture(params=NAMES)
def mpi(request):
    return find(request.param)


def run(mpi, folder, ranks, topology, kinds, culprit, timeout, *, go_on=True):
    """What each rank said of the `init` in which each kind of thing went wrong."""
    (folder / "program.py").write_text(PROGRAM)
    arguments = [",".join(kinds), culprit, timeout, *([] if go_on else ["end"])]
    environment = {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}
    program = [str(folder / "program.py"), *map(str, arguments)]
    done = mpi.run(ranks, *program, timeout=40 + 10 * len(kinds), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = sorted(part.strip() for part in done.stdout.split("RANK ")[1:])
    ends = {}
    for kind in kinds:
        ends[kind] = [part for part in parts if re.match(rf"\d+ {kind} after", part)]
        assert len(ends[kind]) == ranks, done.stdout + done.stderr
        if go_on:
            joined = [f"{rank} {kind} joined" for rank in range(ranks)]
            assert [part for part in parts if part in joined] == joined, done.stdout + done.stderr
    return ends


def seconds(part):
    return float(re.search(r"after ([0-9.]+)", part)[1])


def assert_told_at_once(ends, culprit):
    """Each rank has raised what `OWN` or `BETWEEN` says, within 5 s."""
    for kind, parts in ends.items():
        said = {**OWN, **BETWEEN}[kind].replace("{culprit}", str(culprit))
        for part in parts:
            assert re.search(said, part), part
            assert seconds(part) < 5, part


# Both culprits with each MPI: every second of what goes wrong by the one, the others by the other.
# `make test-mpi` has the culprit alone on its host as well.
@pytest.mark.parametrize(
    "culprit", [0, 1, pytest.param(2, marks=pytest.mark.whole_table)], ids="culprit {}".format
)
def test_what_ends_init_on_one_rank_ends_it_on_all(mpi, tmp_path, culprit):
    """One host of two ranks and one of one; one after the other in the same processes."""
    kinds = [
        kind
        for place, kind in enumerate([*OWN, *BETWEEN])
        if NAMES[(place + culprit) % 2] == mpi.name
        # Alone on its host it needs no store.
        and (kind, culprit) != ("before the meeting", 2)
    ]
    # So that another one comes first, before any has gone well, with each culprit.
    kinds = kinds[2 * culprit :] + kinds[: 2 * culprit]
    assert_told_at_once(run(mpi, tmp_path, 3, "2,1", kinds, culprit, 20), culprit)


def test_on_one_host_too(mpi, tmp_path):
    kinds = ["shm", "memory", "before the meeting", "interrupted"]
    assert_told_at_once(run(mpi, tmp_path, 3, "", kinds, 1, 20), 1)


@pytest.mark.storm
def test_nobody_waits_longer_than_the_timeout(tmp_path):
    """Two jobs beside each other, as all that they do is wait; every two of the three meet."""
    jobs = [("mpich", "late", 0), ("openmpi", "late", 1)]
    jobs += [("openmpi", "slow", 0), ("mpich", "slow", 1)]
    mpis = {name: find(name) for name in NAMES}

    def ends(job):
        name, what, culprit = job
        folder = tmp_path / f"{name} {what}"
        folder.mkdir()
        return run(mpis[name], folder, 2, "2x1", [what], culprit, 1)[what]

    with ThreadPoolExecutor(2) as threads:
        for job, parts in zip(jobs, threads.map(ends, jobs), strict=True):
            for part in parts:
                rank = int(part[0])
                assert "init timed out" in part, (job, part)
                assert seconds(part) < (6 if rank == job[2] else 3), (job, part)


@pytest.mark.parametrize("what", ["shm", "before the duplicate", "transport"])
def test_a_program_that_ends_after_that_ends(mpi, tmp_path, what):
    # Whoever waited for the timeout while it ends would take longer than `run` lets it.
    assert_told_at_once(run(mpi, tmp_path, 2, "2x1", [what], 1, 90, go_on=False), 1)
