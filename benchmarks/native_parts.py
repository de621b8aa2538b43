"""Native code that tests and benchmarks in Python call and the package does not have: the target
`native-parts` of csrc/tests/Makefile. Whoever wants it first makes it."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "native" / "parts"


@functools.cache
def native_part(name: str) -> str:
    """The path of a library or a program; made where anything that it is made of has changed."""
    make(ROOT / "csrc" / "tests", OUT, "native-parts")
    return str(OUT / name)


def make(folder: Path, out: Path, *arguments: str) -> None:
    """Run make in a folder, which writes to `out`; one process at a time.

    Raises:
        RuntimeError: it fails; with what it said.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:  # the workers of pytest-xdist share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-C", str(folder), *arguments]
        # Not the options of the make that tests may run under: -B would make all of it each time.
        env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        done = subprocess.run(
            command, check=False, env=env, capture_output=True, text=True, timeout=900
        )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
