"""What goes wrong on one rank of `pycollective bench` ends all of it at once, by its name."""

from __future__ import annotations

import time

import pytest

from tests.launchers import find, python

# The driver, whose ranks run another program than `-m ranks`.
DRIVER = """
import sys
from pycollective.bench import libraries
launch = libraries.launch
def planted(*arguments):
    made = launch(*arguments)
    for command in made.commands:
        at = command.index("-m")
        command[at : at + 2] = ["-c", PROGRAM]
    return made
PROGRAM = sys.argv.pop(1)
libraries.launch = planted
from pycollective.cli import main
main()
"""
# A rank, with a fault on rank 1.
REFUSES = """
import sys
from pycollective import ConfigurationError
from ranks.__main__ import main
from ranks.library_own import OwnLibrary
def refuse():
    raise ConfigurationError("not on this rank")
if sys.argv[3] == "1":
    OwnLibrary._python_call = lambda *arguments: refuse
main()
"""
FAILS = """
import sys
from ranks.__main__ import RankProcess, main
load = RankProcess.load
def fail(self, case, path):
    if self._rank == 1 and sys.argv[1] == "mpi":
        raise LookupError("no such page")
    return load(self, case, path)
RankProcess.load = fail
main()
"""


def bench(program, status, *arguments):
    """Seconds that a benchmark of 1 KiB took, which must end so; and what it said."""
    small = ["bench", "all_reduce", "-b", "1K", "-e", "1K", "--rounds", "1", "--iterations", "2"]
    started = time.monotonic()
    done = python("-c", DRIVER, program, *small, *arguments, status=status)
    return time.monotonic() - started, done.stderr


def test_what_one_rank_refuses_while_the_others_wait_in_the_call():
    seconds, said = bench(REFUSES, 2, "--ranks", 3)
    assert said == "pycollective bench: rank 1 of own: not on this rank\n"
    assert seconds < 100


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.storm)])
def test_a_rank_that_fails_under_mpiexec_does_not_wait_for_the_others(mpi):
    _, said = bench(FAILS, 3, "--peers", mpi, f"--{mpi}-env", str(find(mpi).folder))
    assert f"rank 1 of {mpi}: LookupError: no such page" in said
