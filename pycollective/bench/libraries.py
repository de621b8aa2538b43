"""This library and its peers, which are compared, and how the ranks of each are started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pycollective.bench.group import Launch
from pycollective.config import ENV_TOPOLOGY, ENV_WIRE, INSTALL_TORCH
from pycollective.errors import ConfigurationError

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_RANKS_PARENT = str(Path(__file__).resolve().parent)


@dataclass(frozen=True)
class Library:
    """One thing that is measured: a variant of what a group of ranks can do.

    Attributes:
        name: in `--peers`, in the table, in files.
        group: whose ranks run it: libraries of one group share their processes.
        variant: passed to the ranks.
        what: one line for the table's header.
        dtype: of its elements, where it is not the run's.
    """

    name: str
    group: str
    variant: str
    what: str
    dtype: str = ""


def _of_type(dtype: str) -> Library:
    return Library(
        dtype, f"own-{dtype}", "python", f"pycollective, as many bytes of {dtype}", dtype
    )


OWN = Library("pycollective", "own", "python", "Communicator's method, called from Python")
STREAM = Library("stream", "own", "stream", "each rank reads and writes its own buffer in place")
PEERS = {
    library.name: library
    for library in (
        Library("native", "own", "native", "pycollective, called in a loop in C++"),
        Library("shared", "own-shared", "python", "pycollective, arrays of Communicator.empty"),
        _of_type("bfloat16"),
        _of_type("float16"),
        Library("torch", "pycollective", "python", "pycollective behind torch.distributed"),
        Library("fake", "fake", "python", "torch.distributed's backend that does nothing"),
        Library("gloo", "gloo", "python", "Gloo, through torch.distributed"),
        Library("nccl", "nccl", "python", "NCCL, through torch.distributed"),
        Library("mpich", "mpich", "python", "MPICH, through mpi4py"),
        Library("openmpi", "openmpi", "python", "Open MPI, through mpi4py"),
        Library(
            "openmpi-nocma",
            "openmpi-nocma",
            "python",
            "Open MPI without cross-memory attach (copies through shared memory instead)",
        ),
        Library("impi", "impi", "python", "Intel MPI, through mpi4py"),
    )
}

MPI_PACKAGES = {"mpich": "mpich", "openmpi": "openmpi", "impi": "'impi-rt<2021.19'"}
DEVICES = ("cpu", "cuda")
_ON_GPUS = ("nccl",)  # of the peers


def find_peers(names: str, device: str = "cpu") -> list[Library]:
    """Return the libraries of a comma-separated list, to be measured on `device`.

    Raises:
        ConfigurationError: an unknown name, one given twice, or one that is not for this device.
    """
    chosen: list[Library] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in PEERS:
            raise ConfigurationError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
        if (name in _ON_GPUS) != (device == "cuda"):
            there = [each for each in PEERS if (each in _ON_GPUS) == (device == "cuda")]
            raise ConfigurationError(
                f"peer {name!r} is not measured with --device {device}; there are "
                f"{', '.join(there)}"
            )
        if PEERS[name] in chosen:
            raise ConfigurationError(f"peer {name!r} is given twice")
        chosen.append(PEERS[name])
    return chosen


def launch(
    group: str,
    ranks: int,
    mpi_environments: Mapping[str, str],
    topology: str = "",
    wire: str = "raw",
    device: str = "cpu",
) -> Launch:
    """Return how to start `ranks` ranks of `group`.

    `mpi_environments` holds the folder of a virtual environment with mpi4py and that MPI's mpiexec,
    by the name of the MPI (mpich, openmpi, impi); without one it is looked for as .venv-NAME in the
    current folder. This library's own ranks simulate the hosts of `topology`, and send by `wire`.
    On ``cuda`` the ranks take the host's GPUs in turn.

    Raises:
        ConfigurationError: what the group needs is not installed.
    """
    if group.startswith("own") or group in ("pycollective", "fake", "gloo", "nccl"):
        return _launch_directly(group, ranks, topology, wire, device)
    return _launch_mpi(group, ranks, mpi_environments)


def _launch_directly(group: str, ranks: int, topology: str, wire: str, device: str) -> Launch:
    own = group.startswith("own")
    if not own and importlib.util.find_spec("torch") is None:
        raise ConfigurationError(f"peer {group!r} needs torch: {INSTALL_TORCH}")
    environment = ranks_environment([_PACKAGE_PARENT, _RANKS_PARENT])
    settings = "as it comes"
    if group == "gloo":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        settings = "GLOO_SOCKET_IFNAME=lo"
    elif own or group == "pycollective":
        environment[ENV_TOPOLOGY], environment[ENV_WIRE] = topology, wire
        if topology:
            settings = f"topology {topology}, wire {wire}"
    commands = [
        [sys.executable, "-m", "ranks", group, "{address}", str(rank), str(ranks), device]
        for rank in range(ranks)
    ]
    return Launch(commands, environment, settings)


def _launch_mpi(group: str, ranks: int, environments: Mapping[str, str]) -> Launch:
    """Measured on two cores: MPICH 5.0.2 and Open MPI 5.0.11 do best as they come, except that

    - Open MPI refuses more ranks than cores without --oversubscribe, which also makes its waits
      yield; setting mpi_yield_when_idle besides changes nothing. MPICH's waits yield by themselves,
      and every setting for it (POLLS_BEFORE_YIELD, ENABLE_HEAVY_YIELD, PROGRESS_THROTTLE) lost.
    - no mpiexec binds to cores: the ranks of every library pin themselves, all alike.
    """
    mpi = group.partition("-")[0]
    folder = Path(environments.get(mpi) or f".venv-{mpi}").absolute()
    for program in ("mpiexec", "python"):
        if not (folder / "bin" / program).exists():
            raise ConfigurationError(
                f"peer {group!r} needs its own environment, and {folder} has no bin/{program}. "
                f"Make one: python -m venv {folder} && {folder}/bin/pip install "
                f"{MPI_PACKAGES[mpi]} mpi4py numpy; or point --{mpi}-env at one"
            )
    options: list[str] = []
    environment = ranks_environment([_RANKS_PARENT])
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    if mpi == "impi":
        options = ["-genv", "I_MPI_PIN", "off"]
    if mpi == "openmpi":
        options = ["--bind-to", "none"]
        if ranks > len(os.sched_getaffinity(0)):
            options += ["--oversubscribe"]
        if group == "openmpi-nocma":
            options += ["--mca", "smsc", "^cma"]
        if os.getuid() == 0:
            environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    mpiexec, python = str(folder / "bin" / "mpiexec"), str(folder / "bin" / "python")
    command = [mpiexec, "-n", str(ranks), *options, python, "-m", "ranks", "mpi", "{address}"]
    return Launch([command], environment, " ".join(["mpiexec", *options]))


def ranks_environment(python_path: list[str]) -> dict[str, str]:
    """Return this process's environment, with `python_path` and without its virtual environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    environment["PYTHONPATH"] = os.pathsep.join(python_path)
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
    return environment
