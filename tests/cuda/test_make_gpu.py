"""`make gpu`: whatever becomes of a step, the others run, and the file says what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import run, steps
from benchmarks.gpu.images import put
from benchmarks.gpu.steps import PYTHON, ROOT, Step, bench_rows, last_json
from tests.cuda import standin
from tests.cuda.test_embedding import make_nvcc
from tests.harness import await_
from tests.test_launches import clean_environment


def shell(text, limit=30.0, needs=()):
    return Step(text, ("sh", "-c", text), limit, needs, reads=last_json)


def test_no_step_stops_another():
    some = [
        shell("echo bad; exit 3"),
        shell("sleep 60", limit=1.0),
        shell("true", needs=("cupy", "driver")),
        Step("not there", ("/no/such/program",), 30, ()),
        shell("""echo '{"a": 1}'; echo '{no JSON'; echo 7"""),
    ]
    missing = {"cupy": "there is no cupy", "nvcc": "there is no nvcc"}
    outcomes = run.run_all(some, missing, time.monotonic() + 60)
    assert [each.outcome for each in outcomes] == ["failed", "too slow", "not run", "failed", "ok"]
    assert [each.reason for each in outcomes[:3]] == [
        "status 3",
        "not done in 1 s",
        missing["cupy"],
    ]
    assert (outcomes[0].said, outcomes[4].measured) == (["bad"], {"a": 1})
    assert run.table(outcomes)[-1] == "1 ok, 2 failed, 1 too slow, 1 not run"


def test_what_a_step_has_started_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    # In a process group of its own, as the ranks of bench are.
    program = (
        f'import os, time; os.setpgrp(); open("{pid}", "w").write(str(os.getpid())); '
        "time.sleep(300)"
    )
    outcome = run.run_step(shell(f"{sys.executable} -c '{program}' & wait"), {}, 3.0)
    assert outcome.outcome == "too slow"
    await_(lambda: not _runs(int(pid.read_text())))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_once_the_time_is_over_nothing_more_begins():
    outcomes = run.run_all([shell("sleep 30"), shell("true")], {}, time.monotonic() + 1.5)
    assert [each.outcome for each in outcomes] == ["too slow", "not run"]
    assert outcomes[1].reason == "the time for everything is over"


def test_the_rows_of_bench_are_read():
    done = subprocess.run(
        [
            *(PYTHON, "-m", "pycollective", "bench", "broadcast", "-b", "64", "-e", "128"),
            *("--rounds", "1", "--peers", "native", "-r", "1"),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    rows = bench_rows(done.stdout)
    assert list(rows) == [
        f"{name} {size}" for size in (64, 128) for name in ("pycollective", "native")
    ]
    assert float(rows["native 64"]["us"]) > 0
    assert {row["wrong"] for row in rows.values()} == {"0"}
    refused = "          64           16  float32    sum     -1      n/a     n/a     n/a      n/a"
    assert bench_rows(f"{refused}     n/a  nccl: torch finds no GPU") == {
        "nccl 64": "torch finds no GPU"
    }


def start(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", "--no-build", "--small", *map(str, arguments)],
        env=clean_environment(CXX=os.environ.get("CXX", "g++"), **environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_images_are_put_where_the_native_tests_take_them(tmp_path, monkeypatch):
    make_nvcc(tmp_path, monkeypatch)
    put(tmp_path / "built", tmp_path / "images")
    modules = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert {each.name for each in (tmp_path / "images").iterdir()} == {
        f"{name}.fatbin" for name in modules
    }
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "0")
    with pytest.raises(SystemExit, match="there is no nvcc"):
        put(tmp_path / "built", tmp_path / "images")


@pytest.mark.storm  # compiles the native tests, and runs what `make gpu` does
@pytest.mark.timeout(600)
def test_all_that_can_run_on_the_stand_in_does(tmp_path):
    done = start("--out", tmp_path, **standin.environment())
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["machine"]["stand-in"] is True
    became = {step["name"]: step["outcome"] for step in record["steps"]}
    assert {"failed", "too slow"}.isdisjoint(became.values()), done.stdout
    assert done.returncode == 0
    for name in (
        *("build the native programs", "native test_cuda_reduce", "ordered reduce, 8 leaves, bf16"),
        *("verify, 2 processes", "bench, 2 processes", "arrays of own, 2 processes"),
        "verify by peer kernels, 2 processes on one GPU",
    ):
        assert became[name] == "ok"
    measured = {step["name"]: step["measured"] for step in record["steps"]}
    assert measured["ordered reduce, 8 leaves, bf16"]["share_of_copy"] > 0
    assert measured["arrays of own, 2 processes"] == {"own": "0 wrong with DeviceArray"}
    assert {row["wrong"] for row in measured["bench, 2 processes"].values()} == {"0"}
    for case in ("replay", "killed", "timeout"):
        assert measured[f"peer kernels of 2 processes: {case}"]["right"] is True
    peers = measured["peer kernels, ranks of one process"]
    assert set(peers["one_shot_us"]) == {"2", "4", "8"}
    assert peers["direct, 8 ranks of 256 KiB, 1 blocks"]["share_of_copy"] > 0
    reasons = {step["name"]: step["reason"] for step in record["steps"]}
    for name in ("memcheck of every reduction", "racecheck of programs, ranks: 2"):
        assert became[name] == "not run"
        assert "the driver is the stand-in" in reasons[name]


@pytest.mark.timeout(600)
def test_results_of_the_stand_in_are_none_of_the_repositorys():
    done = start("--seconds", 60, **standin.environment())
    assert done.returncode == 1
    assert "the driver is the stand-in, whose results are none of a GPU's" in done.stderr
    assert not (run.RESULTS / "gpu.json").exists()


@pytest.mark.timeout(600)
def test_without_a_driver_nothing_is_written_and_the_reason_is_said(tmp_path):
    missing = {"PYCOLLECTIVE_CUDA_DRIVER": "/no/such/libcuda.so"}
    done = start("--out", tmp_path / "out", **missing)
    assert done.returncode == 1
    assert "no CUDA driver: /no/such/libcuda.so" in done.stdout
    assert not (tmp_path / "out").exists()


def test_every_native_test_that_runs_on_a_gpu_is_a_step():
    names = {step.name for step in steps.checks()}
    there = {path.stem for path in (ROOT / "csrc" / "tests").glob("test_cuda_*.cpp")}
    for name in there - {"test_cuda_images", "test_cuda_signatures"}:
        assert f"native {name}" in names
