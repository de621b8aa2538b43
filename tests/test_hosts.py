"""Ranks of several hosts, simulated on one: MPI or Gloo between them, and the same bits.

That ranks of different simulated hosts share no memory is by construction (their segments are never
attached), and checked here.
"""

from __future__ import annotations

import functools
import os
import re
import time

import pytest

import pycollective as pc
from tests.launchers import NAMES, find, launcher, parts

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

LATE = """
import os, sys, time
import numpy as np
import pycollective as pc

comm = pc.init(timeout=30)
comm.timeout = 1.0
x = np.ones(200_000)
try:
    until = time.monotonic() + 2.5  # too late for who would wait for it
    while comm.rank == comm.size - 1 and len(os.listdir(sys.argv[1])) < 2:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    start = time.monotonic()
    comm.all_reduce(x)
except pc.CollectiveError as error:
    took = time.monotonic() - start
    print(f"RANK {comm.rank} {type(error).__name__} after {took:.1f}: {error}", flush=True)
open(f"{sys.argv[1]}/{comm.rank}", "w").close()
comm.close()
"""


# All of it under each MPI takes minutes: `make test-mpi` does that.
@pytest.fixture(params=["forks", *(pytest.param(n, marks=pytest.mark.whole_table) for n in NAMES)])
def launch(request):
    return launcher(request.param)


def digest(text):
    found = re.search(r"digest of \d+ ranks.*?: ([0-9a-f]{16,})", text)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def digest_on_one_host(tmp_path_factory):
    program = tmp_path_factory.mktemp("one") / "program.py"

    @functools.cache
    def of(ranks, selected):
        program.write_text(VERIFY.format(selected=selected))
        done = launcher("forks").run(ranks, str(program), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return digest(done.stdout)

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
    tmp_path, digest_on_one_host, name, ranks, topology, selected
):
    (tmp_path / "program.py").write_text(VERIFY.format(selected=selected))
    program = str(tmp_path / "program.py")
    done = launcher(name).run(ranks, program, timeout=300, PYCOLLECTIVE_TOPOLOGY=topology)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digest(done.stdout) == digest_on_one_host(ranks, selected)


def run(launch, tmp_path, text, ranks, topology, *arguments):
    (tmp_path / "program.py").write_text(text)
    program = str(tmp_path / "program.py"), *arguments
    return launch.run(ranks, *program, PYCOLLECTIVE_TOPOLOGY=topology)


@pytest.mark.parametrize(
    ("name", "ranks", "topology"),
    [
        ("forks", 5, "1,3,1"),
        ("mpich", 5, "1,3,1"),
        pytest.param("openmpi", 5, "1,3,1", marks=pytest.mark.whole_table),
        pytest.param("mpich", 2, "2x1", marks=pytest.mark.whole_table),
    ],
)
def test_a_program(tmp_path, name, ranks, topology):
    done = run(launcher(name), tmp_path, PROGRAM, ranks, topology)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = {"2x1": [1, 1], "1,3,1": [1, 3, 1]}[topology]
    near = [size for size in sizes for _ in range(size)]
    assert parts(done.stdout) == [f"{rank}: {size} segments" for rank, size in enumerate(near)]


@pytest.mark.alone
def test_a_rank_of_another_host_that_does_not_come_is_named(launch, tmp_path):
    (tmp_path / "told").mkdir()
    done = run(launch, tmp_path, LATE, 3, "2,1", str(tmp_path / "told"))
    said = parts(done.stdout)
    assert len(said) == 3, done.stdout + done.stderr
    assert all("CollectiveTimeout" in part for part in said)
    for part in said[:2]:
        assert "rank(s) 2 have not called it" in part
        assert float(re.search(r"after ([0-9.]+):", part)[1]) < 2.3


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ("2x2", "is for 4 ranks, and there are 3"),
        ("two", "is neither hosts x ranks a host"),
        ("0x3", "is neither hosts x ranks a host"),
    ],
)
def test_a_topology_that_does_not_fit(tmp_path, topology, says):
    start = time.monotonic()
    done = run(find("mpich"), tmp_path, "import pycollective as pc; pc.init()", 3, topology)
    assert done.returncode != 0
    assert says in done.stderr
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("given", [{"topology": "2x1"}, {"rank": 0, "size": 1, "topology": "2x1"}])
def test_a_topology_for_others(monkeypatch, given):
    for name in list(os.environ):
        if name.startswith(("PYCOLLECTIVE_", "MASTER_", "PMI", "OMPI_")) or "RANK" in name:
            monkeypatch.delenv(name)
    with pytest.raises(pc.ConfigurationError, match="is for 2 ranks, and there are 1"):
        pc.init(**given)
    with pc.init(topology="1x1") as comm:
        assert comm.size == 1
