"""Programs under each launcher, for tests: mpiexec (MPICH's and Open MPI's, each in an environment
of its own), torchrun, `pycollective run`, and forks in its place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import ROOT, PerRank, Ranks
from tests.joining import clear_launch

NAMES = ("mpich", "openmpi")


def parts(text: str) -> list[str]:
    """What ranks have printed, each behind the word RANK, wherever their lines were cut."""
    return sorted(part.strip() for part in text.split("RANK ")[1:])


class Launcher:
    """Starts ranks of a Python program."""

    def command(self, ranks: int, *program: str) -> list[str]:
        """The command line."""
        raise NotImplementedError

    def environment(self, **more: str) -> dict[str, str]:
        """The environment for it: without another launcher's variables."""
        kept = dict(os.environ)
        clear_launch(kept)
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # Not used here, and sleeps a second of every MPI_Init while it looks for its devices.
            "OMPI_MCA_btl": "^ofi",
            **more,
        }

    def run(
        self, ranks: int, *program: str, timeout: float = 200, **more: str
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
        run = [sys.executable, "-m", "pycollective", "run", "--no-tag-output", "-n", str(ranks)]
        return [*run, sys.executable, *program]


class Forks(Launcher):
    """Ranks as forks of a process that has imported torch, which takes each rank seconds.

    For tests of what a program does. `OwnLauncher` is for tests of how ranks start and end.

    Args:
        module: imported before the ranks are forked.
    """

    def __init__(self, module: str = "tests.torch.programs") -> None:
        self.module = module

    def run(
        self, ranks: int, *program: str, timeout: float = 200, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """The status is that of the first rank that failed."""
        from tests.torch.programs import run_program

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}
        with (
            tempfile.TemporaryDirectory() as folder,
            Ranks(ranks, timeout, join=False, module=self.module, variables=variables) as started,
        ):
            outputs = [f"{folder}/{rank}" for rank in range(ranks)]
            place = PerRank([*range(ranks)]), ranks, PerRank(outputs)
            outcomes = started.call(run_program, *place, program)
            said = "".join(Path(each).read_text() for each in outputs)
        statuses = [
            each.exit_code or each.result or int(each.error is not None) for each in outcomes
        ]
        return subprocess.CompletedProcess(
            program,
            next(filter(None, statuses), 0),
            said,
            "".join(each.stderr for each in outcomes),
        )


class Torchrun(Launcher):
    """torchrun, on this host."""

    def command(self, ranks: int, *program: str) -> list[str]:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*run, f"--nproc-per-node={ranks}", *program]


@dataclass(frozen=True)
class Mpi(Launcher):
    """One MPI: its mpiexec, and a Python with the mpi4py that belongs to it."""

    name: str
    folder: Path

    def command(self, ranks: int, *program: str) -> list[str]:
        many = ["--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else []
        folder = self.folder / "bin"
        return [str(folder / "mpiexec"), *many, "-n", str(ranks), str(folder / "python"), *program]


def find(name: str) -> Mpi:
    """The MPI of this name. If it is missing, skip; or fail if PYCOLLECTIVE_REQUIRE_MPI=1."""
    folder = Path(os.environ.get(f"PYCOLLECTIVE_{name.upper()}_ENV", ROOT / f".venv-{name}"))
    if not (folder / "bin" / "mpiexec").exists():
        missing = f"{folder} is not there: python -m benchmarks.mpi_environments makes it"
        if os.environ.get("PYCOLLECTIVE_REQUIRE_MPI") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return Mpi(name, folder)


def launcher(name: str) -> Launcher:
    """The launcher of this name."""
    others = {"run": OwnLauncher, "torchrun": Torchrun, "forks": Forks}
    return others[name]() if name in others else find(name)


def python(
    *arguments: object, status: int | None = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
    """What Python has done with these arguments, to the end with this status."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=Launcher().environment(**changes),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done


def run_text(
    folder: Path, name: str, text: str, ranks: int, topology: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """A program's text under the launcher of this name, to its good end."""
    program = folder / "program.py"
    program.write_text(text)
    done = launcher(name).run(ranks, str(program), PYCOLLECTIVE_TOPOLOGY=topology, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
