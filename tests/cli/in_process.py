"""The command line in the tests' own process, for what it refuses and what it hands to programs:
an interpreter for each, which costs 0.3 s of CPU, would show nothing more."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import pytest

from pycollective.cli import main


class Done(NamedTuple):
    """How it ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pycollective(monkeypatch, capfd):
    """`pycollective(*arguments)`: what the command ends with, and all that the process writes."""
    for name in list(os.environ):
        if "RANK" in name or "MASTER" in name:  # as Launcher.environment
            monkeypatch.delenv(name)

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pycollective", *map(str, arguments)])
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        assert isinstance(status, int), status
        return Done(status, *capfd.readouterr())

    return call
