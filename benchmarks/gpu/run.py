"""All that one GPU can show, in one command: `make gpu`.

Usage: python3 -m benchmarks.gpu.run [--out DIR] [--seconds 470] [--no-build] [--small]

Nothing is installed and nothing fetched. Each step (steps.py) is a process of its own with a time
limit; one that fails, or cannot run here, stops no other, and is listed with its reason, as is what
is left when the time for everything is over. Where MPS can be had (mps.py), steps whose kernels
wait for another process's run under it. Writes DIR/gpu.json after each step, so that a run that is
cut leaves what it has, and prints a table (shown.py). On the stand-in for the driver (gpu.md)
the results are none of a GPU's: then DIR must be another than benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import images
from benchmarks.gpu.mps import Mps
from benchmarks.gpu.shown import Outcome, heading, table
from benchmarks.gpu.steps import BUILT, IMAGES, PYTHON, ROOT, Step, builds, checks, last_json

SCHEMA = "pycollective-gpu/1"
RESULTS = ROOT / "benchmarks" / "results"
TOOLKIT = "/usr/local/cuda/bin"  # where its programs are, if not on the path
STANDIN = "stand-in for a GPU"  # as the stand-in names its GPUs
OUT_OF_TIME = "out of time"
_TAIL = 25  # lines of a failed step that are kept
_WIDTH = 240  # of a line
# Without the extension, which may not be built: what native programs need is there all the same.
_REPORT = """
import ctypes, json, os
name = os.environ.get("PYCOLLECTIVE_CUDA_DRIVER") or "libcuda.so.1"
try:
    driver = ctypes.CDLL(name)
except OSError as error:
    print(json.dumps({"no driver": str(error)}))
    raise SystemExit
count, version, gpu = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if failed or count.value == 0:
    print(json.dumps({"no driver": f"{name}: CUDA error {failed}, {count.value} GPUs"}))
    raise SystemExit
driver.cuDriverGetVersion(ctypes.byref(version))
devices, architectures, part = [], set(), ctypes.c_int()
for number in range(count.value):
    driver.cuDeviceGetName(gpu, 100, number)
    devices.append(gpu.value.decode())
    capability = 0
    for attribute in (75, 76):  # major, minor
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, number)
        capability = 10 * capability + part.value
    architectures.add(capability)
print(json.dumps({
    "devices": devices, "driver": name, "version": version.value,
    "architectures": [str(each) for each in sorted(architectures)],
}))
"""
# Prints them with torch's GPUs, of which there may be none.
_VERSIONS = """
import json, torch
there = {"torch": torch.__version__, "torch finds a GPU": torch.cuda.is_available()}
try:
    import triton
    there["triton"] = triton.__version__
except ImportError:
    pass
if there["torch finds a GPU"]:
    there["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(there))
"""


@functools.cache
def report() -> dict[str, Any]:
    """What the driver says of this machine's GPUs; without one, why, under "no driver"."""
    done = subprocess.run(
        [PYTHON, "-c", _REPORT], check=False, capture_output=True, text=True, timeout=60
    )
    return last_json(done.stdout) or {"no driver": "nothing is known of a driver"}


def architectures() -> str:
    """Of this machine's GPUs, as nvcc names them; empty where nvcc or the driver does not tell.

    Then nvcc compiles for the usual ones, and to PTX that later GPUs take.
    """
    found = report().get("architectures", [])
    nvcc = images.find_nvcc()
    if nvcc is None:
        return ""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=False, capture_output=True, text=True)
    known = listed.stdout.split()
    return " ".join(found) if all(f"compute_{each}" in known for each in found) else ""


def environment() -> dict[str, str]:
    """Of every step: this tree, its GPUs' architectures, and the images that are made for them."""
    mine = {
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT]),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYCOLLECTIVE_CUDA_ARCHS": architectures(),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
    }
    if IMAGES.is_dir() and "PYCOLLECTIVE_CUDA_IMAGES" not in os.environ:
        mine["PYCOLLECTIVE_CUDA_IMAGES"] = str(IMAGES)
    return {**os.environ, **mine}


