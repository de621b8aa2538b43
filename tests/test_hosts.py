"""Ranks of several hosts, simulated on one: MPI or Gloo between them, and the same bits.

That ranks of different simulated hosts share no memory is by construction (their segments are never
attached), and checked here.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.launchers import NAMES, parts, run_text

VERIFY = """
import sys
from pycollective.verify import select, verify

right = verify({selected}, 60.0, lambda line: print(line, flush=True))
sys.exit(not right)
"""

# What an application does besides collectives of whole arrays.
PROGRAM = """
import os, sys
import numpy as np
import pycollective as pc
from pycollective import reference
from pycollective.testing.inputs import leaves

comm = pc.init(timeout=30)
n, r = comm.size, comm.rank
shared = len({line.split()[4] for line in open("/proc/self/maps") if "memfd:pycollective" in line})
inputs = leaves("float32", "sum", n, 300_007, 1)
want = reference.reduce(inputs)
for turn in range(2):  # asynchronous, several at once, synchronous behind them; no two alike
    arrays = [np.roll(inputs[r], 7 * turn + call) for call in range(7)]
    works = [comm.all_reduce(x, async_op=True) for x in arrays[:-1]]
    comm.all_reduce(arrays[-1])
    for work in works:
        work.wait(timeout=30)
    for call, x in enumerate(arrays):
        assert x.tobytes() == np.roll(want, 7 * turn + call).tobytes(), (turn, call)
got = np.empty_like(inputs[r])  # around the ranks, whatever host they are on
sending = comm.send(inputs[r], (r + 1) % n, async_op=True)
comm.recv(got, (r - 1) % n)
sending.wait(timeout=30)
assert got.tobytes() == inputs[r - 1].tobytes()
rolled = [np.roll(np.concatenate(inputs), shift) for shift in range(n)]
x = rolled[r].copy()
comm.all_to_all(x, x)  # in place
assert x.tobytes() == reference.all_to_all(rolled)[r].tobytes()
half = comm.split(r % 2, -r)
members = [each for each in range(n) if each % 2 == r % 2]
y = np.full(10, r + 1.0)
half.all_reduce(y)
assert (y == sum(each + 1 for each in members)).all()
assert half.rank == members[::-1].index(r)
none = comm.split(None)
assert none is None
half.close()
comm.barrier()
comm.close()
sys.stdout.write(f"RANK {r}: {shared} segments\\n")
"""

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


def digest(text):
    found = re.search(r"digest of \d+ ranks.*?: ([0-9a-f]{16,})", text)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def digest_on_one_host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def of(ranks, selected):
        return digest(run_text(folder, "forks", VERIFY.format(selected=selected), ranks, "").stdout)

    return of


def quick(*dtypes):
    return f"select([], [], {list(dtypes)}, quick=True)"


TOPOLOGIES = {
    2: ("1x2", "2x1"),
    3: ("1x3", "2,1"),
    4: ("1x4", "2x2", "4x1"),
    7: ("1x7", "3,4", "2,4,1"),
}
WHOLE_TABLE = [
    pytest.param(
        *(name, ranks, topology, "select()"),
        marks=[pytest.mark.whole_table, pytest.mark.timeout(700)],
    )
    for name in NAMES
    for ranks, several in TOPOLOGIES.items()
    for topology in several
]


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_text, tmp_path)


@pytest.mark.parametrize(
    ("name", "ranks", "topology", "selected"),
    [
        ("forks", 4, "2x2", quick("float16", "float8_e4m3fn")),
        pytest.param(*("mpich", 4, "2x2", quick("float16", "int32")), marks=pytest.mark.storm),
        pytest.param(*("openmpi", 3, "2,1", quick("float8_e5m2")), marks=pytest.mark.storm),
        *WHOLE_TABLE,
    ],
)
def test_every_algorithm_gives_the_bits_of_one_host(
    run, digest_on_one_host, name, ranks, topology, selected
):
    done = run(name, VERIFY.format(selected=selected), ranks, topology)
    assert digest(done.stdout) == digest_on_one_host(ranks, selected)


@pytest.mark.parametrize(
    ("name", "ranks", "topology"),
    [
        ("forks", 5, "1,3,1"),
        ("mpich", 5, "1,3,1"),
        pytest.param("openmpi", 5, "1,3,1", marks=pytest.mark.whole_table),
        pytest.param("mpich", 2, "2x1", marks=pytest.mark.whole_table),
    ],
)
def test_a_program(run, name, ranks, topology):
    done = run(name, PROGRAM, ranks, topology)
    sizes = {"2x1": [1, 1], "1,3,1": [1, 3, 1]}[topology]
    near = [size for size in sizes for _ in range(size)]
    assert parts(done.stdout) == [f"{rank}: {size} segments" for rank, size in enumerate(near)]


@pytest.mark.parametrize(("text", "ranks"), [(AGAIN, 3), (AFTER_A_FAILURE, 2)], ids=["end", "fail"])
@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.storm)])
def test_a_communicator_hears_nothing_of_the_one_before(run, text, ranks, mpi):
    run(mpi, text, ranks, f"{ranks}x1")


@pytest.mark.storm
def test_splits_give_back_what_they_take_of_mpi(run):
    run("mpich", SPLITS, 4, "3,1")
