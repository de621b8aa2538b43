"""What `benchmarks/busy.py` makes of its ranks' times, and that ranks make as many calls."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import busy
from benchmarks.busy import BusyRank, Hogs, Stop, Turn
from pycollective.bench.ranks.case import Prepared
from pycollective.bench.ranks.channel import StartLine


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_ranks_make_equally_many_calls(tmp_path: Path, operation: str) -> None:
    """Also where the root is several calls ahead. One of rank 1's calls is slow."""
    line, stop = tmp_path / "line", Stop()
    line.write_bytes(bytes(StartLine.bytes(2)))
    both, sent = threading.Barrier(2, timeout=20), queue.Queue[int](100)
    made = [0, 0]

    def call(rank: int) -> None:
        made[rank] += 1
        if rank == 1 and made[1] == 3:
            time.sleep(0.05)
        if operation == "all_reduce":
            both.wait()
        elif rank == 0:
            sent.put(made[0], timeout=20)
        else:
            sent.get(timeout=20)

    def rank_of(rank: int) -> BusyRank:
        process = BusyRank(None, rank, 2)  # type: ignore[arg-type]
        process.start_line(str(line), [0, 0])
        process._buffer = process._initial = np.zeros(0, np.uint8)
        process._prepared[busy.VARIANT] = Prepared(lambda: call(rank), process._buffer)
        return process

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank_of, range(2)))
        for _ in range(2):
            made[:] = [0, 0]
            stop.reset()
            replies = list(pool.map(lambda each: each.loop(stop.path, 0.1), ranks))
            turn = Turn.of(replies)
            assert made == [turn.calls] * 2
            assert turn.calls > 3
            assert 0.05 <= turn.longest <= turn.total
            assert turn.total >= 0.1
            assert turn.median < 0.05


def test_a_case_is_judged_by_the_best_mpi() -> None:
    slowest = {"calls": 4, "total": 4.0, "median": 1.0, "longest": 1.5}
    turns = [
        Turn.of([slowest, {**slowest, "total": 8.0, "median": 0.5, "longest": 3.0}]),
        Turn(calls=12, total=8.0, median=0.1, longest=0.3),
        Turn(calls=4, total=4.0, median=2.0, longest=2.0),
    ]
    ours = busy.summary(turns)
    assert ours == {"mean": 1.0, "median": 1.0, "longest": 3.0, "calls": 20}
    more = {"median": 1.0, "longest": 0.5, "calls": 1}
    found = {
        "pycollective": ours,
        "pycollective, pinned": {"mean": 0.6, **more},
        "mpich": {"mean": 2.0, **more},
        "mpich, pinned": {"mean": 0.5, **more},
    }
    rows = busy.rows_of(found, slice_=0.5, hogs=1)
    assert [(row["ratio"], row["slices"], row["met"]) for row in rows] == [
        (2.0, 6.0, False),
        (1.2, 1.0, True),
        (4.0, 1.0, None),
        (1.0, 1.0, None),
    ]
    case = {"hogs": 1, "operation": "all_reduce", "size": 16384, "rows": rows}
    said = list(busy.lines(case))
    assert said[0].endswith("6.0 slices at most    2.00x  MISSED  a call of more than 3 slices")
    assert said[1].endswith("1.0 slices at most    1.20x  met")
    quiet = {**case, "hogs": 0, "rows": busy.rows_of(found, 0.5, hogs=0)}
    assert [row["met"] for row in quiet["rows"]] == [None] * 4
    worst = list(busy.verdicts([quiet, case]))
    assert worst[0].endswith(
        "in 0 of 1 cases beside hogs; worst 2.00, all_reduce of 16 KiB, 1 hogs"
    )
    assert "pycollective, pinned: at most 1.2 times the best MPI's mean in 1 of 1 " in worst[1]
    alone = busy.rows_of({"pycollective": ours}, slice_=0.5, hogs=1)
    assert (alone[0]["ratio"], alone[0]["met"]) == (None, None)
    assert list(busy.verdicts([{**case, "rows": alone}])) == []


def test_hogs_compute_only_while_they_are_let() -> None:
    def fields(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    def await_(fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not fact():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    hogs = Hogs(2)
    try:
        one, other = (each.pid for each in hogs._all)
        await_(lambda: fields(one)[0] == fields(other)[0] == "T")
        with hogs.running(1):
            before = int(fields(one)[11])
            await_(lambda: int(fields(one)[11]) > before + 3)
            assert fields(other)[0] == "T"
        await_(lambda: fields(one)[0] == "T")
    finally:
        hogs.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (one, other))


def test_every_library_is_started_bound_and_free() -> None:
    for library in ("pycollective", "mpich", "openmpi", "impi"):
        free, bound = (busy.launch(library, pinned) for pinned in (False, True))
        assert free.settings != bound.settings
        ((*_, last),) = free.commands
        assert last == "{address}"
    assert busy.launch("pycollective", True).settings == "pycollective run --pin"


@pytest.mark.storm  # seconds
def test_the_whole_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours alone, with one short turn of one case."""
    for name, value in {"SECONDS": 0.02, "SETTLE": 0.0, "HOGS": (1,), "SIZES": (4096,)}.items():
        monkeypatch.setattr(busy, name, value)
    monkeypatch.setattr(busy, "OPERATIONS", ("broadcast",))
    monkeypatch.setattr(busy, "there", lambda: [busy.OURS])
    monkeypatch.setattr(busy, "in_turn", lambda: [0, 1])
    monkeypatch.setattr(busy, "named", lambda library, pinned: f"{library}{pinned}")
    launch = busy.launch
    # Pinned too where there are cores enough; on one core both run free.
    enough = len(os.sched_getaffinity(0)) >= busy.RANKS
    monkeypatch.setattr(busy, "launch", lambda name, pinned: launch(name, pinned and enough))
    run = busy.Run("benchmarks.busy", 1, {}, tmp_path)
    record = busy.measure(run)
    (case,) = record["cases"]
    assert (case["hogs"], case["wrong"], case["differs"]) == (1, 0, 0)
    assert [row["library"] for row in case["rows"]] == ["pycollectiveFalse", "pycollectiveTrue"]
    assert all(row["calls"] > 0 and row["mean"] > 0 for row in case["rows"])
    where = record["libraries"]["pycollectiveTrue"]["cores"]
    assert not enough or [len(each) for each in where] == [1, 1]
    assert 5e-4 < record["time_slice"] < 0.2
    json.dumps(record)
