"""`pycollective schedule`: numbers against formulas, faults and errors, what the picture shows."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest import mock

import pytest

from pycollective.cli import main, schedule, schedule_messages
from pycollective.schedule import Schedule
from pycollective.schedule.cost import TYPICAL
from pycollective.schedule.steps import Send

SIZE = 1 << 20


def invoke(*arguments):
    """How the command ends, and what it prints, in this process."""
    words = ["pycollective", "schedule", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", words),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return SimpleNamespace(exit_code=ended.value.code, stdout=out.getvalue(), stderr=err.getvalue())


def shown(*arguments, size=SIZE):
    """What is printed: header, rows of the table, lines after it."""
    done = invoke(*arguments, "--size", size)
    assert (done.exit_code, done.stderr) == (0, "")
    header, table, rest = done.stdout.split("\n\n")
    return header, [row(line) for line in table.splitlines()[2:]], rest.splitlines()


def row(line):
    """(first step, last step, messages, of the busiest rank, its bytes: least, most; what)."""
    found = re.fullmatch(
        r" *(\d+)(?: \.\. (\d+))? +([\d,]+) +([\d,]+) +([\d,]+)(?: \.\. ([\d,]+))?  (.+)", line
    )
    assert found, line
    first, last, *numbers, what = found.groups()
    total, busiest, least, most = (int(each.replace(",", "")) if each else None for each in numbers)
    return int(first), int(last or first), total, busiest, least, most or least, what


def a_row(step, messages, busiest, size, what):
    return step, step, messages, busiest, round(size), round(size), what


@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_direct(n):
    header, rows, rest = shown("direct", "-n", n)
    part = (n - 1) * SIZE / n
    assert rows == [
        a_row(0, n * (n - 1), n - 1, part, "leaves"),
        a_row(1, n * (n - 1), n - 1, part, "results"),
    ]
    assert header.startswith(f"all_reduce by direct, {n} ranks on 1 host (1x{n}): inputs straight")
    assert rest[1].startswith(f"in all: 2 steps; a rank sends {2 * (n - 1)} messages, ")
    assert rest[1].endswith(f"({2 * (n - 1) / n:.4g} times the buffer)")


@pytest.mark.parametrize(
    ("dtype", "wide"), [("bfloat16", 2), ("half", 2), ("float32", 1), ("double", 1), ("int8", 1)]
)
def test_halving_doubling_in_each_kind_of_type(dtype, wide):
    """`wide`: how much larger a node is than a leaf."""
    n, depth = 8, 3
    _, rows, rest = shown("halving_doubling", "-n", n, "--dtype", dtype)
    halves = [SIZE / 2 ** (k + 1) for k in range(depth)]
    assert rows == [
        *(a_row(0, n, 1, halves[0], "leaves") for _ in range(1)),
        *(a_row(k, n, 1, wide * halves[k], "nodes") for k in (1, 2)),
        *(a_row(depth + k, n, 1, halves[depth - 1 - k], "results") for k in range(depth)),
    ]
    assert ("; nodes travel in float32" in rest[0]) == (wide == 2)


def test_hierarchical_on_two_hosts():
    header, rows, rest = shown("hierarchical", "-n", 8, "--topology", "2x4")
    # A carrier has two shards, one of each host's owners; three ranks send it both.
    assert rows == [
        a_row(0, 24, 3, 3 * 2 * SIZE / 8, "leaves"),
        a_row(1, 8, 1, 2 * SIZE / 8, "nodes"),
        a_row(2, 8, 1, SIZE / 8, "results"),
        a_row(3, 24, 3, 3 * 2 * SIZE / 8, "results"),
    ]
    assert "8 ranks on 2 hosts (2x4): within each host" in header
    assert f"in all: 4 steps; a rank sends 8 messages, {15 * SIZE // 8:,} bytes" in rest[1]


def test_the_time_is_predicted_by_the_cost_model():
    """Direct on 3 ranks: 2 steps, 4 messages, 4/3 of the buffer, and 2 additions of a third."""
    local = TYPICAL.local
    for size, dtype, wide in ((3 << 10, "bfloat16", 2), (3 << 30, "int32", 1)):
        sent, added = 4 / 3 * size, 2 / 3 * size * wide
        seconds = 2 * local.latency + 4 * local.message + sent * local.byte + added * TYPICAL.add
        line = shown("direct", "-n", 3, "--dtype", dtype, size=size)[2][2]
        number, unit = re.match(r"predicted: ([\d.]+) (\S+), not measured", line).groups()
        scale = {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
        assert float(number) * scale == pytest.approx(seconds, rel=6e-3)
        assert "between hosts" not in line
    line = shown("hierarchical", "-n", 8, "--topology", "2x4")[2][3]
    assert "between hosts 10 µs and 12.5 GB/s" in line
    assert "predicted" not in invoke("tree", "-n", 65).stdout  # of so many not all are counted


def test_many_steps_are_folded():
    n = 128
    _, rows, _ = shown("ring", "-n", n, "--no-verify")
    assert len(rows) == 3
    assert [each[:2] for each in rows] == [(0, 0), (1, n - 2), (n - 1, 2 * n - 3)]
    assert [each[2:4] for each in rows] == [(n, 1)] * 3
    assert [each[6] for each in rows] == ["leaves", "leaves, nodes", "results"]
    shard = SIZE // n
    assert rows[0][4:6] == rows[2][4:6] == (shard, shard)
    # From two leaves up to 2 (log2 n - 1) nodes, of which the two at the ends are leaves.
    assert rows[1][4:6] == (2 * shard, (2 * 2 * (7 - 1) - 2) * shard)


def test_what_is_proved_is_said():
    _, _, rest = shown("ring", "-n", 5)
    assert rest[3] == (
        "proved: every shard ends at every rank that must have it, each node from its own "
        "children; each send meets its receive; no deadlock"
    )
    _, _, rest = shown("ring", "-n", 5, "--no-verify")
    assert len(rest) == 3


def test_a_fault_is_told(monkeypatch):
    lowered = Schedule.lowered

    def without_a_send(self, shard):
        plans = lowered(self, shard)
        if shard == 3:
            steps = plans[1].steps
            steps.remove(next(step for step in steps if isinstance(step, Send)))
        return plans

    monkeypatch.setattr(Schedule, "lowered", without_a_send)
    done = invoke("direct", "-n", 4)
    assert done.exit_code == 1
    assert done.stderr == (
        "pycollective schedule: wrong: shard 3: step 0: rank 3 awaits what 1 does not send\n"
    )
    assert "in all: 2 steps" in done.stdout
    assert "proved" not in done.stdout
    assert invoke("direct", "-n", 4, "--no-verify").exit_code == 0


def test_too_many_steps_to_count_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(schedule_messages, "_MOST_COUNTERS", 3 * 8 * 14)
    assert invoke("ring", "-n", 8).exit_code == 0
    done = invoke("ring", "-n", 9)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "of 9 ranks are too many to count" in done.stderr


def test_without_matplotlib_the_picture_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    done = invoke("ring", "-n", 4, "--picture", tmp_path / "a.png")
    assert done.exit_code == 2
    assert "--picture needs matplotlib: pip install matplotlib" in done.stderr
    assert invoke("ring", "-n", 4).exit_code == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals():
    assert invoke("ring", "-n", 3).stderr == ""
    with mock.patch.object(io, "StringIO", Terminal):
        said = invoke("ring", "-n", 3).stderr
    assert "shard 2 of 3" in said
    assert said.endswith("\r\x1b[K")


def test_of_thousands_of_ranks_some_shards_are_looked_at(monkeypatch):
    """As if eight ranks were thousands: two of eight shards, and so many as are asked for."""
    monkeypatch.setattr(schedule, "_MOST_UNASKED", 8 * 8 - 1)
    monkeypatch.setattr(schedule, "_SOME", 2)
    done = invoke("direct", "-n", 8, "--size", SIZE)
    assert done.exit_code == 0
    assert "\ncounted: 2 of 8 shards, spread evenly; " in done.stdout
    assert "--shards 8)" in done.stdout
    assert "\nproved: 2 of 8 shards, each of which ends " in done.stdout
    _, _, table, rest = done.stdout.split("\n\n")
    assert [row(line) for line in table.splitlines()[2:]] == [
        a_row(0, 14, 2, SIZE / 4, "leaves"),  # to the owners of both
        a_row(1, 14, 7, 7 * SIZE / 8, "results"),
    ]
    assert "of these shards: 2 steps; " in rest
    whole = invoke("direct", "-n", 8, "--size", SIZE, "--shards", 8)
    assert "counted" not in whole.stdout
    assert "\nproved: every shard ends " in whole.stdout
    monkeypatch.undo()
    assert invoke("direct", "-n", 8, "--size", SIZE).stdout == whole.stdout


def test_a_picture_of_thousands_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(schedule, "_examine", None)
    done = invoke("ring", "-n", 4096, "--picture", tmp_path / "a.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "nobody can tell 4096 ranks apart" in done.stderr
