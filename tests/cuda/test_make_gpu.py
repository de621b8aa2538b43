"""`make gpu`: whatever becomes of a step, the others run, and the file says what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import mps, ordered_bits, price, quantized, run, shown, sparse
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


CONTROL = f"""#!{sys.executable}
import json, os, sys
said = "-d" if "-d" in sys.argv else sys.stdin.read().strip()
with open(os.environ["MPS_LOG"], "a") as log:
    print(json.dumps([said, os.environ["CUDA_MPS_PIPE_DIRECTORY"]]), file=log)
open(os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control"), "w").close()
sys.exit(int(os.environ.get("MPS_STATUS", "0")))
"""
SAYS_MPS = """printf '{"mps": "%s"}' $CUDA_MPS_PIPE_DIRECTORY"""


@pytest.fixture
def control(monkeypatch, tmp_path):
    """A control daemon that only writes down what it is told: `control()` has that, in order."""
    program, log = tmp_path / "bin" / mps.CONTROL, tmp_path / "log"
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("MPS_LOG", str(log))
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def under_mps(text, **more):
    return replace(shell(text, **more), under_mps=True)


def told(calls):
    return [said.partition(" ")[0] for said, _ in calls]


def test_mps_runs_while_steps_are_to_run_under_it(control):
    service = mps.Mps(os.environ)
    before, after = shell(SAYS_MPS), shell(SAYS_MPS)
    beside = [under_mps(SAYS_MPS), under_mps("exit 3")]
    seen = []
    steps = [before, *beside, after, under_mps(SAYS_MPS)]
    outcomes = run.run_all(
        steps, {}, time.monotonic() + 60, service, lambda _: seen.append(told(control()))
    )
    assert seen == [[], ["-d"], ["-d"], ["-d", "quit"], ["-d", "quit", "-d"]]
    assert told(control()) == ["-d", "quit", "-d", "quit"]
    pipes = [folder for _, folder in control()]
    assert pipes[0] == pipes[1] != pipes[2] == pipes[3]
    assert not any(Path(each).exists() for each in pipes)
    became = [each.measured.get("mps") for each in outcomes]
    assert became == ["", pipes[0], None, "", pipes[2]]
    reasons = [each.reason for each in outcomes]
    assert reasons == ["", "under MPS", "status 3; under MPS", "", "under MPS"]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"PATH": "/bin"}, "there is no nvidia-cuda-mps-control"),
        ({"MPS_STATUS": "1"}, "nvidia-cuda-mps-control -d: status 1"),
        ({"PYCOLLECTIVE_STANDIN_DEVICES": "0"}, "a client has CUDA error 100"),
    ],
    ids=["not there", "not permitted", "refuses clients"],
)
def test_without_mps_steps_run_all_the_same_and_say_so(control, monkeypatch, variables, why):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    steps = 2 * [under_mps(SAYS_MPS)]
    outcomes = run.run_all(steps, {}, time.monotonic() + 60, mps.Mps(os.environ))
    assert [each.reason for each in outcomes] == 2 * [f"without MPS: {why}"]  # tried once
    assert [each.measured for each in outcomes] == 2 * [{"mps": ""}]
    assert told(control()) == ([] if "PATH" in variables else ["-d", "quit"])


def test_mps_is_not_started_for_what_does_not_run(control):
    steps = [under_mps("true", needs=("cupy",)), under_mps("true")]
    run.run_all(steps[:1], {"cupy": "no"}, time.monotonic() + 60, mps.Mps(os.environ))
    run.run_all(steps[1:], {}, time.monotonic(), mps.Mps(os.environ))
    assert not control()


RUN = """
import os, signal, sys, time
from benchmarks.gpu import mps, run
from benchmarks.gpu.steps import Step
run.end_on_sigterm()
step = Step("waits", ("sh", "-c", "echo > $STARTED; sleep 60"), 60, (), under_mps=True)
run.run_all([step], {}, time.monotonic() + 60, mps.Mps(os.environ))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_a_run_that_is_ended_ends_mps_too(control, tmp_path, how):
    started = tmp_path / "started"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env={**os.environ, "STARTED": str(started), "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait(30) != 0
    assert told(control()) == ["-d", "quit"]


def test_results_are_written_after_each_step(tmp_path):
    write = run.Results(tmp_path, {"gpus": ["some"]}, [Outcome("built", "ok")])
    seen = []
    steps = [shell("""echo '{"a": 1}'"""), shell("exit 3")]

    def after_each(outcomes):
        write(outcomes)
        seen.append(json.loads((tmp_path / "gpu.json").read_text()))

    run.run_all(steps, {}, time.monotonic() + 60, None, after_each)
    assert [[each["outcome"] for each in record["steps"]] for record in seen] == [
        ["ok", "ok"],
        ["ok", "ok", "failed"],
    ]
    assert seen[-1]["machine"] == {"gpus": ["some"]}
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]


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


def over_gloo(program, number):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{program}", number, "--cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_check_of_bits_sees_a_wrong_one():
    inputs = ordered_bits.Inputs("bfloat16", "avg", torch.device("cpu"))
    words = np.resize(inputs.result.view(np.int16), 3 * ordered_bits.DIFFERENT + 5)
    found = torch.from_numpy(words).view(torch.bfloat16)
    assert not inputs.wrong(found, len(words))
    assert not inputs.wrong(found[20_001:], len(words), 20_001)
    words[-1] ^= 1
    assert inputs.wrong(found, len(words))
    assert inputs.wrong(found[20_001:], len(words), 20_001)


def test_what_the_check_of_bits_shows():
    right = {"cases": 3, "wrong": 0, "first": ""}
    bad = {**right, "wrong": 1, "first": "x", "us": 100.0, "own_us": 50.0}
    rows = shown.bits_over_nccl({"a": right, "b": bad})
    assert [(row.label, row.value, row.met) for row in rows] == [
        *(("a", "3", None), ("  wrong", "0", True), ("b", "3", None), ("  wrong: x", "1", False)),
        ("  the host, a small all-reduce", "100", None),
        ("  NCCL's own", "50", None),
    ]


@pytest.mark.storm  # two processes that import torch and Triton
def test_the_check_of_bits_works_over_gloo():
    found = over_gloo("ordered_bits", "5000")
    assert [(row["cases"], row["wrong"]) for row in found.values()] == [
        *((2 * 13 * 5, 0), (3, 0), (1, 0), (1, 0))
    ]


@pytest.mark.storm  # trains, and compiles
def test_the_check_of_the_backend_works_over_gloo():
    found = over_gloo("backend", "1")
    assert {row["wrong"] for row in found.values()} == {0}
    assert all(row["cases"] > 0 for row in found.values())


@pytest.mark.storm  # two processes that import torch and Triton
def test_the_benchmark_over_nccl_works_over_gloo():
    rows = shown.over_nccl(over_gloo("ordered", "2"))
    assert len(rows) == 18
    assert all(row.met is not False for row in rows)


@pytest.mark.storm  # six models under DDP
def test_the_benchmark_of_prices_works_over_gloo():
    found = over_gloo("price", "1")
    assert len(found["calls"]) == 6
    assert {row["wrong"] for row in found["calls"].values()} == {0}
    assert set(found["DDP"]) == set(price.ways())
    assert all(row["alike"] for row in found["DDP"].values())
    rows = [*found["calls"].values(), *found["DDP"].values()]
    times = [value for row in rows for name, value in row.items() if name.endswith("_us")]
    assert len(times) == 6 * 4 + 6 * 2
    assert all(value > 0 for value in times)
    assert len(shown.price(found)) == 6 * 4 + 6 * 2 + 4


@pytest.mark.storm  # trains 24 times
def test_the_benchmark_of_ddp_works_over_gloo():
    rows = shown.trained_over_nccl(over_gloo("ddp", "5"))
    assert [row.met for row in rows].count(True) == 10


@pytest.mark.storm  # six processes that train
def test_the_benchmark_of_leaves_works_over_gloo():
    found = over_gloo("leaves", "2")
    assert len({row["LeafSync"] for row in found.values()}) == 1
    assert len({row["DDP"] for row in found.values()}) == 3
    rows = shown.leaves(found)
    assert [row.met for row in rows if "ordered.hook" not in row.label].count(True) == 3


def test_what_the_benchmark_of_leaves_shows():
    launch = {"us": 10.0, "copy_us": 8.0, "share_of_copy": 0.8, "bytes": 1 << 26, "wrong": 0}
    times = {"LeafSync": 106.0, "DDP with ordered.hook": 100.0}
    rows = shown.leaves(
        {
            "1 rank": {"LeafSync": "a", "DDP": "b"},
            "2 ranks": {"LeafSync": "c", "DDP": "d", "step_ms": times},
            "3 ranks": {"refused": "no"},
            "a leaf": launch,
        }
    )
    assert [row.met for row in rows] == [
        *(True, None, False, None, None, False, None, None, False, True)
    ]


@pytest.mark.storm  # trains six times
def test_the_benchmark_of_fsdp_works_over_gloo():
    found = over_gloo("fsdp", "5")
    assert [row.met for row in shown.trained_over_nccl(found)] == [None, None, True, None, True]
    # What fp32 alone can say has counted.
    assert found["ordered, bf16"]["digest"] != found["ordered, fp32"]["digest"]


def test_what_the_benchmark_of_prices_shows():
    call = {"bare_host_us": 100.0, "bare_whole_us": 1000.0, "bytes": 64 << 20, "copy_us": 10.0}
    call |= {"ordered_host_us": 131.0, "ordered_whole_us": 1081.0, "wrong": 0}
    met = {**call, "ordered_host_us": 130.0, "ordered_whole_us": 1080.0, "wrong": 1}
    small = {**call, "bytes": 4}
    step = {"host_us": 100.0, "whole_us": 200.0, "alike": True}
    ddp = {"own": step, "1 bit": {**step, "host_us": 151.0}, "8 bits": {**step, "alike": False}}
    rows = shown.price({"calls": {"a": call, "b": met, "c": small}, "DDP": ddp})
    assert [row.met for row in rows] == [
        *(None, False, False, True),
        *(None, True, True, False),
        *(None, False, None, True),
        *(None, True, None, False, True, None, False),
    ]
    refused = shown.price({"calls": {}, "DDP": {"refused": "no NCCL"}})
    assert [row.why_not for row in refused] == ["no NCCL"]


def test_what_the_benchmark_of_ddp_shows():
    row = {"digest": "1", "cpu_digest": "1", "ms": 2.0}
    rows = shown.trained_over_nccl({"own": {**row, "digest": "2"}, "ordered": row, "1 bit": row})
    assert [row.met for row in rows] == [None, None, True, None, True]
    assert not shown.trained_over_nccl({"ordered": {**row, "digest": "2"}})[1].met


@pytest.mark.storm  # compiles the native tests, and runs what `make gpu` does
@pytest.mark.timeout(600)
# A quarter of one of 33 multiprocessors has as many blocks as that of an H200 (docs/inside/gpu.md).
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
    for name in ("bits of ordered calls", "ordered", "price", "the backend", "FSDP2", "DDP"):
        over_nccl = f"{name} over NCCL, 2 processes on one GPU"
        assert reasons[over_nccl] == "torch is not there, or finds no GPU"
    why_not = "without MPS: the driver is the stand-in"
    assert reasons["peer kernels of 2 processes: replay"] == why_not
    assert not reasons["peer kernels of 2 processes: killed"]
    torch = "PyTorch's symmetric memory, 2 processes on one GPU"
    assert reasons[torch] == "torch is not there, or finds no GPU"
    assert f"{torch:56} not run: {reasons[torch]}" in done.stdout


def test_results_of_the_stand_in_are_none_of_the_repositorys(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path)  # where a GPU's may be already
    monkeypatch.setattr(run, "report", run.report.__wrapped__)  # not another driver's
    of_a_step = run.run_step

    def run_step(step, *rest):  # as without torch: each look at it takes 2 s
        if "import json, torch" in step.command[-1]:
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
