"""`pycollective bench`: time the collectives beside other libraries, and verify every bit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pycollective.cli.common import (
    Parsers,
    add_command,
    option,
    progress_line,
    refuse_inside_a_launch,
)
from pycollective.config import ENV_TOPOLOGY, ENV_WIRE
from pycollective.errors import CollectiveError, ConfigurationError


def add(parsers: Parsers) -> None:
    """Declare the command."""
    parser = add_command(parsers, bench, "OPERATION [options]")
    parser.add_argument(
        "operation",
        metavar="OPERATION",
        help="all_reduce, reduce_scatter, all_gather, broadcast, gather, scatter or all_to_all; "
        "with --tune also all",
    )

    group = parser.add_argument_group("what is measured")
    option(group, "-n --ranks", "N", "ranks of each library", 2, int)
    sizes = "bytes of the whole message; K, M and G are binary"
    option(group, "-b --minbytes", "BYTES", f"smallest size: {sizes}", "1K")
    option(group, "-e --maxbytes", "BYTES", f"largest size: {sizes}", "64M")
    option(
        group, "-f --stepfactor", "TIMES", "each size is this many times the one before", 2.0, float
    )
    option(
        group,
        "-i --stepbytes",
        "BYTES",
        "each size is this much larger than the one before, instead of -f (default: use -f)",
        "0",
    )
    option(group, "-d --dtype", "NAME", "element type; half, float and double too", "float32")
    option(
        group, "-o --op", "NAME", "reduction: sum, avg, prod, min, max, band, bor or bxor", "sum"
    )
    option(group, "-r --root", "RANK", "root of broadcast, gather and scatter", 0, int)
    option(group, "--algorithm", "NAME", "algorithm of pycollective's ranks", "auto")
    option(
        group,
        "--peers",
        "NAMES",
        "what else to measure in the same run, with commas between: gloo, mpich, openmpi, "
        "openmpi-nocma or impi; on GPUs nccl; of pycollective native (from C++), torch (its "
        "backend), shared (arrays of Communicator.empty), bfloat16 or float16 (as many bytes of "
        "that type); fake, torch's backend that does nothing (default: none)",
        "",
    )

    group = parser.add_argument_group("how it is measured")
    option(group, "--rounds", "N", "turns of each library at each size", 7, int)
    option(
        group,
        "--iterations",
        "N",
        "timed calls in a round (default: as many as take some 20 ms)",
        0,
        int,
    )
    option(group, "-w --warmup", "N", "untimed calls before each size", 5, int)
    option(
        group,
        "-c --check",
        "N",
        "calls to verify at each size, besides the last timed one; 0 verifies none",
        1,
        int,
    )

    group = parser.add_argument_group("where it is measured")
    option(
        group,
        "--offsets",
        "BYTES",
        "bytes from the start of a page to each rank's array; of several, with commas between, "
        "ranks take one each, in turn (NumPy's large arrays have 16, torch's 64)",
        "16",
    )
    option(
        group,
        "--device",
        "NAME",
        "memory of the arrays: cpu, or cuda, where ranks take their host's GPUs in turn",
        "cpu",
    )
    option(
        group,
        "--topology",
        "HOSTS",
        "simulate hosts for pycollective's ranks, such as 2x2: two hosts of two ranks (default: "
        "PYCOLLECTIVE_TOPOLOGY, else the real hosts)",
        "",
    )
    option(
        group,
        "--wire",
        "NAME",
        "how these ranks send to other hosts: raw, or exact, which packs without loss (default: "
        "PYCOLLECTIVE_WIRE, else raw)",
        "",
    )
    for mpi in ("mpich", "openmpi", "impi"):
        option(
            group,
            f"--{mpi}-env",
            "DIR",
            f"virtual environment of --peers {mpi}, with mpi4py (default: .venv-{mpi})",
            "",
        )

    group = parser.add_argument_group("results")
    group.add_argument(
        *("-v", "--verbose"),
        action="store_true",
        help="print also the machine's limit for each size, and a row for each phase of the "
        "machine (default: one row for each size and library)",
    )
    option(
        group,
        "-J --json",
        "FILE",
        "write all that was measured there (default: nowhere)",
        None,
        Path,
    )
    option(
        group,
        "--plot",
        "FILE",
        "draw time against size, as PNG, SVG or PDF, with matplotlib (default: no picture)",
        None,
        Path,
    )

    group = parser.add_argument_group("other measurements")
    option(
        group,
        "--tune",
        "FILE",
        "time every algorithm, and add the times to this table, by which init(tuning=FILE) "
        "chooses (default: no table)",
        None,
        Path,
    )
    option(
        group,
        "--codec",
        "NAME",
        "compare a codec (exact, one_bit, int8, top_k) with dense calls, and say whether it "
        "pays (default: none)",
        "",
    )
    option(
        group, "--density", "SHARE", "share of the elements that --codec top_k sends", 0.01, float
    )


def bench(options: argparse.Namespace) -> int:
    """Time a collective beside other libraries, and verify every bit.

      pycollective bench all_reduce -n 2 -d bfloat16 --peers gloo

    It prints a row for each size and library. The columns are those of nccl-tests,
    except that a time is the slowest rank's, not the mean over the ranks. With
    --topology, two more columns say how many bytes all ranks together sent to other
    hosts in a call, and how many these would be without packing.

    With --tune it times every algorithm of pycollective instead, on ranks of its
    own or in the launch that this command is part of. It takes -b, -e, -i, -f, -d,
    --rounds, -n and --topology, and reads PYCOLLECTIVE_WIRE.

    With --codec it compares three ways to average gradients: by that codec, dense
    in fp32 and dense in bf16. It prints bytes between hosts, times, the error of
    one step, and a verdict. It takes -b, -e, -i, -f, --rounds, -n and --topology.

    Exit status 1: wrong bits, 2: what was asked for cannot be, 3: a rank was lost.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bench.group import RankLost
    from pycollective.bench.settings import ladder, parse_size
    from pycollective.dtypes import ALIASES

    step = parse_size(options.stepbytes)
    sizes = ladder(
        *(parse_size(options.minbytes), parse_size(options.maxbytes)),
        *(step, 0 if step else options.stepfactor),
    )
    dtype = ALIASES.get(options.dtype, options.dtype)
    if options.tune is not None and options.wire:
        raise ConfigurationError("--wire is not for --tune, which reads PYCOLLECTIVE_WIRE")
    if options.device != "cpu" and (options.tune is not None or options.codec):
        raise ConfigurationError("--tune and --codec measure host memory, not --device")
    if options.verbose and (options.tune is not None or options.codec):
        raise ConfigurationError("--tune and --codec have no --verbose")
    try:
        if options.tune is not None:
            return _tune(options, sizes, dtype)
        if options.codec:
            return _compare(options, sizes)
        return _beside_others(options, sizes, dtype)
    except (CollectiveError, RankLost) as error:
        # One write: lines that `print` writes in pieces may mix with another rank's.
        sys.stderr.write(f"pycollective bench: {error}\n")
        return 3


