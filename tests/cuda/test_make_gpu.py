"""`make gpu`: whatever becomes of a step, the others run, and the file says what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu import quantized, run, shown, sparse
from benchmarks.gpu.reduce import CASES, DIFFERENT, Problem
from benchmarks.gpu.shown import Outcome, table
from benchmarks.gpu.steps import ROOT, Step, last_json
from pycollective import _core
from pycollective.torch.ordered import plain
from pycollective.triton.formats import words
from tests.cuda import standin
from tests.launchers import Launcher
from tests.triton.compiled import module


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
    assert (
        table([step.shows for step in some], outcomes)[-2]
        == "1 ok, 2 failed, 1 too slow, 1 not run"
    )


@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)  # of 2 bytes and of 1
def test_the_benchmark_of_reductions_sees_a_wrong_bit(case):
    """Its problem, on the CPU and by torch's operations: elements that repeat, and some more."""
    problem = Problem(case, DIFFERENT + 3, "cpu")
    problem.out.zero_()
    assert problem.wrong() > DIFFERENT // 2
    problem.run(plain.reduce)
    assert problem.wrong() == 0
    words(problem.out)[-1] ^= 1
    assert problem.wrong() == 1


class CpuKernels:
    """Called as those of `pycollective.triton.quantize`."""

    @staticmethod
    def quantize(*arguments):
        _core.quantize(*arguments[:-1])

    @staticmethod
    def dequantize(*arguments):
        _core.dequantize(*arguments[:-1])


@pytest.mark.parametrize("case", quantized.CASES, ids=str)
def test_the_benchmark_of_quantization_sees_a_wrong_bit(case):
    """Its problem, on the CPU and by the CPU's kernels."""
    problem = quantized.problem_of(case, 3003, "cpu")
    result = problem.payload if case.call == "quantize" else problem.out.view(torch.int32)
    result.zero_()
    assert problem.wrong() > 90
    problem.run(CpuKernels)
    assert problem.wrong() == 0
    result[-1] ^= 1
    assert problem.wrong() == 1


def test_the_benchmark_of_top_k_sees_a_wrong_byte():
    """Its problem, on the CPU and in Triton's interpreter."""
    kernels = module("top_k", interpreted=True)
    problem = sparse.Selecting(sparse.CHUNK, 9003, "cpu", kernels)
    problem.left.zero_()
    assert problem.wrong() > 90
    problem.run(kernels)
    assert problem.wrong() == 0
    problem.values.view(torch.uint8)[0] ^= 1
    assert problem.wrong() == 1


def test_the_benchmark_of_places_sees_a_wrong_byte():
    """Its problem, on the CPU and in Triton's interpreter."""
    packing, sums = (module(name, interpreted=True) for name in ("index_packing", "sparse_sums"))
    problem = sparse.Exchanging(9003, "cpu", packing)
    problem.out.zero_()
    assert problem.wrong() > 90
    problem.pack(packing)
    problem.average(sums)
    assert problem.wrong() == 0
    problem.message[40] ^= 1
    problem.out.view(torch.uint8)[0] ^= 1
    assert problem.wrong() == 2


def test_what_the_benchmark_of_top_k_shows():
    row = {"us": 100.0, "copy_us": 69.0, "share_of_copy": 0.69, "bytes": 9 << 26}
    torchs = {**row, "torch_us": 900.0, "torch_over_ours": 9.0, "wrong": 1}
    lines = shown.triton_sparse({"by chunk": {**row, "wrong": 0}, "by tensor": torchs})
    assert [line.met for line in lines] == [None, False, True, None, None, False, False]


@pytest.mark.storm  # two processes that import torch and Triton
def test_the_benchmark_over_nccl_works_over_gloo():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ordered", "2", "--cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    rows = shown.over_nccl(json.loads(done.stdout))
    assert len(rows) == 18, done.stderr
    assert all(row.met is not False for row in rows)


@pytest.mark.storm  # trains 24 times
def test_the_benchmark_of_ddp_works_over_gloo():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ddp", "5", "--cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = shown.ddp_over_nccl(json.loads(done.stdout))
    assert [row.met for row in rows].count(True) == 10


def test_what_the_benchmark_of_ddp_shows():
    row = {"digest": "1", "cpu_digest": "1", "ms": 2.0}
    rows = shown.ddp_over_nccl({"own": {**row, "digest": "2"}, "ordered": row, "1 bit": row})
    assert [row.met for row in rows] == [None, None, True, None, True]
    assert not shown.ddp_over_nccl({"ordered": {**row, "digest": "2"}})[1].met


@pytest.mark.storm  # compiles the native tests, and runs what `make gpu` does
@pytest.mark.timeout(600)
# A quarter of one of 33 multiprocessors has as many blocks as that of an H200 (docs/gpu.md).
@pytest.mark.parametrize(("gpus", "multiprocessors", "quarter"), [(2, 4, 4), (1, 33, 33)])
def test_all_that_can_run_on_the_stand_in_does(tmp_path, gpus, multiprocessors, quarter):
    played = standin.environment(devices=gpus, multiprocessors=multiprocessors)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", "--no-build", "--small", "--out", tmp_path],
        env=Launcher().environment(CXX=os.environ.get("CXX", "g++"), **played),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
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
    assert bool(measured["native test_cuda_order"]) is (gpus == 1)
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
    for name in ("memcheck of programs", "racecheck of programs, ranks: 2"):
        assert became[name] == "not run"
        assert "the driver is the stand-in" in reasons[name]
    for name in ("reduce", "quantized", "sparse"):
        assert reasons[f"Triton {name}"] == "torch is not there, or finds no GPU"
    for name in ("ordered", "DDP"):
        over_nccl = f"{name} over NCCL, 2 processes on one GPU"
        assert reasons[over_nccl] == "torch is not there, or finds no GPU"
    torch = "PyTorch's symmetric memory, 2 processes on one GPU"
    assert reasons[torch] == "torch is not there, or finds no GPU"
    assert f"{torch:56} not run: {reasons[torch]}" in done.stdout


def test_results_of_the_stand_in_are_none_of_the_repositorys(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path)  # where a GPU's may be already
    monkeypatch.setattr(run, "report", run.report.__wrapped__)  # not another driver's
    of_a_step = run.run_step

    def run_step(step, *rest):  # as without torch: each look at it takes 2 s
        if "import sys, torch" in step.command[-1]:
            return Outcome(step.name, "failed", "")
        return of_a_step(step, *rest)

    monkeypatch.setattr(run, "run_step", run_step)
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["run", "--no-build", "--small", "--seconds", "0"])
    with pytest.raises(
        SystemExit, match="the driver is the stand-in, whose results are none of a GPU's"
    ):
        run.main()
    assert not (run.RESULTS / "gpu.json").exists()
