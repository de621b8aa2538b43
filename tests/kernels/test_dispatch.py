"""Which instruction set is in force."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pycollective import _core

LEVELS = ["portable", "avx2", "avx512"]


def level_under(setting):
    """What a new process with PYCOLLECTIVE_SIMD set so says, and how it ends."""
    program = "from pycollective import _core; print(_core.simd_level())"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYCOLLECTIVE_SIMD": setting, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_levels_are_known_and_the_portable_one_is_always_there():
    assert _core.simd_levels() == LEVELS[: len(_core.simd_levels())]
    assert _core.simd_levels()


def test_the_best_is_in_force_unless_the_environment_says_otherwise():
    assert level_under("").stdout.strip() == _core.simd_levels()[-1]
    for level in _core.simd_levels():
        assert level_under(level).stdout.strip() == level


def test_an_unknown_level_is_refused_by_name():
    done = level_under("sse9")
    assert done.returncode != 0
    assert "PYCOLLECTIVE_SIMD=sse9 is not one of portable, avx2, avx512" in done.stderr


@pytest.mark.skipif(len(_core.simd_levels()) == 3, reason="this CPU runs every level")
def test_a_level_that_this_cpu_lacks_is_refused():
    done = level_under("avx512")
    assert done.returncode != 0
    assert "this CPU cannot run it" in done.stderr