def run_step(step: Step, missing: dict[str, str], limit: float, mps: Mps | None = None) -> Outcome:
    """Run it for `limit` seconds at most; `missing` says why what is not here is not.

    `mps` is started where the step is to run under it, and left running.
    """
    lacks = [missing[need] for need in step.needs if need in missing]
    if lacks:
        return Outcome(step.name, "not run", "; ".join(lacks))
    if limit < 1:
        return Outcome(step.name, "not run", OUT_OF_TIME)
    under, why = {}, []
    if step.under_mps and mps is not None:
        under = mps.start()
        why = [f"without MPS: {mps.why_not}" if mps.why_not else "under MPS"]
    started = time.monotonic()
    with tempfile.TemporaryFile() as written:  # a pipe would stay open with whoever outlives it
        try:
            process = subprocess.Popen(
                step.command,
                **{"cwd": step.folder, "env": {**environment(), **under, **step.environment}},
                **{"stdin": subprocess.DEVNULL, "stdout": written, "stderr": subprocess.STDOUT},
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(step.name, "failed", str(error))
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_session(process.pid)
            process.wait()
        written.seek(0)
        said = written.read().decode(errors="replace")
    took = round(time.monotonic() - started, 2)
    tail = [line[:_WIDTH] for line in said.splitlines()[-_TAIL:]]
    if status is None:
        over = f", and then {OUT_OF_TIME}" if limit < step.limit else ""
        how = "; ".join([f"not done in {limit:.0f} s{over}", *why])
        return Outcome(step.name, "too slow", how, took, step.reads(said), tail)
    if status != 0:
        how = f"status {status}" if status > 0 else f"ended by signal {-status}"
        return Outcome(step.name, "failed", "; ".join([how, *why]), took, step.reads(said), tail)
    return Outcome(step.name, "ok", "; ".join(why), took, step.reads(said))


def end_session(leader: int) -> None:
    """Kill a step and all that it has started, whatever process groups they have made."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # After the name, which may hold spaces: state, parent, process group, session.
            session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
            if int(session) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def without(*programs: str) -> dict[str, str]:
    """Of these programs those that are not here, and that in words."""
    path = environment()["PATH"]
    return {
        each: f"there is no {each}" for each in programs if shutil.which(each, path=path) is None
    }


def probe() -> tuple[dict[str, str], dict[str, Any]]:
    """What steps may need and is not here: {what: why}; and what the machine is."""
    missing = {}
    if not [*(ROOT / "pycollective").glob("_core*.so")]:
        missing["extension"] = "this tree's extension is not built"
    if "no driver" in report():
        missing["driver"] = report()["no driver"]
    gpus = report().get("devices", [])
    if STANDIN in gpus:
        missing["a real GPU"] = "the driver is the stand-in"
    missing.update(without("nvcc", "mpiexec", "compute-sanitizer"))
    for module in ("cupy", "mpi4py", "triton", "ml_dtypes"):
        if importlib.util.find_spec(module) is None:
            missing[module] = f"there is no {module}"
    asked = Step("", (PYTHON, "-c", _VERSIONS), 60, (), reads=last_json)
    versions = run_step(asked, {}, 60).measured
    if not versions.pop("torch finds a GPU", False):
        missing["torch CUDA"] = "torch is not there, or finds no GPU"
    machine = {
        "gpus": gpus,
        "driver": report().get("driver", ""),
        "driver_version": driver_version(),
        "cuda": report().get("version"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "stand-in": STANDIN in gpus,
        **versions,
    }
    return missing, machine


def driver_version() -> str:
    """Of the kernel's module, which CUDA does not tell; empty where there is none."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", said)
    return found[1] if found else ""


class Results:
    """DIR/gpu.json, which each call writes anew: a run that is cut leaves a whole file."""

    def __init__(self, folder: Path, machine: dict[str, Any], before: list[Outcome]) -> None:
        self._folder, self._before = folder, before
        self._about = {"schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "machine": machine}

    def __call__(self, later: list[Outcome]) -> None:
        """Write what became of the steps so far."""
        record = {**self._about, "steps": [asdict(each) for each in self._before + later]}
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / "gpu.json.new"
        written.write_text(json.dumps(record, indent=1) + "\n")
        written.replace(self._folder / "gpu.json")


def nowhere(outcomes: list[Outcome]) -> None:
    """In place of `Results`: there is no GPU, or nobody asks."""


def end_on_sigterm() -> None:
    """As on Ctrl-C, so that what was started is ended: `timeout` ends a run by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_all(
    steps: list[Step],
    missing: dict[str, str],
    end: float,
    mps: Mps | None = None,
    after_each: Callable[[list[Outcome]], None] = nowhere,
) -> list[Outcome]:
    """Each in turn, whatever became of those before, until `end` on the monotonic clock.

    `after_each` has the outcomes so far. `mps` runs only while steps do that are to run under it.
    """
    outcomes: list[Outcome] = []
    try:
        for step in steps:
            if mps is not None and not step.under_mps:
                mps.stop()
            limit = min(step.limit, end - time.monotonic())
            outcomes.append(run_step(step, missing, limit, mps))
            print(f"... {heading(outcomes[-1])}", flush=True)
            after_each(outcomes)
    finally:
        if mps is not None:
            mps.stop()
    return outcomes


def run_together(steps: list[Step], missing: dict[str, str], end: float) -> list[Outcome]:
    """The same at once, of steps that need nothing of each other."""
    with ThreadPoolExecutor(len(steps)) as pool:
        return list(pool.map(lambda step: run_all([step], missing, end)[0], steps))


def main() -> None:
    """Build, run, write. Status 1 where a step failed or was too slow, or there is no GPU.

    A target that is missed is no failure.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="where gpu.json goes")
    parser.add_argument("--seconds", type=float, default=470.0, help="for everything")
    parser.add_argument("--no-build", action="store_true", help="what is built is used as it is")
    parser.add_argument("--small", action="store_true", help="only show that all works")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    BUILT.mkdir(parents=True, exist_ok=True)
    steps = builds(given.small)
    if given.no_build:
        steps = steps[1:]  # the extension alone takes long, and others may be using it
    outcomes = run_together(steps, without("nvcc"), end)
    missing, machine = probe()
    if not given.no_build and outcomes[0].outcome != "ok":
        missing["extension"] = "this tree's extension was not built"
    if machine["stand-in"] and given.out.resolve() == RESULTS:
        sys.exit(
            "the driver is the stand-in, whose results are none of a GPU's: give another --out"
        )
    steps += checks(given.small)
    end_on_sigterm()
    there_is = "driver" not in missing
    mps = Mps(environment(), missing.get("driver") or missing.get("a real GPU", ""))
    write = Results(given.out, machine, outcomes) if there_is else nowhere
    outcomes = outcomes + run_all(steps[len(outcomes) :], missing, end, mps, write)
    shows = [step.shows for step in steps]
    print("\n".join(table(shows, outcomes, is_real=not machine["stand-in"])))
    if there_is:
        print(f"see {given.out / 'gpu.json'}")
    bad = [each for each in outcomes if each.outcome in ("failed", "too slow")]
    sys.exit(1 if bad or "driver" in missing else 0)


if __name__ == "__main__":
    main()
