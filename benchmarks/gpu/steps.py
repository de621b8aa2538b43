"""What `make gpu` runs, as data: each step's command, its time, and what it cannot do without."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "build" / "native" / "plain"
BUILT = ROOT / "build" / "gpu"
PYTHON = sys.executable
KI, MI = 1 << 10, 1 << 20

_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# All ranks on one GPU, as users have it only for tests.
_ONE_GPU = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
}

DRIVER = ("driver",)  # all that a native program needs
CORE = ("extension", "driver")

Reader = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One check or measurement; a process of its own.

    Attributes:
        name: in the table and the file.
        command: its arguments.
        limit: seconds, after which it is ended.
        needs: of `run.probe`'s names.
        environment: set besides.
        reads: what it has measured, out of what it printed.
        folder: that it runs in.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = CORE
    environment: dict[str, str] = field(default_factory=dict)
    reads: Reader = lambda said: {}
    folder: Path = ROOT


def last_json(said: str) -> dict[str, Any]:
    """The last line that is an object of JSON; empty where there is none."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def bench_rows(said: str) -> dict[str, Any]:
    """Of pycollective's and its peers' rows: microseconds, GB/s, wrong elements, by size."""
    number = r"([\d.]+|n/a) +"
    row = rf"^ +(\d+) +\d+ +\w+ +\w+ +-?\d+ +{number * 4}{number}([\w-]+)(: .*)?$"
    return {
        f"{library} {size}": (note or "")[2:] or {"us": us, "busbw": busbw, "wrong": wrong}
        for size, us, _, busbw, wrong, _, library, note in re.findall(row, said, re.MULTILINE)
    }


def _native(name: str, limit: float) -> Step:
    """One of the native tests, beside the files that it reads."""
    command = (str(NATIVE / name),)
    return Step(f"native {name}", command, limit, DRIVER, folder=ROOT / "csrc" / "tests")


def _python(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, *arguments)


def _pycollective(*arguments: str) -> tuple[str, ...]:
    return _python("-m", "pycollective", *arguments)


def builds() -> list[Step]:
    """What is compiled, in this order."""
    native = [
        *("test_cuda_reduce", "test_cuda_signatures"),
        *(path.stem for path in _more_native_tests()),
        *("peer_kernels", "reduce_bandwidth"),
    ]
    targets = [f"../../build/native/plain/{name}" for name in native]
    return [
        Step(
            "build the extension",
            _python("setup.py", "build_ext", "--inplace"),
            *(300, ()),
            {"PYCOLLECTIVE_TORCH": "0"},
        ),
        Step(
            "build the native programs",
            (
                *("make", "-k", "-j16", "-C", "csrc/tests"),
                *("../../build/native/cuda/embedded.cpp", *targets),
            ),
            *(240, ()),
        ),
        Step("compile the kernels", _python("-m", "benchmarks.gpu.images"), 100, ("nvcc",)),
    ]


def _more_native_tests() -> list[Path]:
    """Of what runs on a GPU; those of images and signatures need none, and fake what they use."""
    known = {"test_cuda_reduce", "test_cuda_images", "test_cuda_signatures"}
    return [p for p in sorted((ROOT / "csrc/tests").glob("test_cuda_*.cpp")) if p.stem not in known]


