"""`pycollective doctor`: what works here, and what each missing piece is needed for.

And `pycollective build-torch`: the torch backend for a torch that has none prebuilt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from pycollective import _core, cores, host_memory
from pycollective.bench import phase
from pycollective.bootstrap.attach import PIDFD_NEEDS
from pycollective.cli.common import Parsers, add_command
from pycollective.config import (
    ENV_DEVICE_PATH,
    ENV_TOPOLOGY,
    INSTALL_MPI4PY,
    INSTALL_TORCH,
    MAX_RANKS_PER_HOST,
    VARIABLES,
    VERSION,
    unknown_variables,
)
from pycollective.device_path import nvrtc_folders
from pycollective.errors import ConfigurationError
from pycollective.shim import building

_MIB = 1 << 20
_FOR_MPI = "to launch by mpiexec, and for MPI as a peer of pycollective bench"


def add(parsers: Parsers) -> None:
    """Declare the command."""
    add_command(parsers, doctor)


def doctor(options: argparse.Namespace | None = None) -> None:
    """Say what works here, and what to install or change for the rest.

    A line that begins with ok is as it should be. One that begins with -- names
    something that is missing or slow, and the line below it says what it is needed
    for, or what it costs. The exit status is 0 either way: the library itself needs
    NumPy alone.
    """
    for name, found, cost in report():
        print(f"{'ok ' if not cost else '-- '} {name:16} {found}")
        if cost:
            print(f"    {'':16} {cost}")
    print("A line with -- is no fault: the line below it says what for, or what it costs.")


def report() -> list[tuple[str, str, str]]:
    """Return (piece, what was found, what to know where that is missing or slow; else empty)."""
    foreign = ", ".join(each.name for each in _core.dtypes() if not each.in_numpy)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = len(os.sched_getaffinity(0))
    backend = _torch_backend()
    return [
        ("pycollective", f"{VERSION} on {platform.platform()}", ""),
        ("Python", f"{sys.version.split()[0]}, NumPy {np.__version__}", ""),
        ("cores", str(many), cores.shared_here()),
        ("core to core", *_phase()),
        ("other load", *_other_load()),
        ("SIMD", *_simd()),
        ("shared memory", *_shared_memory()),
        ("peer watch", *_pidfd()),
        ("single copy", *_single_copy()),
        (
            "open files",
            f"each process may have {files}",
            ""
            if files >= 256
            else f"each of {MAX_RANKS_PER_HOST} ranks needs some 150: ulimit -n 1024",
        ),
        _package("torch", "for the torch.distributed backend and the DDP hooks"),
        backend,
        _package("ml_dtypes", f"for NumPy arrays of {foreign}"),
        _package("mpi4py", _FOR_MPI),
        _mpi(),
        _between_hosts(backend=not backend[2]),
        (
            "variables",
            ", ".join(name for name in VARIABLES if name in os.environ)
            or "no variable of pycollective is set",
            "; ".join(unknown_variables()),
        ),
        ("topology", _topology(), ""),
        _program("mpiexec", _FOR_MPI),
        ("CUDA", *_cuda()),
    ]


def _topology() -> str:
    simulated = os.environ.get(ENV_TOPOLOGY)
    return (
        f"{simulated} is simulated, by {ENV_TOPOLOGY}"
        if simulated
        else "the hosts as they are, none simulated"
    )


def _simd() -> tuple[str, str]:
    try:
        level = _core.simd_level()
    except ValueError as error:  # as its variable asks for
        return str(error), "nothing can be reduced: unset the variable, or correct it"
    slow = "fp16 and bf16 reductions take several times as long as with AVX2 or AVX-512"
    return level, slow if level == "portable" else ""


def _phase() -> tuple[str, str]:
    latency = phase.look(cores.in_turn())
    now = phase.phase_of(latency)
    if now == phase.SINGLE:
        return "one core", ""
    far = now == phase.FAR
    share = "share no cache" if far else "share a cache"
    return (
        f"{now}: {latency * 1e9:.0f} ns one way, the cores {share} now (virtual machines change)",
        "large collectives take 3 to 10 times as long as on cores that share one" if far else "",
    )


def _other_load() -> tuple[str, str]:
    many = len(os.sched_getaffinity(0))
    if said := cores.busy(cores.used_by_others(), many):
        return said, "a rank that shares its core waits milliseconds for its turns"
    return "other processes leave the cores free", ""


def _shared_memory() -> tuple[str, str]:
    room = host_memory.headroom()
    try:
        node = _core.Node()
    except ConfigurationError as error:
        return f"none: {error}", "no rank can join"
    return (
        f"{room.bytes / _MIB:.0f} MiB free ({room.limit}); each of 2 ranks needs "
        f"{node.mailbox_bytes(2) / _MIB:.1f} MiB, each of 16 {node.mailbox_bytes(16) / _MIB:.1f} "
        "MiB",
        "",
    )


def _pidfd() -> tuple[str, str]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"no pidfd: {error}", f"a rank cannot see that another is dead: {PIDFD_NEEDS}"
    return "a rank sees at once that another has died (pidfd)", ""


# Prints the errno with which a process is refused that reads the memory of the one that started it;
# between two ranks, which the same process has started, it is the same.
_READ_PROBE = """
import os, sys
from pycollective import _core
node, token = _core.Node(), bytes.fromhex(sys.argv[1])
node.attach(token, int(sys.argv[2]), os.getppid())
print(node.refusal(token))
"""


def ptrace_scope() -> int:
    """Return what Yama allows: above 0 processes may not read their siblings' memory."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(path.read_text()) if path.exists() else 0