def _tune(options: argparse.Namespace, sizes: list[int], dtype: str) -> int:
    """Time every algorithm in this launch, or start ranks that do; return the status."""
    from pycollective.bench import tune

    plan = tune.Plan.of(options.operation, sizes, dtype, options.rounds)

    def check() -> None:
        plan.check(options.ranks)
        tune.check_file(options.tune)

    if (status := _start_ranks(options, check)) is None:
        tune.tune(plan, options.tune, options.topology, lambda line: print(line, flush=True))
        return 0
    return status


def _compare(options: argparse.Namespace, sizes: list[int]) -> int:
    """Compare a codec with dense calls here, or start ranks that do; return the status."""
    from pycollective.bench import codec

    if options.operation != "all_reduce":
        raise ConfigurationError("--codec compares ways to do an all_reduce")
    if options.peers or options.wire or options.json or options.plot:
        raise ConfigurationError("--codec has no --peers, --wire, --json or --plot")
    plan = codec.Plan.of(options.codec, sizes, options.density, options.rounds)

    def check() -> None:
        if not options.topology:
            plan.refuse_one_host()

    if (status := _start_ranks(options, check)) is None:
        right = codec.compare(plan, options.topology, lambda line: print(line, flush=True))
        return 0 if right else 1
    return status


def _start_ranks(options: argparse.Namespace, check: Callable[[], None]) -> int | None:
    """Outside a launch, run this very command in ranks of its own; return their status, or None."""
    from pycollective import cores
    from pycollective.bootstrap import init as bootstrap
    from pycollective.launch.launcher import launch
    from pycollective.schedule import Topology

    if bootstrap.launched():
        return None
    check()
    topology = options.topology or os.environ.get(ENV_TOPOLOGY)
    if topology:
        Topology.parse(topology, options.ranks)
    many = len(cores.in_turn())
    # Between hosts the threads of the transport need cores beside those of the ranks.
    pin = not topology and options.ranks <= many
    load = cores.busy(cores.used_by_others(), many)
    said = [
        "pinned: each rank to a core of its own" if pin else "",
        cores.shared_by(options.ranks, many),
        f"busy: {load}; times are shorter on an idle machine" if load else "",
    ]
    for line in filter(None, said):
        print(f"# {line}", flush=True)
    return launch(["-m", "pycollective", *sys.argv[1:]], options.ranks, pin=pin)


def _beside_others(options: argparse.Namespace, sizes: list[int], dtype: str) -> int:
    """Measure one operation of each library; return the status."""
    from pycollective.bench.libraries import MPI_PACKAGES, find_peers
    from pycollective.bench.plot import check, plot
    from pycollective.bench.record import write_json
    from pycollective.bench.settings import Settings, parse_offsets
    from pycollective.bench.table import run

    refuse_inside_a_launch(
        "bench", "start it by itself, with -n; with --tune alone does it join a launch"
    )
    if options.plot is not None:
        check()
    settings = Settings(
        operation=options.operation,
        sizes=tuple(sizes),
        ranks=options.ranks,
        dtype=dtype,
        reduce_op=options.op,
        root=options.root,
        algorithm=options.algorithm,
        topology=options.topology or os.environ.get(ENV_TOPOLOGY, ""),
        wire=options.wire or os.environ.get(ENV_WIRE) or "raw",
        device=options.device,
        offsets=parse_offsets(options.offsets),
        peers=tuple(find_peers(options.peers, options.device)),
        iterations=options.iterations,
        warmup=options.warmup,
        checks=options.check,
        rounds=options.rounds,
        mpi_environments={mpi: getattr(options, f"{mpi}_env") for mpi in MPI_PACKAGES},
    )
    with progress_line() as progress:
        record = run(settings, progress, options.verbose)
    if options.json is not None:
        write_json(record, options.json)
    if options.plot is not None:
        plot(record, options.plot)
    return 1 if record.wrong else 0
