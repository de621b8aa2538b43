"""Compiles the torch shim against one version of torch.

setup.py, `make shims` (tools/shims.py) and ``pycollective build-torch`` use it. setup.py runs this
before the package can be imported, so it imports the standard library alone.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path
from time import monotonic

# The contract: no contraction into fused multiply-adds. torch's headers warn under -Wextra, and
# need the standard that torch itself builds with.
FLAGS = [
    *("-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall"),
    *("-ffp-contract=off", "-fno-fast-math"),
]
LIBRARIES = ["c10", "torch", "torch_cpu", "torch_python"]
LONGEST = 1800.0  # seconds that compiling may take: it takes 55 on a core of its own


def sources(csrc: str) -> list[str]:
    """Return the files to compile."""
    return [*sorted(glob.glob(f"{csrc}/torch/*.cpp")), f"{csrc}/bindings/errors_py.cpp"]


def read(csrc: str) -> list[str]:
    """Return the files to compile and all files of `csrc` that they include."""
    left, found = sources(csrc), set[str]()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            included = re.findall(r'^#include "([^"]+)"', Path(path).read_text(), re.MULTILINE)
            left += [f"{csrc}/{name}" for name in included]
    return sorted(found)


def include_folders(csrc: str, torch: str) -> list[str]:
    """Return the include folders of the shim; `torch` is its package's folder."""
    headers = f"{torch}/include"
    return [csrc, headers, f"{headers}/torch/csrc/api/include"]


def joined(csrc: str, files: list[str], folder: Path, parts: int = 2) -> list[str]:
    """Files that include those in turn: pybind11's headers take 5 s to read, torch's 10 s.

    What is in one file is seen by all after it there, so names that are a file's own (in anonymous
    namespaces, of aliases) differ throughout a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / f"part_{part}.cpp" for part in range(parts)]
    for part, path in enumerate(made):
        some = files[len(files) * part // parts : len(files) * (part + 1) // parts]
        names = [Path(file).relative_to(csrc) for file in some]
        text = "".join(f'#include "{name.as_posix()}"\n' for name in names)
        if not path.exists() or path.read_text() != text:  # else it is compiled again
            path.write_text(text)
    return [path.as_posix() for path in made]


def compiler() -> list[str]:
    """Return the C++ compiler's command: CXX or the first one found; empty if there is none."""
    wish = shlex.split(os.environ.get("CXX", ""))
    for command in [wish] if wish else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return []


def compile_shim(csrc: str, torch: str, folder: Path, target: Path) -> None:
    """Compile and link the shim.

    Args:
        csrc: the folder of the sources.
        torch: the folder of torch's package, of which include/ and lib/ are used.
        folder: for what is made on the way.
        target: the shim's path.

    Raises:
        RuntimeError: the compiler failed, or took longer than `LONGEST`; with what it said last.
    """
    command = compiler()
    python = sysconfig.get_path("include")
    includes = [f"-I{path}" for path in (*include_folders(csrc, torch), python)]
    parts = joined(csrc, sources(csrc), folder)
    objects = [f"{part}.o" for part in parts]
    flags = [*FLAGS, "-fPIC", *includes]
    _run_all([[*command, *flags, "-c", part, "-o", part + ".o"] for part in parts])
    libraries = [f"-L{torch}/lib", *(f"-l{name}" for name in LIBRARIES)]
    _run_all([[*command, "-shared", *objects, *libraries, "-o", str(target)]])


def _run_all(commands: list[list[str]]) -> None:
    """Run them at the same time."""
    deadline = monotonic() + LONGEST
    running = [
        subprocess.Popen(
            each,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # with what a compiler starts in its turn
        )
        for each in commands
    ]
    try:
        for command, process in zip(commands, running, strict=True):
            try:
                said, _ = process.communicate(timeout=max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{command[0]} took longer than {LONGEST:g} s") from error
            if process.returncode != 0:
                last = "\n".join(said.splitlines()[-20:])
                raise RuntimeError(f"{shlex.join(command)} failed:\n{last}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
