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
        "sizes this far apart, instead of -f (default: by -f)",
        "0",
    )
    option(group, "-d --dtype", "NAME", "element type; half, float and double too", "float32")
    option(group, "-o --op", "NAME", "sum, avg, prod, min, max, band, bor or bxor", "sum")
    option(group, "-r --root", "RANK", "root of broadcast, gather and scatter", 0, int)
    option(group, "--algorithm", "NAME", "of pycollective's own ranks", "auto")
    option(
        group,
        "--peers",
        "NAMES",
        "measure beside these, with commas between: gloo, mpich, openmpi, openmpi-nocma, "
        "impi, torch, native, fake (torch's, which does nothing), shared (pycollective, arrays of "
        "Communicator.empty), bfloat16 and float16 (as many bytes of that type); on GPUs nccl "
        "(default: none)",
        "",
    )

    group = parser.add_argument_group("how it is measured")
    option(group, "--rounds", "N", "turns that each library has at each size", 7, int)
    option(
        group,
        "--iterations",
        "N",
        "timed calls a round (default: as many as take some 20 ms)",
        0,
        int,
    )
    option(group, "-w --warmup", "N", "untimed calls before each size", 5, int)
    option(
        group,
        "-c --check",
        "N",
        "calls a size that are verified, beside the last timed one; 0: none",
        1,
        int,
    )

    group = parser.add_argument_group("where it is measured")
    option(
        group,
        "--offsets",
        "BYTES",
        "where each rank's array begins, behind a page; with commas between, the ranks take them "
        "in turn (NumPy's large arrays: 16, torch's: 64)",
        "16",
    )
    option(
        group, "--device", "NAME", "where arrays lie: cpu, or cuda, each host's GPUs in turn", "cpu"
    )
    option(
        group,
        "--topology",
        "HOSTS",
        "hosts that pycollective's own ranks simulate, such as 2x2 (default: "
        "PYCOLLECTIVE_TOPOLOGY, else the real one)",
        "",
    )
    option(
        group,
        "--wire",
        "NAME",
        "how what they send to other hosts travels: raw or exact (default: "
        "PYCOLLECTIVE_WIRE, else raw)",
        "",
    )
    for mpi in ("mpich", "openmpi", "impi"):
        option(
            group, f"--{mpi}-env", "DIR", f"its environment, with mpi4py (default: .venv-{mpi})", ""
        )

    group = parser.add_argument_group("results")
    option(
        group, "-J --json", "FILE", "write the whole record there (default: nowhere)", None, Path
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
        "every algorithm; adds it to this table for algorithm='auto' (default: no table)",
        None,
        Path,
    )
    option(
        group,
        "--codec",
        "NAME",
        "a codec (exact, one_bit, int8, top_k) beside dense calls, and whether it pays "
        "(default: none)",
        "",
    )
    option(
        group, "--density", "SHARE", "share of the elements that --codec top_k sends", 0.01, float
    )


def bench(options: argparse.Namespace) -> int:
    """Time a collective beside other libraries, and verify every bit.

    Columns are those of nccl-tests, but that a time is the slowest rank's, not the
    mean over the ranks. With --topology, two more columns say how many bytes all
    ranks sent to other hosts a call, and how many they were unpacked.

    With --tune every algorithm is timed instead, on ranks of its own or in the
    launch that this command is part of. It heeds -b, -e, -i, -f, -d, --rounds, -n
    and --topology, and PYCOLLECTIVE_WIRE.

    With --codec gradients are averaged by it, dense in fp32 and dense in bf16, the
    same way: bytes between hosts, time, error of one step, and a verdict. It heeds
    -b, -e, -i, -f, --rounds, -n and --topology.

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
        raise ConfigurationError("--wire is not for --tune, which heeds PYCOLLECTIVE_WIRE")
    if options.device != "cpu" and (options.tune is not None or options.codec):
        raise ConfigurationError("--tune and --codec measure host memory, not --device")
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
        record = run(settings, progress)
    if options.json is not None:
        write_json(record, options.json)
    if options.plot is not None:
        plot(record, options.plot)
    return 1 if record.wrong else 0
