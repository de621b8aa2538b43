"""Programs under each launcher, for tests: mpiexec (MPICH's and Open MPI's, each in an environment
of its own), torchrun, and `pycollective run`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import ROOT

NAMES = ("mpich", "openmpi")


class Launcher:
    """Starts ranks of a Python program."""

    def command(self, ranks: int, *program: str) -> list[str]:
        """The command line."""
        raise NotImplementedError

    def environment(self, **more: str) -> dict[str, str]:
        """The environment for it: without another launcher's variables."""
        launchers = ("PYCOLLECTIVE_", "MASTER_", "PMI", "OMPI_", "TORCHELASTIC")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(launchers) and "RANK" not in name
        }
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **more,
        }

    def run(
        self, ranks: int, *program: str, timeout: float = 60, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self.command(ranks, *program),
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=timeout,
        )


class OwnLauncher(Launcher):
    """`pycollective run`."""

    def command(self, ranks: int, *program: str) -> list[str]:
        """See `Launcher`."""
        run = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks)]
        return [*run, sys.executable, *program]


class Torchrun(Launcher):
    """torchrun, on this host."""

    def command(self, ranks: int, *program: str) -> list[str]:
        """See `Launcher`."""
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*run, f"--nproc-per-node={ranks}", *program]


@dataclass(frozen=True)
class Mpi(Launcher):
    """One MPI: its mpiexec, and a Python with the mpi4py that belongs to it."""

    name: str
    folder: Path

    def command(self, ranks: int, *program: str) -> list[str]:
        """See `Launcher`."""
        many = ["--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else []
        folder = self.folder / "bin"
        return [str(folder / "mpiexec"), *many, "-n", str(ranks), str(folder / "python"), *program]


def find(name: str) -> Mpi:
    """The MPI called so. Where it is not installed the test is skipped, or fails if
    PYCOLLECTIVE_REQUIRE_MPI=1 says that it is expected here, as .ci/run does."""
    folder = Path(os.environ.get(f"PYCOLLECTIVE_{name.upper()}_ENV", ROOT / f".venv-{name}"))
    if not (folder / "bin" / "mpiexec").exists():
        missing = f"{folder} is not there: python -m benchmarks.mpi_environments makes it"
        if os.environ.get("PYCOLLECTIVE_REQUIRE_MPI") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return Mpi(name, folder)


def launcher(name: str) -> Launcher:
    """The launcher called so; an MPI as `find` does."""
    others = {"run": OwnLauncher, "torchrun": Torchrun}
    return others[name]() if name in others else find(name)