def checks(small: bool = False) -> list[Step]:
    """What is checked and measured, in this order; `small` only shows that all works."""
    reduce = str(NATIVE / "test_cuda_reduce")
    largest = "64K" if small else "64M"
    leaf = ("1", "3") if small else ("256", "20")
    narrow = ("-d", "float32", "--operation", "all_reduce") if small else ()
    steps = [
        Step("driver report", _pycollective("doctor"), 30, ("extension",)),
        Step("signatures are <cuda.h>'s", (str(NATIVE / "test_cuda_signatures"),), 20, ("nvcc",)),
        _native("test_cuda_reduce", 60),  # the bits of every reduction
        *(_native(path.stem, 60) for path in _more_native_tests()),
        Step(
            "ordered reduce, 8 leaves, bf16",
            (str(NATIVE / "reduce_bandwidth"), *leaf),
            *(40, DRIVER),
            reads=last_json,
        ),
    ]
    steps += _peers(small)
    for ranks in (2,) if small else (2, 4, 8):
        quick = ("--quick",) if small or ranks > 4 else ()
        command = ("-m", "benchmarks.gpu.same_digest", str(ranks), *quick, *narrow)
        steps.append(
            Step(f"verify, {ranks} processes", _python(*command), 90, reads=last_json),
        )
    for ranks in (2,) if small else (1, 2, 4, 8):
        sizes = ("-b", "4K", "-e", largest, "-f", "16", "--rounds", "1" if small else "3")
        peers = ("--peers", "nccl") if ranks < 4 and not small else ()
        command = ("bench", "all_reduce", "--device", "cuda", "--ranks", str(ranks), *sizes)
        steps.append(
            Step(
                f"bench, {ranks} process{'es' if ranks > 1 else ''}",
                _pycollective(*command, *peers),
                *(60, CORE),
                reads=bench_rows,
            )
        )
    arrays = ("-m", "benchmarks.gpu.arrays")
    for name, needs in (("own", ()), ("cupy", ("cupy",)), ("torch", ("torch CUDA",))):
        command = ("run", "-n", "2", *arrays, name)
        steps.append(
            Step(
                f"arrays of {name}, 2 processes",
                _pycollective(*command),
                *(60, (*CORE, *needs)),
                reads=last_json,
            )
        )
    for name, needs in (("own", ()), ("cupy", ("cupy",))):
        for hosts in ("", "2x1"):  # over shared memory; over MPI
            steps.append(
                Step(
                    f"arrays of {name} under mpiexec" + (", as two hosts" if hosts else ""),
                    ("mpiexec", "-n", "2", PYTHON, *arrays, name),
                    *(60, (*CORE, *needs, "mpi4py", "mpiexec")),
                    {**_MPI_AS_ROOT, "PYCOLLECTIVE_TOPOLOGY": hosts},
                    last_json,
                )
            )
    for tool in ("memcheck", "synccheck"):
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", reduce)
        needs = (*DRIVER, "a real GPU", "compute-sanitizer")
        steps.append(Step(f"{tool} of every reduction", command, 90, needs))
    programs = str(NATIVE / "test_cuda_programs")
    for ranks in ("1", "2"):  # one waits for nobody, whatever the tool does to launches
        command = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9")
        steps.append(
            Step(
                f"racecheck of programs, ranks: {ranks}",
                (*command, programs, ranks),
                *(60, (*DRIVER, "a real GPU", "compute-sanitizer")),
                folder=ROOT / "csrc" / "tests",
            )
        )
    return steps


def _peers(small: bool) -> list[Step]:
    """Kernels that wait for each other's on one GPU: of one process, and of two."""
    sizes = ("3", "1", "5003", "256") if small else ()
    operations = "all_reduce" if small else "all_reduce,reduce_scatter,all_gather,broadcast"
    verified = ("--quick", "--timeout", "60", "--operation", operations, "-d")
    dtypes = "float32" if small else "float32,bfloat16"
    two = {**_ONE_GPU, "PYCOLLECTIVE_CUDA_WAY": "peer"}
    return [
        Step(
            "peer kernels, ranks of one process",
            (str(NATIVE / "peer_kernels"), *sizes),
            *(60, DRIVER, _ONE_GPU, last_json),
            folder=ROOT / "csrc" / "tests",
        ),
        Step(
            "verify by peer kernels, 2 processes on one GPU",
            _python("-m", "benchmarks.gpu.same_digest", "2", *verified, dtypes),
            *(120, CORE, two, last_json),
        ),
        *(
            Step(
                f"peer kernels of 2 processes: {case}",
                _python("-m", "benchmarks.gpu.peer_processes", case),
                *(60, CORE, two, last_json),
            )
            for case in ("replay", "killed", "timeout")
        ),
    ]
