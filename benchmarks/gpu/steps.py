"""What `make gpu` runs, as data: each step's command, its time, and what it cannot do without.

What has never run on a GPU comes first, and what has long been known last: what is left when the
time for all is over is not run.
"""

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

from benchmarks.gpu import shown

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "build" / "native" / "plain"
BUILT = ROOT / "build" / "gpu"
IMAGES, NO_ABORT_LOOK, LITMUS = BUILT / "images", BUILT / "no_abort_look", BUILT / "litmus.fatbin"
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
        under_mps: whether its processes share a GPU better under MPS, where that can be had.
        shows: of that, what the table has.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = CORE
    environment: dict[str, str] = field(default_factory=dict)
    reads: Reader = lambda said: {}
    folder: Path = ROOT
    shows: shown.Shows = shown.nothing
    under_mps: bool = False


def last_json(said: str) -> dict[str, Any]:
    """The last line that is an object of JSON; empty where there is none."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def bench_rows(said: str) -> dict[str, Any]:
    """Of pycollective's and its peers' rows: microseconds, GB/s, wrong elements.

    By library, the phase of the machine where there is one, and size.
    """
    number = r"([\d.]+|n/a) +"
    start = rf"^ +(\d+) +\d+ +\w+ +\w+ +-?\d+ +{number * 4}{number}"
    rows = re.findall(rf"{start}(?:(\w+) +)?([\w-]+)(: .*)?$", said, re.MULTILINE)
    return {
        " ".join(filter(None, (library, phase, size))): (
            note[2:] or {"us": us, "busbw": busbw, "wrong": wrong}
        )
        for size, us, _, busbw, wrong, _, phase, library, note in rows
    }


def skipped_cases(said: str) -> dict[str, Any]:
    """Why a native test has left cases out, by case."""
    return dict(re.findall("^(.+): skipped, (.+)$", said, re.MULTILINE))


def _native(name: str, limit: float) -> Step:
    """One of the native tests, beside the files that it reads."""
    return Step(
        f"native {name}",
        (str(NATIVE / name),),
        *(limit, DRIVER),
        reads=skipped_cases,
        folder=ROOT / "csrc" / "tests",
        shows=shown.skipped,
    )


def _measured(
    name: str,
    program: str,
    arguments: tuple[str, ...],
    limit: float,
    shows: shown.Shows,
    needs: tuple[str, ...] = DRIVER,
    environment: dict[str, str] = _ONE_GPU,
) -> Step:
    """A native program of benchmarks/gpu, on one GPU."""
    return Step(
        name,
        (str(NATIVE / program), *arguments),
        *(limit, needs, environment, last_json),
        folder=ROOT / "csrc" / "tests",
        shows=shows,
    )


def _python(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, *arguments)


def _pycollective(*arguments: str) -> tuple[str, ...]:
    return _python("-m", "pycollective", *arguments)


def builds(small: bool = False) -> list[Step]:
    """What is compiled; none needs another."""
    native = [
        "test_cuda_signatures",
        *(path.stem for path in _more_native_tests()),
        *(path.stem for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.cpp"))),
    ]
    targets = [f"../../build/native/plain/{name}" for name in native]
    images = ("-m", "benchmarks.gpu.images", *(["--usual-alone"] if small else []))
    return [
        Step(
            "build the extension",
            _python("setup.py", "build_ext", "--inplace"),
            *(240, ()),
            {"PYCOLLECTIVE_TORCH": "0"},
        ),
        Step(
            "build the native programs",
            (
                *("make", "-k", f"-j{len(os.sched_getaffinity(0))}", "-C", "csrc/tests"),
                *("../../build/native/cuda/embedded.cpp", *targets),
            ),
            *(240, ()),
        ),
        Step("compile the kernels", _python(*images), 240, ("nvcc",)),
    ]


def _more_native_tests() -> list[Path]:
    """Of what runs on a GPU; the others need none, and fake what they use."""
    known = {"test_cuda_reduce", "test_cuda_images", "test_cuda_signatures"}
    return [p for p in sorted((ROOT / "csrc/tests").glob("test_cuda_*.cpp")) if p.stem not in known]


def checks(small: bool = False) -> list[Step]:
    """What is checked and measured, in this order; `small` only shows that all works.

    Of what others wait for, the bits and the price of ordered calls, then kernels, then trainings.
    """
    return [
        _over_nccl("LeafSync", "leaves", small, shown.leaves, 240, "1 to 3 processes"),
        _over_nccl("bits of ordered calls", "ordered_bits", small, shown.bits_over_nccl),
        _over_nccl("the backend pycollective", "backend", small, shown.bits_over_nccl),
        _over_nccl("ordered", "ordered", small, shown.over_nccl),
        _over_nccl("price", "price", small, shown.price),
        _triton_kernels("reduce", small),
        _triton_kernels("quantized", small),
        _triton_kernels("sparse", small, shown.triton_sparse),
        _over_nccl("FSDP2", "fsdp", small, shown.trained_over_nccl),
        _over_nccl("DDP", "ddp", small, shown.trained_over_nccl),
        *_peers_of_two_processes(small),
        *_peers_of_one_process(small),
        *(_native(path.stem, 60) for path in _more_native_tests()),
        Step("driver report", _pycollective("doctor"), 30, ("extension",)),
        *_by_the_host(small),
        *_arrays(),
        *_sanitized(),
        *_less_important(small),
    ]


def _peers_of_one_process(small: bool) -> list[Step]:
    """Kernels, of ranks that have a stream each: what they measure, and that they wait rightly."""
    sizes = ("3", "1", "5003", "256") if small else ()
    return [
        _measured(
            "peer kernels, ranks of one process", "peer_kernels", sizes, 60, shown.peer_kernels
        ),
        _measured(
            "litmus loops",
            *("litmus", (str(LITMUS), "0.2", "100") if small else (str(LITMUS), "1.2")),
            *(60, shown.litmus, (*DRIVER, "nvcc"), {}),  # on two GPUs, where there are
        ),
        _measured(
            "four ranks with a quarter of the GPU each",
            *("resident_limit", ("3",) if small else ()),
            *(60, shown.resident_limit),
        ),
        _measured(
            "what the abort look costs",
            *("abort_look", (str(NO_ABORT_LOOK), *(("3", "1") if small else ()))),
            *(60, shown.abort_look, (*DRIVER, "nvcc")),
        ),
    ]


def _peers_of_two_processes(small: bool) -> list[Step]:
    """Kernels that wait for those of another process which shares the GPU.

    A rank that ends while its kernels are under way may end MPS's other clients: so not under it.
    """
    operations = "all_reduce" if small else "all_reduce,reduce_scatter,all_gather,broadcast"
    verified = ("--quick", "--timeout", "60", "--operation", operations, "-d")
    dtypes = "float32" if small else "float32,bfloat16,float8_e5m2"
    two = {**_ONE_GPU, "PYCOLLECTIVE_DEVICE_PATH": "peer"}

    def case(name: str, under_mps: bool) -> Step:
        return Step(
            f"peer kernels of 2 processes: {name}",
            _python("-m", "benchmarks.gpu.peer_processes", name),
            *(60, CORE, two, last_json),
            shows=shown.ending,
            under_mps=under_mps,
        )

    return [
        case("replay", under_mps=True),
        Step(
            "verify by peer kernels, 2 processes on one GPU",
            _pycollective("verify", "--device", "cuda", "-n", "2", *verified, dtypes),
            *(120, CORE, two),
            under_mps=True,
        ),
        Step(
            "PyTorch's symmetric memory, 2 processes on one GPU",
            _python("-m", "benchmarks.gpu.symmetric_memory", *(["3"] if small else [])),
            *(60, (*CORE, "torch CUDA"), two, last_json),
            shows=shown.symmetric_memory,
            under_mps=True,
        ),
        case("killed", under_mps=False),
        case("timeout", under_mps=False),
    ]


def _by_the_host(small: bool) -> list[Step]:
    """Ranks that share the GPU, by way of the host: against the CPU's bits, and timed."""
    steps = []
    narrow = ("-d", "float32", "--operation", "all_reduce") if small else ()
    for ranks in (2,) if small else (2, 4, 8):
        quick = ("--quick",) if small or ranks > 2 else ()
        verify = _pycollective(*("verify", "--device", "cuda", "-n", str(ranks)), *quick, *narrow)
        steps.append(Step(f"verify, {ranks} processes", verify, 90))
    return [*steps, _bench(2, small)]


