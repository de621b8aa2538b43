"""Ranks in a sandbox that denies pidfd_open, as older container runtimes do."""

from __future__ import annotations

import sys

import pytest

from tests.launch.test_launcher import run

# `pycollective run`, behind a seccomp filter that answers pidfd_open with EPERM.
SANDBOXED = """
import sys
from tests import seccomp
try:
    seccomp.refuse(seccomp.PIDFD_OPEN)
except OSError:
    sys.exit("no seccomp here")
from pycollective.cli import main
from pycollective.launch import launcher
launcher._NOTICE = 0.2
main()
"""

RANK = """
import pycollective as pc

pc.init(timeout=20)
"""


def sandboxed(*arguments):
    command = [sys.executable, "-c", SANDBOXED, "run", "--no-tag-output"]
    done = run(*arguments, command=command)
    if "no seccomp here" in done.stderr:
        pytest.skip("no seccomp filter can be installed here")
    return done


def test_the_launcher_needs_no_pidfd():
    done = sandboxed("-n", "3", "sh", "-c", "echo rank $RANK")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1", "rank 2"]
    done = sandboxed("-n", "3", "sh", "-c", 'if [ "$RANK" = 1 ]; then exit 7; fi; exec sleep 50')
    assert done.returncode == 7
    assert "rank 1 of 3" in done.stderr


def test_ranks_that_could_not_see_each_other_die_say_what_is_missing(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    done = sandboxed("-n", "2", str(program))
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "ConfigurationError: " in line]
    assert len(errors) == 2  # one of them is told by the other, or sees it itself
    for each in errors:
        assert "pidfd_open" in each
        assert "a seccomp profile that allows it" in each
        assert "Operation not permitted" in each
