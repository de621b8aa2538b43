"""`make gpu`: whatever becomes of a step, the others run, and the file says what became of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import images, run, shown, steps
from benchmarks.gpu.steps import PYTHON, ROOT, Step, bench_rows, last_json
from benchmarks.gpu.table import Outcome, table
from tests.cuda import fake_driver, standin
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
    assert table(some, outcomes)[-2] == "1 ok, 2 failed, 1 too slow, 1 not run"


def test_the_table_is_aligned_and_has_targets_and_reasons():
    measured = {"ours_us": 12345.678, "torch": "RuntimeError: overlapping devices"}
    some = [
        Step("one", (), 1, shows=shown.symmetric_memory),
        Step("two", (), 1, shows=shown.peer_kernels),
        Step("three", (), 1, shows=shown.peer_kernels),
        Step("four", (), 1, shows=shown.peer_kernels),
    ]
    large = "2 ranks, direct, 65536 KiB"
    fast = {"bare_launch_us": 3.5, "one_shot_us": {}, large: {"share_of_copy": 0.9268}}
    slow = {**fast, large: {"share_of_copy": 0.794}}
    outcomes = [
        Outcome("one", "ok", "", 2.0, measured),
        Outcome("two", "ok", "", 3.25, fast),
        Outcome("three", "ok", "", 3.25, slow),
        Outcome("four", "not run", "out of time"),
    ]
    lines = table(some, outcomes)
    found = [" ".join(line.split()) for line in lines]
    assert found == [
        "step value unit target",
        "one ok, 2.0 s",
        "pycollective, 2 processes, 4 Ki float32 12,346 us",
        "PyTorch's symmetric memory not run: RuntimeError: overlapping devices",
        "two ok, 3.2 s",
        "bare launch 3.5 us",
        "2 ranks, two-shot, 64 MiB, of the copy 92.68 % at least 80 % met",
        "three ok, 3.2 s",
        "bare launch 3.5 us",
        "2 ranks, two-shot, 64 MiB, of the copy 79.4 % at least 80 % MISSED",
        "four not run: out of time",
        "3 ok, 0 failed, 0 too slow, 1 not run",
        "targets: 1 met, 1 missed",
    ]
    units = [re.search(" (GB/s|us|%)( |$)", line) for line in lines]
    assert len({unit.start() for unit in units if unit}) == 1
    assert "MISSED" not in "\n".join(table(some, outcomes, is_real=False))


def test_what_a_step_has_started_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    # In a process group of its own, as the ranks of bench are.
    program = (
        f'import os, time; os.setpgrp(); open("{pid}", "w").write(str(os.getpid())); '
        "time.sleep(300)"
    )
    # Without what Python looks for when it starts, which takes longer than all this.
    outcome = run.run_step(shell(f"{sys.executable} -I -S -c '{program}' & wait"), {}, 2.0)
    assert outcome.outcome == "too slow"
    assert pid.exists(), outcome
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
    assert outcomes[1].reason == "out of time"


def test_builds_go_on_at_once(tmp_path):
    # Each waits for what the other makes.
    waits = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done"
    one, two = tmp_path / "one", tmp_path / "two"
    some = [shell(waits.format(one, two)), shell(waits.format(two, one)), shell("false")]
    outcomes = run.run_together(some, {}, time.monotonic() + 30)
    assert [each.outcome for each in outcomes] == ["ok", "ok", "failed"]


def test_the_rows_of_bench_are_read():
    done = subprocess.run(
        [
            *(PYTHON, "-m", "pycollective", "bench", "broadcast", "-b", "64", "-e", "128"),
            *("--rounds", "1", "--peers", "native", "-r", "1"),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
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


@pytest.mark.parametrize(
    ("capability", "made_for"),
    # What an nvcc does not know yet takes the PTX that is made with the usual ones.
    [(86, "86"), (90, "90"), (120, "")],
)
def test_images_are_made_for_the_machines_own_gpu(tmp_path, monkeypatch, capability, made_for):
    make_nvcc(tmp_path, monkeypatch)
    monkeypatch.setenv("KNOWN", "compute_80 compute_86 compute_90 compute_100")
    library = fake_driver.build(tmp_path, capability=capability)
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_DRIVER", library)
    run.architectures.cache_clear()
    try:
        assert run.environment()["PYCOLLECTIVE_CUDA_ARCHS"] == made_for
    finally:
        run.architectures.cache_clear()


def test_images_are_put_where_the_native_tests_take_them(tmp_path, monkeypatch):
    make_nvcc(tmp_path, monkeypatch)
    images.put(tmp_path / "built", tmp_path / "images")
    modules = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert {each.name for each in (tmp_path / "images").iterdir()} == {
        f"{name}.fatbin" for name in modules
    }
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "0")
    with pytest.raises(SystemExit, match="there is no nvcc"):
        images.put(tmp_path / "built", tmp_path / "images")


def test_images_without_the_abort_look_are_others_than_the_usual_ones(tmp_path, monkeypatch):
    make_nvcc(tmp_path, monkeypatch)
    other = images.without_abort_look(tmp_path / "built")
    images.put_litmus(tmp_path / "out" / "litmus.fatbin")
    first, litmus = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith("csrc/cuda/program.cu")
    assert "-DPYCOLLECTIVE_ABORT_EVERY=0" in first
    assert litmus.endswith("benchmarks/gpu/litmus.cu")
    assert "ABORT_EVERY" not in litmus
    # The name of what is kept says what it was compiled with.
    images.put(tmp_path / "built", tmp_path / "usual")
    usual = (tmp_path / "calls").read_text().splitlines()[2:]
    assert len(usual) == len(list((ROOT / "csrc" / "cuda").glob("*.cu")))
    assert not any("ABORT_EVERY" in call for call in usual)
    assert not other.exists()  # of one folder the last alone is kept: each has its own


@pytest.fixture
def no_torch(monkeypatch):
    """As where there is none: each look at it takes 2 s. Who starts the program below looks."""
    of_a_step = run.run_step

    def run_step(step, *rest):
        if "import sys, torch" in step.command[-1]:
            return Outcome(step.name, "failed", "")
        return of_a_step(step, *rest)

    monkeypatch.setattr(run, "run_step", run_step)


@pytest.mark.usefixtures("no_torch")
def test_native_programs_run_where_the_extension_is_not_built(tmp_path, monkeypatch):
    for name, value in standin.environment(devices=3).items():
        monkeypatch.setenv(name, value)
    whole, machine = run.probe()
    monkeypatch.setattr(run, "ROOT", tmp_path)  # where nothing is built
    bare, same = run.probe()
    assert "extension" not in whole
    assert bare == {**whole, "extension": "this tree's extension is not built"}
    assert (same["gpus"], same["cuda"]) == (machine["gpus"], machine["cuda"])
    assert same["gpus"] == [run.STANDIN] * 3
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_DRIVER", "/no/such/libcuda.so")
    assert "/no/such/libcuda.so" in run.probe()[0]["driver"]


@pytest.mark.storm  # compiles the native tests, and runs what `make gpu` does
@pytest.mark.timeout(600)
# A quarter of one of 33 multiprocessors has as many blocks as that of an H200 (docs/gpu.md).
@pytest.mark.parametrize(("gpus", "multiprocessors", "quarter"), [(2, 4, 4), (1, 33, 33)])
def test_all_that_can_run_on_the_stand_in_does(tmp_path, gpus, multiprocessors, quarter):
    played = standin.environment(devices=gpus, multiprocessors=multiprocessors)
    done = start("--out", tmp_path, **played)
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["machine"]["stand-in"] is True
    became = {step["name"]: step["outcome"] for step in record["steps"]}
    assert {"failed", "too slow"}.isdisjoint(became.values()), done.stdout
    assert done.returncode == 0
    for name in (
        *("build the native programs", "native test_cuda_programs"),
        *("verify, 2 processes", "bench, 2 processes", "arrays of own, 2 processes"),
        "verify by peer kernels, 2 processes on one GPU",
    ):
        assert became[name] == "ok"
    measured = {step["name"]: step["measured"] for step in record["steps"]}
    assert measured["arrays of own, 2 processes"] == {"own": "0 wrong with DeviceArray"}
    assert {row["wrong"] for row in measured["bench, 2 processes"].values()} == {"0"}
    for case in ("replay", "killed", "timeout"):
        assert measured[f"peer kernels of 2 processes: {case}"]["right"] is True
    limit = measured["four ranks with a quarter of the GPU each"]
    assert limit["blocks_of_a_rank"] == quarter
    assert limit["waited_at_once"] == 3 * quarter
    peers = measured["peer kernels, ranks of one process"]
    assert set(peers["one_shot_us"]) == {"2", "4", "8"}
    assert peers[f"direct, 8 ranks of 256 KiB, {quarter // 2} blocks"]["share_of_copy"] > 0
    loops = measured["litmus loops"]
    together = {"one process, one GPU", "one process, two GPUs"}
    if gpus == 1:
        together.remove("one process, two GPUs")
    assert set(loops) == {*together, "two processes, one GPU"}
    for where in loops:
        for name in ("message passing", "slot reuse"):
            assert loops[where][name]["exchanges"] > 0
            assert loops[where][name]["stale"] == loops[where][name]["overwritten"] == 0
    for where in together:
        assert loops[where]["early"]["stale"] > 0
        assert loops[where]["early done"]["overwritten"] > 0
    look = measured["what the abort look costs"]
    assert look["ring, 8 ranks"]["us"] > 0
    reasons = {step["name"]: step["reason"] for step in record["steps"]}
    for name in ("memcheck of every reduction", "racecheck of programs, ranks: 2"):
        assert became[name] == "not run"
        assert "the driver is the stand-in" in reasons[name]
    torch = "PyTorch's symmetric memory, 2 processes on one GPU"
    assert reasons[torch] == "torch is not there, or finds no GPU"
    assert f"{torch:56} not run: {reasons[torch]}" in done.stdout


# What is built is no matter of these two, and storm's builds it: no time, no step.
@pytest.mark.usefixtures("no_torch")
def test_results_of_the_stand_in_are_none_of_the_repositorys(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path)  # where a GPU's may be already
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["run", "--no-build", "--small", "--seconds", "0"])
    with pytest.raises(
        SystemExit, match="the driver is the stand-in, whose results are none of a GPU's"
    ):
        run.main()
    assert not (run.RESULTS / "gpu.json").exists()


@pytest.mark.storm
def test_without_a_driver_nothing_is_written_and_the_reason_is_said(tmp_path):
    missing = {"PYCOLLECTIVE_CUDA_DRIVER": "/no/such/libcuda.so"}
    done = start("--out", tmp_path / "out", "--seconds", 0, **missing)
    assert done.returncode == 1
    assert "no CUDA driver: /no/such/libcuda.so" in done.stdout
    assert not (tmp_path / "out").exists()


def test_every_native_test_that_runs_on_a_gpu_is_a_step():
    names = {step.name for step in steps.checks()}
    there = {path.stem for path in (ROOT / "csrc" / "tests").glob("test_cuda_*.cpp")}
    for name in there - {"test_cuda_images", "test_cuda_reduce", "test_cuda_signatures"}:
        assert f"native {name}" in names