def _single_copy() -> tuple[str, str]:
    try:
        node = _core.Node()
    except ConfigurationError:
        return (
            "unknown without shared memory",
            "it is not known whether large messages are copied once or twice",
        )
    command = [sys.executable, "-c", _READ_PROBE, node.token.hex(), str(node.fileno())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, pass_fds=[node.fileno()]
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return f"unknown: {last}", "it is not known whether large messages are copied once or twice"
    if (error := int(done.stdout)) == 0:
        return "large messages are copied once: ranks may read each other (process_vm_readv)", ""
    scope = ptrace_scope()
    why = f"; kernel.yama.ptrace_scope is {scope}" if scope else ""
    cure = (
        "to allow it: sysctl kernel.yama.ptrace_scope=0"
        if scope
        else "a seccomp profile may allow it (in a container: --cap-add SYS_PTRACE)"
    )
    return (
        f"process_vm_readv is refused: {os.strerror(error)}{why}",
        "large messages, all-gathers, broadcasts, gathers, scatters and all-to-alls are copied "
        f"twice, through shared memory, and take up to three times as long; {cure}",
    )


def _package(name: str, for_what: str) -> tuple[str, str, str]:
    try:
        return name, importlib.metadata.version(name), ""
    except importlib.metadata.PackageNotFoundError:
        return name, "not installed", f"needed {for_what}"


def _program(name: str, for_what: str) -> tuple[str, str, str]:
    path = shutil.which(name)
    return name, path or "not found", "" if path else f"needed {for_what}"


# Prints a line: the MPI of mpi4py, and whether it serves several threads at once.
_MPI_PROBE = """
from mpi4py import MPI
name = MPI.Get_library_version().split(",")[0].split(chr(10))[0]
print(" ".join(name.split()), int(MPI.Query_thread() == MPI.THREAD_MULTIPLE))
"""


def _mpi() -> tuple[str, str, str]:
    if importlib.util.find_spec("mpi4py") is None:
        return "MPI", "unknown without mpi4py", f"needed between hosts by MPI: {INSTALL_MPI4PY}"
    # In a process of its own: to look is to initialise MPI, which may end the process.
    command = [sys.executable, "-c", _MPI_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return (
            "MPI",
            "does not start within 20 s",
            "under mpiexec pycollective.init would hang, too",
        )
    name, _, multiple = done.stdout.strip().rpartition(" ")
    if done.returncode != 0 or not name:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return "MPI", f"does not start: {last}", "under mpiexec pycollective.init would fail, too"
    if multiple != "1":
        return (
            "MPI",
            f"{name}, not MPI_THREAD_MULTIPLE",
            "needed to send between hosts: an MPI with thread support",
        )
    return "MPI", f"{name}, MPI_THREAD_MULTIPLE", ""


# Prints what `_core.cuda_report` finds.
_CUDA_PROBE = """
import json, sys
from pycollective import _core
print(json.dumps(_core.cuda_report(sys.argv[1:])))
"""


def _cuda() -> tuple[str, str]:
    # In a process of its own, too: to look is to initialise CUDA, which no fork survives.
    command = [sys.executable, "-c", _CUDA_PROBE, *nvrtc_folders()]
    cost = "needed for arrays on GPUs"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "the driver does not start within 60 s", cost
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return f"the driver does not start: {last}", cost
    report = json.loads(done.stdout)
    if "no driver" in report:
        return report["no driver"], cost
    devices = [f"{name} ({major}.{minor})" for name, major, minor in report["devices"]]
    counted = [f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices)]
    version = f"{report['version'] // 1000}.{report['version'] % 1000 // 10}"
    found = f"{version} ({report['driver']}), {', '.join(counted)}"
    if "no images" in report:
        return f"{found}; calls go through host memory; kernels: none", report["no images"]
    return (
        f"{found}; {_device_path(len(devices), report['apart'])}; kernels: {report['images']}",
        "",
    )


def _device_path(devices: int, apart: list[list[int]]) -> str:
    """Return the path of calls on GPU arrays on this host, and why."""
    choice = os.environ.get(ENV_DEVICE_PATH) or "auto"
    if choice != "auto":
        return f"device path {choice}, by {ENV_DEVICE_PATH}"
    if devices == 1:
        return "calls go through host memory, as ranks would share the GPU"
    if apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in apart)
        return f"calls go through host memory for ranks on GPUs without peer access: {pairs}"
    return "calls run as kernels over peer memory, with init(device=...) and a GPU for each rank"


