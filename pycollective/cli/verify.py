"""`pycollective verify`: check all operations on the user's own machine, bit for bit."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys

from pycollective.cli.common import (
    Parsers,
    add_command,
    option,
    progress_line,
    refuse_inside_a_launch,
)
from pycollective.errors import ConfigurationError

# What a job may end with; any other status is that of a rank that was lost.
_STATUSES = (0, 1, 2, 3, *(128 + each for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def add(parsers: Parsers) -> None:
    """Declare the command."""
    parser = add_command(parsers, verify, "[options]")
    option(
        parser,
        "-n --ranks",
        "N",
        "ranks to start (default: join the launch that this command is part of, or be one rank)",
        None,
        int,
    )
    for name in ("--operation", "--algorithm"):
        parser.add_argument(
            name,
            action="append",
            default=[],
            metavar="NAMES",
            help=f"only these {name[2:]}s, with commas between; may be given again (default: all)",
        )
    parser.add_argument(
        *("-d", "--dtype"),
        action="append",
        default=[],
        metavar="NAMES",
        help="only these element types (default: all; with ml_dtypes also bfloat16 and fp8)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller messages (default: all)"
    )
    parser.add_argument(
        "--table", action="store_true", help="a line for each combination (default: for wrong ones)"
    )
    option(
        parser,
        "--device",
        "NAME",
        "memory of the arrays: cpu, or cuda, where ranks take their host's GPUs in turn",
        "cpu",
    )
    option(
        parser,
        "--timeout",
        "SECONDS",
        "how long joining, and each operation, may take",
        60.0,
        float,
    )


def verify(options: argparse.Namespace) -> int:
    """Check every operation, algorithm and dtype on your ranks, bit for bit.

    It prints a verdict and one digest of the bits of all results. The documentation
    of the contract lists the digests that 2 and 4 ranks must print, with --quick
    and without. The digest is the same on every machine, by every algorithm, on
    GPUs, and under every launcher:

      pycollective verify -n 4
      pycollective run -n 4 -m pycollective verify
      torchrun --nproc-per-node 4 -m pycollective verify
      mpiexec -n 4 python -m pycollective verify

    Exit status 1: something was wrong, 2: what was asked for cannot be, 3: a rank
    was lost.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.verify import PLACES, Lost, select
    from pycollective.verify import verify as verify_this_rank

    chosen = {name: _split(getattr(options, name)) for name in ("operation", "algorithm", "dtype")}
    selection = select(chosen["operation"], chosen["algorithm"], chosen["dtype"], options.quick)
    if not 0 < options.timeout < math.inf:
        raise ConfigurationError(f"--timeout {options.timeout:g} is not some seconds above 0")
    if options.device not in PLACES:
        raise ConfigurationError(
            f"unknown device {options.device!r}; there are {', '.join(PLACES)}"
        )
    if options.ranks is not None:
        refuse_inside_a_launch("-n", "leave -n out to verify the ranks of this launch")
        return _start(options, chosen)
    try:
        with progress_line() as progress:
            right = verify_this_rank(
                selection,
                options.timeout,
                lambda line: print(line, flush=True),
                options.device,
                every=options.table,
                progress=progress,
            )
    except Lost as error:
        # One write: lines that `print` writes in pieces may mix with another rank's.
        sys.stderr.write(f"pycollective verify: {error}\n")
        return 3
    return 0 if right else 1


def _start(options: argparse.Namespace, chosen: dict[str, list[str]]) -> int:
    """Run this very command in ranks of its own; return their status."""
    from pycollective.launch.launcher import launch

    command = ["-m", "pycollective", "verify"]
    command += ["--timeout", str(options.timeout), "--device", options.device]
    for name, values in chosen.items():
        command += [part for value in values for part in (f"--{name}", value)]
    command += [f"--{name}" for name in ("quick", "table") if getattr(options, name)]
    # Else ranks would not have the terminal itself, on which rank 0 says how far it is. Lines come
    # from that one alone, each at once.
    os.environ.pop("PYTHONUNBUFFERED", None)
    status = launch(command, options.ranks)
    return status if status in _STATUSES else 3


def _split(values: list[str]) -> list[str]:
    return [name for value in values for name in value.split(",")]