def _bench(ranks: int, small: bool) -> Step:
    sizes = ("-b", "4K", "-e", "64K" if small else "64M", "-f", "16")
    rounds = ("--rounds", "1" if small else "3")
    peers = ("--peers", "nccl") if ranks < 4 and not small else ()
    command = ("bench", "all_reduce", "--device", "cuda", "--ranks", str(ranks), *sizes, *rounds)
    return Step(
        f"bench, {ranks} process{'es' if ranks > 1 else ''}",
        _pycollective(*command, *peers, "--verbose"),  # each phase has its rows
        *(60, CORE),
        reads=bench_rows,
        shows=shown.bench,
    )


def _triton_kernels(name: str, small: bool, shows: shown.Shows = shown.triton_kernels) -> Step:
    """Those of ordered reductions over any process group, of quantization or top-k."""
    return Step(
        f"Triton {name}",
        _python("-m", f"benchmarks.gpu.{name}", *(["1"] if small else [])),
        *(150, ("extension", "torch CUDA", "triton", "ml_dtypes")),
        reads=last_json,
        shows=shows,
    )


def _over_nccl(
    name: str,
    program: str,
    small: bool,
    shows: shown.Shows,
    limit: float = 120,
    ranks: str = "2 processes",
) -> Step:
    """Ranks over NCCL: ordered reductions, and trainings with them and with compression."""
    return Step(
        f"{name} over NCCL, {ranks} on one GPU",
        _python("-m", f"benchmarks.gpu.{program}", *(["1"] if small else [])),
        *(limit, ("extension", "torch CUDA", "triton", "ml_dtypes")),
        reads=last_json,
        shows=shows,
    )