def _between_hosts(backend: bool) -> tuple[str, str, str]:
    ways = [
        *(["Gloo carries data, under torchrun and pycollective run"] if backend else []),
        *(["mpi under mpiexec"] if importlib.util.find_spec("mpi4py") else []),
    ]
    if ways:
        return "between hosts", ", ".join(ways), ""
    return (
        "between hosts",
        "no transport",
        "all ranks must be on one host; torch (Gloo) or mpi4py joins several",
    )


# Prints which shim has been loaded, by this package: another may lie where the user is.
_TORCH_PROBE = """
import sys
sys.path[0] = sys.argv[1]
import pycollective.torch
from pycollective.shim import loading
print(loading.described())
"""


def _torch_backend() -> tuple[str, str, str]:
    name = "torch backend"
    if importlib.util.find_spec("torch") is None:
        return name, "needs torch", INSTALL_TORCH
    # In a process of its own, as for MPI: what cannot be loaded may end the process.
    command = [sys.executable, "-c", _TORCH_PROBE, str(Path(__file__).resolve().parents[2])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return name, "does not load within 60 s", "needed for DDP and other programs of torch"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return name, "does not load", last  # which names the cure
    return name, done.stdout.strip(), ""


def add_build_torch(parsers: Parsers) -> None:
    """Declare the other command."""
    add_command(parsers, build_torch)


def build_torch(options: argparse.Namespace) -> None:
    """Build the torch backend for the torch that is installed, into the user's cache.

    It is for a torch that the wheel has no backend for, takes one to five minutes,
    and needs a C++ compiler and Python's headers. Where a backend fits already, it
    says so and does nothing.
    """
    building.build(say=lambda line: print(line, flush=True))
