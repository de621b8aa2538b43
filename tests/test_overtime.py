"""A test that runs over its time fails alone: which it was and why is said, and the others run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

SLEEPS = """
import time, pytest

@pytest.mark.timeout(1)
def test_sleeps():
    time.sleep(1000)

def test_behind_it():
    pass
"""
# It holds the interpreter's lock, so that no thread of Python's and no handler of a signal runs.
BLOCKS = """
import ctypes, pytest

@pytest.mark.timeout(1)
def test_blocks():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

def test_behind_it():
    pass
"""


@pytest.mark.storm
def test_others_run_and_the_time_is_told(tmp_path: Path) -> None:
    for name, text in {"sleeps": SLEEPS, "blocks": BLOCKS, "last": "def test_last(): pass"}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-c", "pyproject.toml", "--rootdir", tmp_path, "-p", "tests.conftest"]
    workers = ["-n", "1", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *workers, tmp_path],
        cwd=ROOT,
        env={**env, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "2 failed, 3 passed" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    said = dict(line.partition("::")[2].split(" - ", 1) for line in failed)
    assert sorted(said) == ["test_blocks", "test_sleeps"]
    # Whichever of the two ends it, on a busy machine.
    assert all("Timeout (" in why for why in said.values())


def test_make_runs_what_is_alone_also_if_something_failed_before(tmp_path: Path) -> None:
    """A Python that notes what it is to run, and whose tests of one kind fail."""
    noted, python = tmp_path / "noted", tmp_path / "bin" / "python"
    python.parent.mkdir()
    for up_to_date in (".requirements", ".built"):
        (tmp_path / up_to_date).touch()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("M")
    }  # MAKEFLAGS
    statuses = []
    for failing in ("*not?alone*", "*and?alone*", "nothing"):
        noted.write_text("")
        python.write_text(
            f'#!/bin/sh\necho "$*" >> {noted}\ncase "$*" in {failing}) exit 1;; esac\n'
        )
        python.chmod(0o755)
        done = subprocess.run(
            ["make", "test", f"VENV={tmp_path}"], cwd=ROOT, env=env, capture_output=True, text=True
        )
        statuses.append(done.returncode != 0)
        tests = [line for line in noted.read_text().splitlines() if line.startswith("-m pytest")]
        assert ["not alone" in line for line in tests] == [True, False]
    assert statuses == [True, True, False]