def _arrays() -> list[Step]:
    """Other libraries' arrays, under two launchers."""
    steps = []
    arrays = ("-m", "benchmarks.gpu.arrays")
    for name, needs in (("own", ()), ("cupy", ("cupy",)), ("torch", ("torch CUDA",))):
        steps.append(
            Step(
                f"arrays of {name}, 2 processes",
                _pycollective("run", "--no-tag-output", "-n", "2", *arrays, name),
                *(60, (*CORE, *needs)),
                reads=last_json,
                shows=shown.arrays,
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
                    shows=shown.arrays,
                )
            )
    return steps


def _sanitized() -> list[Step]:
    """Under compute-sanitizer, which makes all slow."""
    steps = []
    needs = (*DRIVER, "a real GPU", "compute-sanitizer")
    tool = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
    for ranks in ("1", "2"):  # one waits for nobody, whatever the tool does to launches
        steps.append(
            Step(
                f"racecheck of programs, ranks: {ranks}",
                (*tool, "racecheck", str(NATIVE / "test_cuda_programs"), ranks),
                *(60, needs),
                folder=ROOT / "csrc" / "tests",
            )
        )
    for each in ("memcheck", "synccheck"):
        command = (*tool, each, str(NATIVE / "test_cuda_programs"), "2")
        steps.append(
            Step(f"{each} of programs", command, 90, needs, folder=ROOT / "csrc" / "tests")
        )
    return steps


def _less_important(small: bool) -> list[Step]:
    more = [] if small else [_bench(ranks, small) for ranks in (8, 4, 1)]
    signatures = (str(NATIVE / "test_cuda_signatures"),)
    return [*more, Step("signatures are <cuda.h>'s", signatures, 20, ("nvcc",))]
