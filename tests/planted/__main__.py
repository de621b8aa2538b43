"""Bugs, planted one at a time in a copy of the sources: the tests named beside each must see it.

`python -m tests.planted` plants all of them; with words, those whose name or file holds one. The
bugs are in the .toml files of this folder. `right` stands once in `file` and `wrong` is written in
its place. Those of C++ are compiled in together, and an environment variable chooses one when the
tests run: `right` is an expression, or statements (which end in ";" or "}"). A test is pytest's, or
`native:test_messages` for one of csrc/tests; `native:thread/test_cuda_waits@1` is one under TSan,
in the order of waits that seed 1 draws. Before any bug is planted all these tests must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[2]
COPIES = ROOT / "build" / "planted_bugs"
SECONDS = 200  # for the tests of one bug; longer counts as seen: it hangs
CHOOSES = "PYCOLLECTIVE_PLANTED"
SOURCES = (".py", ".cpp", ".h", ".inl", ".cu", ".md", ".ipynb")
HEADER = f"""
#pragma once
#include <cstdlib>
static __attribute__((noinline, unused)) bool planted(int bug) {{
  static const char* const chosen = std::getenv("{CHOOSES}");
  return chosen != nullptr && std::atoi(chosen) == bug;
}}
"""


class Bug(NamedTuple):
    """What is written instead of what, and which tests must see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: list[str]

    @property
    def is_native(self) -> bool:
        """Whether a compiler reads it."""
        return self.file.startswith("csrc/")

    def planted_in(self, text: str, number: int) -> str:
        """The text of its file with this bug in it; of C++, where `number` is chosen."""
        if text.count(self.right) != 1:
            raise SystemExit(
                f"{self.name}: {self.file} has {text.count(self.right)} times\n{self.right}"
            )
        wrong = self.wrong
        if self.is_native and self.right.rstrip().endswith((";", "}")):
            wrong = f"{{ if (planted({number})) {{ {wrong} }} else {{ {self.right} }} }}"
        elif self.is_native:
            wrong = f"(planted({number}) ? ({wrong}) : ({self.right}))"
        return text.replace(self.right, wrong)


def is_native(test: str) -> bool:
    """Whether csrc/tests/Makefile runs it, not pytest."""
    return test.startswith("native:")


def target(act: str, test: str) -> str:
    """The target that builds or runs a native test, without its seed."""
    kind, _, name = test.removeprefix("native:").partition("@")[0].rpartition("/")
    return f"{act}-{kind or 'plain'}-{name}"


def read() -> list[Bug]:
    """All bugs, in the order of their files."""
    paths = sorted(Path(__file__).parent.glob("*.toml"))
    return [Bug(**bug) for path in paths for bug in tomllib.loads(path.read_text())["bug"]]


def copy(folder: Path, numbered: dict[int, Bug]) -> None:
    """The working tree with the native bugs in it, compiled. Only what has changed is written."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_bytes() for name in names}
    texts["csrc/planted.h"] = HEADER.encode()
    for number, bug in numbered.items():
        if bug.is_native:
            texts[bug.file] = bug.planted_in(texts[bug.file].decode(), number).encode()
    for name, text in texts.items():
        there = folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() or there.read_bytes() != text:
            there.write_bytes(text)
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name not in texts and path.suffix in SOURCES and not name.startswith("build/"):
            path.unlink()
    for environment in ROOT.glob(".venv-*"):
        if not (folder / environment.name).exists():
            (folder / environment.name).symlink_to(environment.resolve())
    if not any(bug.is_native for bug in numbered.values()):  # what is built here will do
        for path in (ROOT / "pycollective").rglob("*.so"):
            there = folder / path.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)
        return
    environment = environment_of(folder)
    tests = {test for bug in numbered.values() for test in bug.tests}
    if native := sorted({target("build", test) for test in tests if is_native(test)}):
        make = ["make", "-s", "-C", "csrc/tests", f"CXX={environment['CXX']}"]
        subprocess.run([*make, *native], cwd=folder, env=environment, check=True)
    if all(map(is_native, tests)):
        return
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env=environment,
        check=True,
    )


def environment_of(folder: Path, number: int = 0) -> dict[str, str]:
    """Of what runs in this copy. No GPU's images: nvcc knows nothing of the header."""
    header = f" -include {folder / 'csrc' / 'planted.h'} -w"
    compilers = {"CC": os.environ.get("CC", "gcc"), "CXX": os.environ.get("CXX", "g++")}
    return {
        **{**os.environ, **{name: command + header for name, command in compilers.items()}},
        "PYTHONPATH": str(folder),
        "PYCOLLECTIVE_NVCC": "0",
        CHOOSES: str(number),
    }


def fails(folder: Path, tests: list[str], number: int = 0) -> str:
    """How these tests fail there, in a few words; empty if all pass."""
    environment = environment_of(folder, number)
    python = [test for test in tests if not is_native(test)]
    make = ["make", "-C", "csrc/tests", f"CXX={environment['CXX']}"]
    commands = [
        [*make, target("run", test), f"PYCOLLECTIVE_STANDIN_SEED={test.partition('@')[2]}"]
        for test in tests
        if is_native(test)
    ]
    if python:
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", ""]
        commands.append([*pytest, *python])
    for command in commands:
        started = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit = SECONDS if number else 5 * SECONDS
        try:
            said, _ = started.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
            return f"no end within {limit} s"
        if started.returncode and command[0] != "make" and started.returncode not in (1, -6, -11):
            raise SystemExit(f"{' '.join(command)}: pytest says {started.returncode}\n{said}")
        if started.returncode:
            last = [line for line in said.splitlines() if line and not line.startswith("make")]
            return next((line for line in last if line.startswith(("FAILED", "ERROR"))), last[-1])
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only bugs whose name or file holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="bugs that are tried at a time")
    options = parser.parse_args()
    numbered = {
        number: bug
        for number, bug in enumerate(read(), 1)
        if not options.words or any(word in bug.name + bug.file for word in options.words)
    }
    copies = [COPIES / str(job) for job in range(options.jobs)]
    copy(copies[0], numbered)
    for other in copies[1:]:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(copies[0], other, symlinks=True)
    all_tests = sorted({test for bug in numbered.values() for test in bug.tests})
    if problem := fails(copies[0], all_tests):
        raise SystemExit(f"with nothing planted: {problem}")
    free: SimpleQueue[Path] = SimpleQueue()
    for folder in copies:
        free.put(folder)

    def try_one(number: int) -> bool:
        bug = numbered[number]
        folder = free.get()
        began = time.monotonic()
        file = folder / bug.file
        text = file.read_text()
        try:
            if not bug.is_native:
                file.write_text(bug.planted_in(text, number))
            problem = fails(folder, bug.tests, number)
        finally:
            if not bug.is_native:
                file.write_text(text)
            free.put(folder)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{'seen' if problem else 'NOT SEEN':8} {bug.name} ({took}): {problem}", flush=True)
        return bool(problem)

    with ThreadPoolExecutor(options.jobs) as pool:
        seen = list(pool.map(try_one, numbered))
    print(f"{sum(seen)} of {len(seen)} seen")
    sys.exit(0 if all(seen) else 1)


if __name__ == "__main__":
    main()
