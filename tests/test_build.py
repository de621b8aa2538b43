"""setup.py on a bare machine: pybind11's headers come with it, or with torch; what it asks for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT


@pytest.fixture
def bare(tmp_path):
    """A folder with what setup.py imports, and no pybind11, instead of site-packages."""
    for name in ("setuptools", "_distutils_hack", "numpy", "numpy.libs"):
        spec = importlib.util.find_spec("numpy" if name == "numpy.libs" else name)
        if spec is None or spec.origin is None:
            continue
        there = Path(spec.origin).parents[1] / name
        if there.exists():
            (tmp_path / name).symlink_to(there)
    return tmp_path


def include_folders(site, before=""):
    """Those that the core would be compiled with; what setup.py says where there are none."""
    code = before + (
        "import runpy, setuptools; setuptools.setup = lambda **given: print(*given['ext_modules']"
        "[0].include_dirs, sep='\\n'); runpy.run_path('setup.py')"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(site), "PYCOLLECTIVE_TORCH": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_without_pybind11_the_headers_are_torchs(bare):
    headers = bare / "torch" / "include" / "pybind11"
    headers.mkdir(parents=True)
    (bare / "torch" / "__init__.py").write_text("raise ImportError('not to be imported')")
    (headers / "pybind11.h").touch()
    done = include_folders(bare)
    assert done.returncode == 0, done.stderr
    assert str(bare / "torch" / "include") in done.stdout.split()


def test_where_there_are_no_headers_that_is_said(bare):
    done = include_folders(bare)
    assert done.returncode != 0
    assert "there is no pybind11, and no torch that has its headers" in done.stderr
    (bare / "torch").mkdir()
    (bare / "torch" / "__init__.py").touch()
    assert "no torch that has its headers" in include_folders(bare).stderr


def test_an_older_setuptools_is_refused(bare):
    done = include_folders(bare, "import setuptools; setuptools.__version__ = '76.1.0'; ")
    assert done.returncode != 0
    assert done.stderr.endswith("and here is 76.1.0: pip install 'setuptools>=77'\n")
