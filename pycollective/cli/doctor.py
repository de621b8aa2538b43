"""`pycollective doctor`: what is here, and what each missing piece costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

from pycollective import _core, host_memory, installing
from pycollective.version import VERSION

_MIB = 1 << 20


def doctor() -> None:
    """Say what is here, and what each missing piece costs."""
    for name, found, cost in report():
        print(f"{'ok ' if not cost else '-- '} {name:16} {found}")
        if cost:
            print(f"    {'':16} {cost}")


def report() -> list[tuple[str, str, str]]:
    """(piece, what was found, what its absence costs: empty where nothing is missing)."""
    level = _core.simd_level()
    room = host_memory.headroom()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores = len(os.sched_getaffinity(0))
    return [
        ("pycollective", f"{VERSION} on {platform.platform()}", ""),
        ("Python", f"{sys.version.split()[0]}, NumPy {np.__version__}", ""),
        ("cores", str(cores), "" if cores > 1 else "ranks take turns on one core"),
        (
            "SIMD",
            level,
            "" if level != "portable" else "fp16 and bf16 reductions run several times slower",
        ),
        (
            "shared memory",
            f"{room.bytes / _MIB:.0f} MiB may be committed ({room.limit}); a rank of two needs "
            f"{_core.Node().mailbox_bytes(2) / _MIB:.1f} MiB, of sixteen "
            f"{_core.Node().mailbox_bytes(16) / _MIB:.1f} MiB",
            "",
        ),
        ("peer watch", *_pidfd()),
        (
            "open files",
            str(files),
            "" if files >= 256 else "64 ranks need some 150 descriptors each: ulimit -n 1024",
        ),
        _package("torch", "the torch.distributed backend and the DDP hooks"),
        _torch_backend(),
        _package("ml_dtypes", "bfloat16 NumPy arrays"),
        _package("mpi4py", "launches by mpiexec, and the MPI peers of the benchmark"),
        _program("mpiexec", "launches by mpiexec, and the MPI peers of the benchmark"),
        _package("triton", "GPU kernels (not in this version)"),
        _program("nvidia-smi", "a GPU (not used by this version)"),
    ]


def _pidfd() -> tuple[str, str]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"no pidfd: {error}", "dead peers cannot be seen; Linux 5.3 or later is needed"
    return "pidfd", ""


def _package(name: str, for_what: str) -> tuple[str, str, str]:
    try:
        return name, importlib.metadata.version(name), ""
    except importlib.metadata.PackageNotFoundError:
        return name, "not installed", f"without it, not: {for_what}"


def _program(name: str, for_what: str) -> tuple[str, str, str]:
    path = shutil.which(name)
    return name, path or "not found", "" if path else f"without it, not: {for_what}"


def _torch_backend() -> tuple[str, str, str]:
    # Looked for, not imported: its package needs torch, which may be what is missing.
    folder = str(Path(__file__).resolve().parents[1])
    if PathFinder.find_spec("_torch", [folder]) is not None:
        return "torch backend", "built", ""
    return "torch backend", "not built", f"install again beside torch, {installing.BACKEND}"
