"""Ranks of other hosts that die, leave or fork, where messages go over Gloo: who says what."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

import pycollective as pc
from tests.launchers import NAMES, find, launcher, parts, run_text

# A rank is killed while all are at work; the clock is the machine's, the same for all.
DIES = """
import os, signal, sys, threading, time
import numpy as np
import pycollective as pc

comm = pc.init(timeout=30)
x = np.ones(4 << 20, np.float32)
comm.all_reduce(x)

def die():
    sys.stdout.write(f"RANK dead at {time.monotonic()} x\\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

if comm.rank == comm.size - 1:
    threading.Timer(0.1, die).start()
for attempt in range(2):
    try:
        while True:
            comm.all_reduce(x)
    except pc.CollectiveError as error:
        kind = type(error).__name__
        sys.stdout.write(f"RANK {comm.rank}.{attempt} at {time.monotonic()} {kind} {error}\\n")
        sys.stdout.flush()
start = time.monotonic()
comm.close()
assert time.monotonic() - start < 2
"""

# Nothing of it is left: no thread that waits for messages, no socket.
ENDS = """
import os, time
import numpy as np
import pycollective as pc

def read(look, folder, file):
    try:
        return look(folder + file)
    except OSError:  # gone
        return ""

def seen():
    names = [read(os.readlink, "/proc/self/fd/", each) for each in os.listdir("/proc/self/fd")]
    threads = [
        read(lambda path: open(path).read(), "/proc/self/task/", each + "/comm")
        for each in os.listdir("/proc/self/task")
    ]
    return threads.count("pycoll-far\\n"), sum(each.startswith("socket:") for each in names)

with pc.init(timeout=30) as comm:  # torch is imported, and keeps what it opens
    pass
before = seen()
with pc.init(timeout=30) as comm:
    works = [comm.all_reduce(np.ones(300_000), async_op=True) for _ in range(3)]
    half = comm.split(comm.rank % 2)
    half.barrier()
    half.close()
    during = seen()
for _ in range(1000):
    if seen() == before:
        break
    time.sleep(0.02)
print(f"RANK {comm.rank} {before[0] == 0 < during[0]} {before[1] < during[1]} {seen() == before}")
"""

# Open MPI goes on when it has lost a rank, and says which: ULFM.
LOST = """
import os, signal, sys, threading
import numpy as np
import pycollective as pc

comm = pc.init(timeout=40)
x = np.ones(1 << 16, np.float32)
comm.all_reduce(x)
if comm.rank == 2:
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        comm.all_reduce(x)
except pc.CollectiveError as error:
    sys.stdout.write(f"RANK {comm.rank} {type(error).__name__} {error}\\n")
    sys.stdout.flush()
    os._exit(0)  # MPI's own end may wait for the dead
"""

FORKS = """
import os, sys, threading
import numpy as np
import pycollective as pc

comm = pc.init(timeout=30)
comm.all_reduce(np.ones(300_000))
child = os.fork()
if child == 0:
    threading.Timer(20, lambda: os._exit(7)).start()
    try:
        comm.all_reduce(np.ones(10))
    except pc.ConfigurationError as error:
        assert "fork" in str(error)
        comm.close()
        del comm
        os._exit(5)
    os._exit(6)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
x = np.full(300_000, comm.rank + 1.0)
comm.all_reduce(x)
assert (x == comm.size * (comm.size + 1) / 2).all()
sys.stdout.write(f"RANK {comm.rank} {status}\\n")
"""


@pytest.mark.alone  # how soon is part of it
@pytest.mark.parametrize("topology", ["2x2", "4x1"])
def test_a_killed_rank_is_named_on_every_host_within_a_second(tmp_path, topology):
    (tmp_path / "program.py").write_text(DIES)
    program = str(tmp_path / "program.py")
    done = launcher("forks").run(4, program, PYCOLLECTIVE_TOPOLOGY=topology)
    said = {part.split()[0]: part for part in parts(done.stdout)}
    assert sorted(said) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "dead"], done.stderr
    died = float(said.pop("dead").split()[2])
    for part in said.values():
        _, _, at, kind, text = part.split(maxsplit=4)
        assert kind == "PeerFailure"
        assert float(at) - died < 1.0
        assert re.search(r"rank 3 (\(pid \d+\) )?died", text), text


def test_a_rank_that_mpi_has_lost_is_named_by_all():
    openmpi = find("openmpi")
    mpiexec, *more = openmpi.command(3, "-c", LOST)
    done = subprocess.run(
        [mpiexec, "--with-ft", "ulfm", *more],
        env=openmpi.environment(PYCOLLECTIVE_TOPOLOGY="3x1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = parts(done.stdout)
    assert len(said) == 2, done.stdout + done.stderr
    for rank, part in enumerate(said):
        assert part.startswith(f"{rank} PeerFailure rank 2 died or cannot be reached"), part
        assert "MPI_ERR_PROC_FAILED" in part


def test_nothing_is_left_behind(tmp_path):
    done = run_text(tmp_path, "forks", ENDS, 4, "2x2")
    assert parts(done.stdout) == [f"{rank} True True True" for rank in range(4)]


@pytest.mark.parametrize(
    "name", ["forks", *(pytest.param(each, marks=pytest.mark.storm) for each in NAMES)]
)
def test_a_fork_leaves_the_parent_unharmed(tmp_path, name):
    done = run_text(tmp_path, name, FORKS, 2, "2x1")
    assert parts(done.stdout) == ["0 5", "1 5"]


INIT = "import pycollective as pc; pc.init(timeout=20, {})"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("run", "transport='rdma'", "transport 'rdma' is not here; there are 'shm' (shared"),
        ("run", "transport='mpi'", "this is a launch by `pycollective run`: start with `mpiexec"),
        ("run", "transport='shm', topology='2x1'", "'shm' is for one host, and the 2 ranks are on"),
        ("run", "topology='3x1'", "is for 3 ranks, and there are 2"),
        ("mpich", "transport='gloo'", "transport 'gloo' meets in a store, and mpiexec has none"),
        ("mpich", "transport='shm', topology='2x1'", "'shm' is for one host, and the 2 ranks are"),
    ],
)
def test_a_transport_that_there_is_not(name, arguments, says):
    done = launcher(name).run(2, "-c", INIT.format(arguments))
    assert done.returncode != 0
    assert says in done.stderr


def test_ranks_that_disagree_about_hosts():
    wanted = "['2x1', '1x2'][int(os.environ['RANK'])]"
    program = f"import os, pycollective as pc; pc.init(topology={wanted})"
    done = launcher("run").run(2, "-c", program)
    assert done.returncode != 0
    assert re.search(
        r"rank [01] was given topology hosts 0,[01], .*rank [01] topology hosts", done.stderr
    )


def test_mpi_without_a_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PYCOLLECTIVE_", "MASTER_", "PMI", "OMPI_")) or "RANK" in name:
            monkeypatch.delenv(name)
    with pytest.raises(pc.ConfigurationError, match="one rank without a launcher: start with"):
        pc.init(transport="mpi")
    with pc.init(transport="shm") as comm:
        assert comm.size == 1


def test_mpi_by_name_under_mpiexec():
    program = "import pycollective as pc; c = pc.init(transport='mpi'); c.barrier(); c.close()"
    done = find("mpich").run(2, "-c", program, PYCOLLECTIVE_TOPOLOGY="2x1")
    assert done.returncode == 0, done.stderr
