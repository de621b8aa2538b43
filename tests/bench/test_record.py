import json
from dataclasses import replace

import pytest

from benchmarks.all import end_if_wrong
from benchmarks.gpu.steps import bench_rows
from pycollective import _core
from pycollective.bench import table
from pycollective.bench.record import Limit, Record, Row, Timing, read_json, write_json


@pytest.fixture
def record():
    timing = Timing(2e-6, 1e-6, 1.5e-6, 3e-6, 10, 100)
    slower = Timing(1e-3, 9e-4, 9e-4, 2e-3, 10, 1)
    return Record(
        command=["pycollective", "bench"],
        settings={
            "operation": "all_gather",
            "ranks": 2,
            "rounds": 3,
            "dtype": "float32",
            "reduce_op": "sum",
            "root": 0,
            "checks": 1,
        },
        machine={
            "cpu": "a CPU",
            "cores": 2,
            "caches": {"L2": "1024K"},
            "simd": "avx2",
            "phase": "near",
            "latency": 5e-8,
            "copy_rate": 6e10,
        },
        versions={"python": "3"},
        libraries={
            name: {"what": name, "settings": "none", "versions": {"library": "1"}}
            for name in ("pycollective", "gloo", "openmpi")
        },
        rows=[
            row
            for size in (1024, 1 << 20)
            for row in (
                Row("pycollective", size, size // 8, timing, 0.5, 0.25, 0, 1.0),
                Row("gloo", size, size // 8, slower, 0.001, 0.0005, 12, 500.0),
                Row("openmpi", size, size // 8, None, note="this MPI has no such type"),
            )
        ],
        limits=[Limit(size, 1e-6, 1.5e-6, 0.75, 5e-8) for size in (1024, 1 << 20)],
    )


def test_a_file_reads_back_as_it_was_written(record, tmp_path):
    path = tmp_path / "new" / "record.json"
    write_json(record, path)
    assert read_json(path) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_one_core_copies_infinitely_fast_and_the_file_is_still_json(record, tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record.machine["copy_rate"] = float("inf")
    write_json(record, tmp_path / "record.json")
    data = json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)
    assert data["machine"]["copy_rate"] is None
    assert read_json(tmp_path / "record.json") == record


def test_another_schema_is_refused(tmp_path):
    (tmp_path / "old.json").write_text('{"schema": "other/1"}')
    with pytest.raises(ValueError, match="other/1"):
        read_json(tmp_path / "old.json")


def test_statistics():
    timing = Timing.of([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]], calls=10)
    assert timing.median == 4.0  # of 2, 4 and 7
    assert timing.minimum == 1.0
    assert (timing.samples, timing.calls) == (9, 10)
    assert timing.lower_quartile <= timing.median <= timing.upper_quartile


def test_the_columns_are_those_of_nccl_tests(record):
    titles = next(line for line in table.header(record) if "algbw" in line).strip("# ").split()
    assert (
        " ".join(titles) == "size count type redop root time algbw busbw #wrong ratio phase library"
    )
    lines = list(table.rows(record, 1024, verbose=True))
    own = " ".join(lines[0].split())
    assert own == "1024 128 float32 none -1 2.00 0.50 0.25 0 1.00 pycollective"
    assert lines[1].split()[-4:] == ["0.00", "12", "500.00", "gloo"]
    assert "n/a" in lines[2]
    assert "openmpi: this MPI has no such type" in lines[2]
    assert lines[3].split()[5] == "1.50"  # the slower limit
    assert len(lines) == 4


def test_a_library_has_one_row_a_size_unless_more_is_asked_for(record):
    record.rows = [replace(row, phase=phase) for phase in ("near", "far") for row in record.rows]
    record.rows.sort(key=lambda row: row.size)
    near = [line.split() for line in table.rows(record, 1024)]
    assert [line[-1] for line in near[:2]] == ["pycollective", "gloo"]
    assert len(near) == 3
    assert {"near" in line for line in near} == {True}
    assert len(list(table.rows(record, 1024, verbose=True))) == 3 + 3 + 1
    for verbose in (False, True):
        header = "\n".join(table.header(record, verbose))
        assert ("--verbose adds far" in header, "limit: slower" in header) == (
            not verbose,
            verbose,
        )


@pytest.mark.parametrize("phase", ["", "far"])
def test_make_gpu_reads_the_rows(record, phase):
    record.rows = [replace(row, phase=phase) for row in record.rows]
    within = f" {phase}" if phase else ""
    lines = [
        *table.header(record),
        *table.rows(record, 1024, verbose=True),
        *table.footer(record),
    ]
    assert bench_rows("\n".join(lines)) == {
        f"pycollective{within} 1024": {"us": "2.00", "busbw": "0.25", "wrong": "0"},
        f"gloo{within} 1024": {"us": "1000", "busbw": "0.00", "wrong": "12"},
        f"openmpi{within} 1024": "this MPI has no such type",
    }


@pytest.mark.parametrize("dtype", [each.name for each in _core.dtypes()])
def test_no_dtype_runs_into_the_column_before(record, dtype):
    record.settings["dtype"] = dtype
    assert next(table.rows(record, 1024)).split()[2] == dtype


def test_what_was_sent_between_hosts_has_columns_where_there_are_several(record):
    record.settings |= {"hosts": 2, "wire": "exact"}
    record.rows[0] = replace(record.rows[0], sent=1234.4, sent_raw=2000.0)
    header = list(table.header(record))
    assert "2 ranks on 2 simulated hosts, exact between them" in header[0]
    titles = next(line for line in header if "algbw" in line).strip("# ").split()
    assert " ".join(titles[-5:]) == "ratio sent raw phase library"
    rows = list(table.rows(record, 1024, verbose=True))
    lines = [line.split() for line in rows]
    assert lines[0][-4:] == ["1.00", "1234", "2000", "pycollective"]
    assert lines[1][-4:] == ["500.00", "n/a", "n/a", "gloo"]
    last = ("pycollective", "gloo", "openmpi", "limit")
    at = [line.index(word) for line, word in zip(rows, last, strict=True)]
    assert len(set(at)) == 1, at


@pytest.mark.parametrize(("used", "busy"), [(None, False), (0.1, False), (0.9, True)])
def test_a_busy_machine_is_said(record, used, busy):
    if used is not None:  # as in older files
        record.machine["used_by_others"] = used
    said = [line for line in table.header(record) if line.startswith("# busy: ")]
    many = record.machine["cores"]
    what = f"# busy: other processes use 0.9 of {many} cores; times are shorter on an idle machine"
    assert said == [what] * busy


@pytest.mark.parametrize(
    ("pinned", "shared"), [([0, 2], []), ([3, 3], ["# 2 ranks share 1 core, so they take turns"])]
)
def test_where_ranks_are_pinned_is_said(record, pinned, shared):
    assert not any("pinned" in line for line in table.header(record))  # as of older files
    record.machine["pinned"] = pinned
    lines = list(table.header(record))
    first, last = pinned
    at = lines.index(f"# pinned: rank by rank, the thread that calls, to cores {first}, {last}")
    assert [line for line in lines[at:] if " ranks share " in line] == shared


def test_the_footer_judges_this_librarys_bits_alone(record):
    lines = list(table.footer(record))
    assert lines[0] == "# Out of bounds values : 0 OK"
    assert lines[1] == "# Avg bus bandwidth    : 0.25"
    record.rows[0] = Row("pycollective", 1024, 128, record.rows[0].timing, 0.5, 0.25, 3, 1.0)
    assert next(table.footer(record)) == "# Out of bounds values : 3 FAILED"
    with pytest.raises(SystemExit, match="elements are wrong: see two"):
        end_if_wrong({"one": replace(record, rows=record.rows[1:]), "two": record})
    native = Row("native", 1024, 128, record.rows[0].timing, 0.5, 0.25, 2, 1.0)
    assert replace(record, rows=[native, *record.rows[1:]]).wrong == 2
