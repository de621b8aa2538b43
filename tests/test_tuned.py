"""``algorithm="auto"`` by a table of measured times, and between hosts by the cost model."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pycollective as pc
from pycollective import reference
from pycollective.bootstrap import init as bootstrap
from pycollective.planning.planner import Planner, describe
from pycollective.planning.tuning_table import ELEMENTS, write_table
from pycollective.schedule import Topology
from pycollective.schedule.cost import BETWEEN_HOSTS
from pycollective.schedule.select import Measurement, Table, choose
from pycollective.testing.inputs import leaves
from tests.harness import PerRank, Ranks, results
from tests.launchers import find

# Bytes, and the algorithm that is said to be fastest there.
SAYS = {
    ("all_reduce", 1200): "tree",
    ("all_reduce", 4800): "ring",
    ("reduce_scatter", 1200): "ring",
    ("reduce_scatter", 4800): "direct",
    ("all_gather", 1200): "tree",
    ("broadcast", 1200): "tree",
}
ALL = ("direct", "ring", "tree")


def a_table(topology, says=None):
    def seconds(operation, fastest):
        names = ("direct", "tree") if operation == "broadcast" else ALL
        return {name: 1.0 if name == fastest else 2.0 for name in names}

    return Table(
        {"cpu": "imaginary"},
        tuple(
            Measurement(
                *(operation, topology, "float32", size),
                *(seconds(operation, fastest), ELEMENTS["float32"]),
            )
            for (operation, size), fastest in (says or SAYS).items()
        ),
    )


def written(path, table):
    write_table(path, table)
    return str(path)


def called(comm, operation, size, algorithm):
    """Call an operation of so many bytes of fp32, counted as tables count."""
    whole = np.ones(size // 4, np.float32)
    own = np.ones(len(whole) // comm.size, np.float32)
    arguments = {"reduce_scatter": (own, whole), "all_gather": (whole, own)}
    method = getattr(comm, operation)
    method(*arguments.get(operation, (whole,)), algorithm=algorithm)


def mismatch(comm, operation, size, first, others):
    """What a rank is told where the first calls by one algorithm and the others by another."""
    with comm.split(0) as part:
        try:
            called(part, operation, size, first if comm.rank == 0 else others)
        except pc.CollectiveMismatch as error:
            return str(error)
    return ""


def right_bits(comm):
    """Which results are not the reference's, by size and way of calling."""
    wrong = []
    for size, later in itertools.product((4, 1200, 4800, 1 << 20), (False, True)):
        inputs = leaves("float32", "sum", comm.size, size // 4, size)
        mine = inputs[comm.rank].copy()
        work = comm.all_reduce(mine, async_op=later)
        if later:
            work.wait()
        if mine.tobytes() != reference.reduce(inputs).tobytes():
            wrong.append((size, later))
    return wrong


def test_the_table_chooses_on_one_host(tmp_path):
    path = written(tmp_path / "t.json", a_table("1x3"))
    with Ranks(3, module=__name__, variables={"PYCOLLECTIVE_TUNING": path}) as ranks:

        def told(*call):
            return results(ranks.call(mismatch, *call))

        for (operation, size), name in SAYS.items():
            assert told(operation, size, "auto", name) == [""] * 3, (operation, size)
        for said in told("all_reduce", 1200, "auto", "ring"):
            assert "tree" in said, said
            assert "ring" in said, said
        # Beyond what was measured the native paths run, which are direct.
        for size in (1196, 4804):
            assert told("all_reduce", size, "auto", "direct") == [""] * 3
        # The direct way, asked for by name, is not chosen over.
        assert all(told("all_reduce", 1200, "direct", "tree"))
        assert results(ranks.call(right_bits)) == [[]] * 3


def test_the_table_goes_before_the_model_between_hosts(tmp_path):
    pytest.importorskip("torch")
    path = written(tmp_path / "t.json", a_table("2x2"))
    variables = {"PYCOLLECTIVE_TUNING": path, "PYCOLLECTIVE_TOPOLOGY": "2x2"}
    with Ranks(4, module="tests.torch.programs", variables=variables) as ranks:
        for operation, size in (("all_reduce", 4800), ("reduce_scatter", 1200)):
            assert results(ranks.call(mismatch, operation, size, "auto", "ring")) == [""] * 4
        sizes = 64, 16 << 20
        where, element = Topology.parse("2x2", 4), ELEMENTS["float32"]
        by_model = [
            choose("all_reduce", where, size, element, BETWEEN_HOSTS["gloo"]) for size in sizes
        ]
        assert len(set(by_model)) == 2
        for size, name in zip(sizes, by_model, strict=True):
            assert results(ranks.call(mismatch, "all_reduce", size, "auto", name)) == [""] * 4
        assert all(results(ranks.call(mismatch, "all_reduce", 64, "auto", "ring")))
        assert results(ranks.call(right_bits)) == [[]] * 4


def joining(_, path):
    start = time.monotonic()
    try:
        pc.init(tuning=path, timeout=20).close()
    except pc.ConfigurationError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_what_cannot_be_the_table_of_all_is_refused_before_anything_moves(tmp_path):
    table = a_table("1x2")
    a = written(tmp_path / "a.json", table)
    again = written(tmp_path / "again.json", Table({"cpu": "other"}, table.entries[::-1]))
    other = a_table("1x2", {("all_reduce", 1200): "direct"})
    b = written(tmp_path / "b.json", other)
    (tmp_path / "broken.json").write_text('{"format": "pycollective-tuning"')
    broken, missing = str(tmp_path / "broken.json"), str(tmp_path / "missing.json")
    with Ranks(2, join=False, module=__name__) as ranks:

        def told(*paths):
            found = results(ranks.call(joining, PerRank(list(paths))))
            assert all(took < 5 for _, took in found), found
            return [said for said, _ in found]

        assert told(a, again) == ["", ""]
        for paths, tables in (((a, b), (table, other)), ((a, ""), (table, None))):
            for said in told(*paths):
                assert all(describe(each) in said for each in tables), said
        assert describe(table) != describe(other)
        for bad in (broken, missing):
            for said in told(a, bad):
                assert bad in said, said


def test_a_group_of_torch_heeds_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(pc.ConfigurationError, match=r"none\.json: cannot be read"):
        bootstrap.join(None, 0, 1, 10.0)
    with pc.init(rank=0, size=1, tuning="") as comm:
        comm.barrier()


@pytest.fixture
def asked(monkeypatch):
    """The sizes for which the core has asked, in order."""
    sizes = []
    choose_really = Planner.choose

    def counting(self, operation, size, dtype):
        sizes.append(size)
        return choose_really(self, operation, size, dtype)

    monkeypatch.setattr(Planner, "choose", counting)
    return sizes


def test_a_size_is_asked_for_once_and_not_without_a_table(tmp_path, asked):
    path = written(tmp_path / "t.json", a_table("1x1", {("all_reduce", 4): "tree"}))
    with pc.init(rank=0, size=1) as comm:
        comm.all_reduce(np.ones(1, np.float32))
        assert asked == []
    with pc.init(rank=0, size=1, tuning=path) as comm:
        for count in (1, 2, 1, 2, 1):
            comm.all_reduce(np.ones(count, np.float32))
        assert asked == [4, 8]
        with comm.split(0) as part:
            part.all_reduce(np.ones(1, np.float32))
            part.all_reduce(np.ones(1, np.float32))
        assert asked[:2] == [4, 8]
        assert asked.count(4) == 2  # between them what split() gathers
        for count in range(1, 2000):  # no more than some hundreds are kept
            comm.all_reduce(np.ones(count, np.float32))
        comm.all_reduce(np.ones(1, np.float32))
        assert asked.count(4) > 2


def test_threads_may_ask_at_once(tmp_path, asked):
    path = written(tmp_path / "t.json", a_table("1x1", {("all_reduce", 4): "tree"}))

    def calls(comm, seed):
        for count in np.random.default_rng(seed).integers(1, 1500, 3000):
            comm.all_reduce(np.ones(count, np.float32))

    with pc.init(rank=0, size=1, tuning=path) as comm, ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(calls, comm, seed) for seed in range(4)]:
            each.result(30)
    assert len(asked) > 1000


UNDER_MPI = """
import os, sys
import pycollective as pc

rank = int(os.environ["PMI_RANK"])
try:
    pc.init(tuning=sys.argv[1 + rank], timeout=20).close()
except pc.ConfigurationError as error:
    sys.stdout.write(f"RANK {error}\\n")
"""


@pytest.mark.parametrize("topology", [pytest.param("", marks=pytest.mark.storm), "2x1"])
def test_ranks_of_mpiexec_compare_their_tables_too(tmp_path, topology):
    table = a_table("1x2")
    path = written(tmp_path / "t.json", table)
    program = tmp_path / "program.py"
    program.write_text(UNDER_MPI)
    mpi = find("mpich")
    for other, words in (("", "no tuning table"), (str(tmp_path / "no.json"), "no.json: cannot")):
        done = mpi.run(2, str(program), path, other, PYCOLLECTIVE_TOPOLOGY=topology)
        told = done.stdout.split("RANK ")[1:]
        assert len(told) == 2, done.stdout + done.stderr
        assert all(words in each for each in told), told
        assert bool(other) or all(describe(table) in each for each in told), told
