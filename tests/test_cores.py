"""Which cores ranks get, on machines that are written down here, and who else uses them."""

import os
import subprocess
import sys
import time

import pytest

from pycollective import ConfigurationError, cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine of files as Linux has them: its cores' siblings, and its nodes' cores."""

    def make(mask, siblings=(), nodes=()):
        for core, listed in enumerate(siblings):
            folder = tmp_path / f"cpus/cpu{core}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{listed}\n")
        for node, listed in enumerate(nodes):
            folder = tmp_path / f"nodes/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{listed}\n")
        monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpus")
        monkeypatch.setattr(cores, "_NODES", tmp_path / "nodes")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mask))

    return make


PAIRS = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"]
HALVES = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]


@pytest.mark.parametrize(
    ("mask", "siblings", "nodes", "turn"),
    [
        (range(8), PAIRS, ["0-7"], [0, 2, 4, 6, 1, 3, 5, 7]),
        (range(8), HALVES, ["0-7"], [0, 1, 2, 3, 4, 5, 6, 7]),
        # Even numbers are of one node, odd ones of the other, as some servers have them.
        (range(8), HALVES, ["0,2,4,6", "1,3,5,7"], [0, 2, 1, 3, 4, 6, 5, 7]),
        # Its sibling is not ours, so that of core 2 is the first of its physical core.
        ([0, 3, 4, 5], PAIRS, ["0-7", ""], [0, 3, 4, 5]),
        ([7, 2], [], [], [2, 7]),  # nothing is known
    ],
)
def test_siblings_come_last_and_nodes_one_after_another(machine, mask, siblings, nodes, turn):
    machine(mask, siblings, nodes)
    assert cores.in_turn() == turn
    assert cores.one_each(len(turn) - 1) == turn[:-1]
    assert cores.cores_of(len(turn) + 1) == [*turn, turn[0]]


def test_more_ranks_than_cores_have_none_to_themselves(machine):
    machine([3, 5])
    assert cores.one_each(2) == [3, 5]
    with pytest.raises(ConfigurationError, match="there are 2 for 3 ranks: start fewer ranks"):
        cores.one_each(3)


@pytest.mark.parametrize(
    ("told", "own", "parent", "said"),
    [
        ({}, {0, 1}, {0, 1}, ""),
        ({}, {0}, {0, 1}, "2 ranks share 1 core, so they take turns"),
        ({"LOCAL_WORLD_SIZE": "2"}, {0}, {0, 1}, ""),  # pinned, each to another
        ({"MPI_LOCALNRANKS": "3"}, {0}, {0, 1}, "3 ranks share 2 cores, so they take turns"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {1}, {1}, "2 ranks share 1 core, so they take turns"),
    ],
)
def test_ranks_that_must_share_cores(monkeypatch, told, own, parent, said):
    for name in cores._RANKS_HERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(parent if pid else own))
    assert cores.shared_here() == said


def test_only_ticks_of_ones_own_cores_count(monkeypatch, tmp_path):
    """Core 1 was idle half the time and a tenth of it was stolen; core 2 is not this process's."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(cores, "_LOAD", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 7})
    stat.write_text("cpu 9 9 9 9\ncpu0 10 0 0 90 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu2 0 0\n")
    later = "cpu 99 9 9 9\ncpu0 10 0 0 80 30 0 0 0 0 0\ncpu1 20 0 10 40 10 5 5 10 9 0\ncpu2 50 0\n"
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(later))
    assert cores.used_by_others() == 0.5
    monkeypatch.setattr(cores, "_LOAD", tmp_path / "none")
    assert cores.used_by_others(0) == 0.0
    assert cores.busy(0.5, 2) == "other processes use 0.5 of 2 cores"
    assert cores.busy(0.2, 2) == ""


def test_a_process_that_computes_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            assert cores.used_by_others(0.3) > cores.BUSY
        finally:
            hog.kill()
