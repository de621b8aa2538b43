"""`pycollective build-torch`: the torch backend for a torch that has none prebuilt."""

from __future__ import annotations

import argparse

from pycollective.cli.common import Parsers, add_command
from pycollective.shim import building


def add(parsers: Parsers) -> None:
    """Declare the command."""
    add_command(parsers, build_torch)


def build_torch(options: argparse.Namespace) -> None:
    """Build the torch backend for the torch that is installed, into the user's cache.

    Needs a C++ compiler and Python's headers. Does nothing where there is one that
    fits.
    """
    building.build(say=lambda line: print(line, flush=True))
