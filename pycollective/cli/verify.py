"""`pycollective verify`: the conformance table on the user's own machine, and one digest."""

from __future__ import annotations

import math
import signal
import sys
from typing import Annotated

import typer

from pycollective.cli.inside import refuse_inside_a_launch
from pycollective.errors import ConfigurationError

# What a job may end with; any other status is that of a rank that was lost.
_STATUSES = (0, 1, 2, 3, *(128 + each for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def verify(
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Start so many ranks, outside a launch. Without it: join the launch, or be alone.",
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Only these, such as ring,tree; again for more.")
    ] = None,
    operation: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("-d", "--dtype", help="Only these.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few counts, none large.")] = False,
    device: Annotated[
        str, typer.Option(help="Where arrays lie: cpu, or cuda (each host's GPUs in turn).")
    ] = "cpu",
    timeout: Annotated[
        float, typer.Option(help="Seconds that joining, and each operation, may take.")
    ] = 60.0,
) -> None:
    """Check every operation, algorithm and dtype on your ranks, bit for bit.

    A line a combination, and one digest of all results, which is the same wherever as many ranks of
    the same version verify the same part of the table: under `pycollective verify -n 4`,
    `pycollective run -n 4 -m pycollective verify`, torchrun or mpiexec, by every algorithm, and on
    GPUs.

    Exit status 1: something was wrong, 2: what was asked for cannot be, 3: a rank was lost.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.conformance import PLACES, Lost, select
    from pycollective.conformance import verify as verify_this_rank

    operations, algorithms, dtypes = _split(operation), _split(algorithm), _split(dtype)
    try:
        selection = select(operations, algorithms, dtypes, quick)
        if not 0 < timeout < math.inf:
            raise ConfigurationError(f"--timeout {timeout:g} is not some seconds above 0")
        if device not in PLACES:
            raise ConfigurationError(f"unknown device {device!r}; there are {', '.join(PLACES)}")
        if ranks is not None:
            refuse_inside_a_launch("-n", "leave -n out to verify the ranks of this launch")
            chosen = {"--operation": operations, "--algorithm": algorithms, "--dtype": dtypes}
            raise typer.Exit(_start(ranks, chosen, quick, timeout, device))
        right = verify_this_rank(selection, timeout, lambda line: print(line, flush=True), device)
    except (ConfigurationError, Lost) as error:
        # One write: lines that `print` writes in pieces may mix with another rank's.
        sys.stderr.write(f"pycollective verify: {error}\n")
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 3) from error
    if not right:
        raise typer.Exit(1)


def _start(
    ranks: int, chosen: dict[str, list[str]], quick: bool, timeout: float, device: str
) -> int:
    """Run this very command in ranks of its own; their status."""
    from pycollective.launch.launcher import launch

    command = ["-m", "pycollective", "verify", "--timeout", str(timeout), "--device", device]
    for option, values in chosen.items():
        command += [part for value in values for part in (option, value)]
    status = launch([*command, "--quick"] if quick else command, ranks)
    return status if status in _STATUSES else 3


def _split(values: list[str] | None) -> list[str]:
    return [name for value in values or [] for name in value.split(",")]
