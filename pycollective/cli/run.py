"""`pycollective run`: start ranks on this host, and end them all when one fails."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pycollective.errors import ConfigurationError
from pycollective.launch.launcher import launch


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            help="prog.py args…, or -m module args…, or any executable.", metavar="PROGRAM"
        ),
    ],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks to start.")] = 1,
    tag_output: Annotated[
        bool, typer.Option("--tag-output", help="Begin each line of output with [rank].")
    ] = False,
) -> None:
    """Start ranks of a program on this host; if one fails, name it and end the rest.

    Each rank finds `pycollective.init()` ready, and torch.distributed's env:// too. Returns the
    status of the rank that failed.
    """
    try:
        sys.exit(launch(program, ranks, tag_output=tag_output))
    except ConfigurationError as error:
        print(f"pycollective run: {error}", file=sys.stderr)
        sys.exit(2)
