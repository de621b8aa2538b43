"""`pycollective bench`: time the collectives beside other libraries, and verify every bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def bench(
    operation: Annotated[
        str,
        typer.Argument(
            help="all_reduce, reduce_scatter, all_gather or broadcast; with --tune also all."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", help="Processes a library.")] = 2,
    begin: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size.")] = "1K",
    end: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    step_bytes: Annotated[
        str, typer.Option("-i", "--stepbytes", help="Sizes this far apart, instead of -f.")
    ] = "0",
    step_factor: Annotated[
        float, typer.Option("-f", "--stepfactor", help="Each size times this.")
    ] = 2.0,
    iterations: Annotated[
        int, typer.Option("-n", "--iters", help="Timed calls a round; 0: as time allows.")
    ] = 0,
    warmup: Annotated[
        int, typer.Option("-w", "--warmup_iters", help="Untimed calls before each size.")
    ] = 5,
    checks: Annotated[
        int,
        typer.Option(
            "-c",
            "--check",
            help="Calls a size that are verified, beside the last timed one; 0: none.",
        ),
    ] = 1,
    dtype: Annotated[
        str, typer.Option("-d", "--datatype", help="Element type; half, float and double too.")
    ] = "float32",
    reduce_op: Annotated[
        str, typer.Option("-o", "--op", help="sum, avg, prod, min, max, band, bor or bxor.")
    ] = "sum",
    root: Annotated[int, typer.Option("-r", "--root", help="Root of broadcast.")] = 0,
    rounds: Annotated[int, typer.Option(help="Turns each library has, for each size.")] = 7,
    algorithm: Annotated[str, typer.Option(help="For pycollective's own ranks.")] = "auto",
    peers: Annotated[
        str,
        typer.Option(
            help="Measure beside: gloo,mpich,openmpi,openmpi-nocma,torch,native; on GPUs: nccl."
        ),
    ] = "",
    device: Annotated[
        str, typer.Option(help="Where arrays lie: cpu, or cuda (each host's GPUs in turn).")
    ] = "cpu",
    mpich_env: Annotated[
        str, typer.Option(help="Environment with mpich and mpi4py (default .venv-mpich).")
    ] = "",
    openmpi_env: Annotated[
        str, typer.Option(help="Environment with openmpi and mpi4py (default .venv-openmpi).")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("-J", "--json", help="Write the whole record there.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw time against size (PNG, SVG, PDF).")
    ] = None,
    tune_file: Annotated[
        Path | None,
        typer.Option(
            "--tune",
            help="Measure every algorithm, and add it to this table for algorithm='auto'.",
        ),
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            help="Compare a codec (exact, one_bit, int8, top_k) with dense calls, and say whether "
            "it pays."
        ),
    ] = "",
    density: Annotated[float, typer.Option(help="Of --codec top_k.")] = 0.01,
    topology: Annotated[
        str,
        typer.Option(
            help="pycollective's own ranks play hosts, such as 2x2 (default PYCOLLECTIVE_TOPOLOGY)."
        ),
    ] = "",
    wire: Annotated[
        str,
        typer.Option(
            help="How what they send to other hosts travels: raw, exact or auto (default "
            "PYCOLLECTIVE_WIRE, else auto)."
        ),
    ] = "",
) -> None:
    """Time a collective beside other libraries, and verify every bit.

    Options and columns are those of nccl-tests, but that a time is the slowest rank's, not the
    mean over the ranks. Sizes are bytes of the whole message; K, M and G are binary. Exit status
    1: wrong bits, 2: what was asked for cannot be, 3: a rank was lost. Where hosts are played,
    two more columns say what all ranks sent to other hosts a call, and what it was unpacked.

    With --tune every algorithm is timed instead, on ranks of its own or in the launch that this
    command is part of. It heeds -b, -e, -i, -f, -d, --rounds, --ranks and --topology, and
    PYCOLLECTIVE_WIRE.

    With --codec gradients are averaged by it, dense in fp32 and dense in bf16, the same way: bytes
    between hosts, time, error of one step, and a verdict. It heeds -b, -e, -i, -f, --rounds,
    --ranks and --topology.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bench.console import run
    from pycollective.bench.group import RankLost
    from pycollective.bench.libraries import find_peers
    from pycollective.bench.problem import ALIASES
    from pycollective.bench.record import write_json
    from pycollective.bench.settings import Settings
    from pycollective.bench.sizes import ladder, parse_size
    from pycollective.cli.inside import refuse_inside_a_launch
    from pycollective.environment import ENV_TOPOLOGY, ENV_WIRE
    from pycollective.errors import ConfigurationError

    try:
        step = parse_size(step_bytes)
        sizes = ladder(parse_size(begin), parse_size(end), step, 0 if step else step_factor)
        if tune_file is not None and wire:
            raise ConfigurationError("--wire is not for --tune, which heeds PYCOLLECTIVE_WIRE")
        if device != "cpu" and (tune_file is not None or codec):
            raise ConfigurationError("--tune and --codec measure host memory, not --device")
        if tune_file is not None:
            from pycollective.cli.tune import tune

            raise typer.Exit(
                tune(
                    operation, sizes, ALIASES.get(dtype, dtype), rounds, tune_file, ranks, topology
                )
            )
        if codec:
            from pycollective.cli.codec import compare

            if operation != "all_reduce":
                raise ConfigurationError("--codec compares ways to do an all_reduce")
            if peers or wire or json_file or plot_file:
                raise ConfigurationError("--codec has no --peers, --wire, --json or --plot")
            raise typer.Exit(compare(codec, sizes, density, rounds, ranks, topology))
        refuse_inside_a_launch(
            "bench", "start it by itself, with --ranks; with --tune alone does it join a launch"
        )
        settings = Settings(
            operation=operation,
            sizes=tuple(sizes),
            ranks=ranks,
            dtype=ALIASES.get(dtype, dtype),
            reduce_op=reduce_op,
            root=root,
            algorithm=algorithm,
            topology=topology or os.environ.get(ENV_TOPOLOGY, ""),
            wire=wire or os.environ.get(ENV_WIRE) or "auto",
            device=device,
            peers=tuple(find_peers(peers, device)),
            iterations=iterations,
            warmup=warmup,
            checks=checks,
            rounds=rounds,
            mpi_environments={"mpich": mpich_env, "openmpi": openmpi_env},
        )
        record = run(settings)
        if json_file is not None:
            write_json(record, json_file)
        if plot_file is not None:
            from pycollective.bench.plot import plot

            plot(record, plot_file)
    except (ConfigurationError, RankLost) as error:
        # One write: lines that `print` writes in pieces may mix with another rank's.
        sys.stderr.write(f"pycollective bench: {error}\n")
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 3) from error
    if record.wrong:
        raise typer.Exit(1)
