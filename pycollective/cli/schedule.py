"""`pycollective schedule`: what an algorithm sends, proved, counted and drawn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycollective.cli import schedule_plan, schedule_table
from pycollective.cli.common import Parsers, add_command, option, progress_line
from pycollective.cli.schedule_messages import Counts, Sizes
from pycollective.errors import ConfigurationError
from pycollective.planning.tuning_table import ELEMENTS
from pycollective.schedule import Schedule, ScheduleError, Topology, make_schedule
from pycollective.schedule.proof import Fault, check_shard

_MOST_RANKS = 1 << 20
# With more shards times ranks, which is a matter of minutes, some shards are looked at unless all
# are asked for.
_MOST_UNASKED = 1 << 22
_SOME = 16


def add(parsers: Parsers) -> None:
    """Declare the command."""
    parser = add_command(parsers, schedule, "ALGORITHM -n N [options]")
    parser.add_argument(
        "algorithm",
        metavar="ALGORITHM",
        help="direct, ring, tree, halving_doubling, recursive_doubling or hierarchical",
    )
    parser.add_argument(
        *("-n", "--ranks"), type=int, required=True, metavar="N", help="number of ranks (required)"
    )
    option(parser, "--operation", "NAME", "collective; not every algorithm has all", "all_reduce")
    option(
        parser,
        "--topology",
        "HOSTS",
        "2x4: two hosts of four ranks each; 3,1: a host of three ranks and one of one (default: "
        "one host)",
        "",
    )
    option(parser, "-r --root", "RANK", "root of broadcast, reduce, gather and scatter", 0, int)
    option(parser, "-d --dtype", "NAME", "element type", "bfloat16")
    option(
        parser,
        "--size",
        "BYTES",
        "bytes of a rank's input or output, whichever is larger; K, M and G are binary",
        "16M",
    )
    option(
        parser,
        "--picture",
        "FILE",
        "draw who sends what when, as PNG, SVG or PDF, with matplotlib (default: no picture)",
        None,
        Path,
    )
    option(
        parser,
        "--shard",
        "NUMBER",
        "shard that the picture shows in full; the others are faint",
        0,
        int,
    )
    option(
        parser,
        "--shards",
        "COUNT",
        "prove and count only this many shards, spread evenly (default: all of them, or "
        f"{_SOME} where that would take minutes)",
        0,
        int,
    )
    parser.add_argument(
        "--no-verify",
        action="store_false",
        dest="verify",
        help="count, and leave out the proof (default: prove the schedule right)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print also the instructions that a rank carries out",
    )
    option(
        parser,
        "--rank",
        "RANK",
        "whose instructions --plan prints: a rank's number, or all (default: 0)",
        "",
    )


def schedule(options: argparse.Namespace) -> int:
    """Show what an algorithm sends, step by step, and prove it right.

      pycollective schedule ring -n 4
      pycollective schedule hierarchical -n 8 --topology 2x4 --picture steps.png

    No rank is started: the schedule is computed, checked and printed. What travels
    is leaves (a rank's input), nodes (the sum of some ranks' inputs, in a wider
    type) and results. All shards are taken to be equally large.

    Exit status 1: the schedule is wrong, 2: what was asked for cannot be.
    """
    try:
        wrong = _show(options)
    except ScheduleError as error:
        wrong = str(error)
    if wrong:
        print(f"pycollective schedule: wrong: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def _show(options: argparse.Namespace) -> str:
    """Print all that is asked for; what is wrong with the schedule, or nothing."""
    topology = _topology(options.topology, options.ranks)
    made = make_schedule(options.operation, options.algorithm, topology, options.root)
    sizes = _sizes(options.size, options.dtype)
    if options.shards < 0:
        raise ConfigurationError(f"--shards {options.shards} is not a number of shards")
    if options.rank and not options.plan:
        raise ConfigurationError("--rank says whose plan is printed: give --plan, too")
    plans = schedule_plan.ranks_named(options.rank or "0", topology) if options.plan else ()
    if options.picture is not None:
        # Here, because matplotlib is slow to import, and may be missing.
        from pycollective.cli.schedule_picture import check, draw

        check(made, options.shard)
    looked_at = _spread(made, options.shards)
    counts, fault = _examine(made, looked_at, options.verify)
    if options.picture is not None:
        draw(made, sizes, options.picture, options.shard)
    for line in schedule_table.report(made, counts, sizes, len(looked_at)):
        print(line)
    if fault is not None:
        return str(fault)
    if options.verify:
        print(schedule_table.proof(made, len(looked_at)))
    for each in plans:
        print()
        for line in schedule_plan.plan(made, each):
            print(line)
    return ""


def _topology(text: str, ranks: int) -> Topology:
    if not 1 <= ranks <= _MOST_RANKS:
        raise ConfigurationError(f"-n {ranks}: there may be 1 to {_MOST_RANKS} ranks")
    return Topology.parse(text, ranks) if text else Topology.single_host(ranks)


def _sizes(size: str, dtype: str) -> Sizes:
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bench.settings import parse_size
    from pycollective.dtypes import ALIASES

    name = ALIASES.get(dtype, dtype)
    if name not in ELEMENTS:
        raise ConfigurationError(f"unknown dtype {dtype!r}; there are {', '.join(ELEMENTS)}")
    total, element = parse_size(size), ELEMENTS[name]
    if total < element.size or total % element.size:
        raise ConfigurationError(
            f"--size {size} is not a whole number of {name} elements, of {element.size} bytes each"
        )
    accumulator = name if element.accumulator == element.size else "float32"
    return Sizes(total, name, element.size, accumulator, element.accumulator)


def _spread(made: Schedule, shards: int) -> Sequence[int]:
    """The shards to look at: so many, evenly spread."""
    if not shards:
        all_are_few = made.shards * made.topology.ranks <= _MOST_UNASKED
        shards = made.shards if all_are_few else _SOME
    count = min(shards, made.shards)
    # From the middle of each of as many parts: neither end is like the others.
    return [(2 * i + 1) * made.shards // (2 * count) for i in range(count)]


def _examine(made: Schedule, shards: Sequence[int], verify: bool) -> tuple[Counts, Fault | None]:
    """Count what is sent of some shards, and prove them; the first fault, if there is one."""
    # Here, because the other commands of this program should not wait for it.

    ranks = made.topology.ranks
    several = len(made.topology.hosts) > 1
    counts, fault = Counts(ranks, made.topology.host_of if several else ()), None
    with progress_line() as progress:  # thousands take minutes
        for done, shard in enumerate(shards):
            if len(shards) > 1:
                progress(f"shard {done} of {len(shards)}")
            lowered = made.lowered(shard)
            counts.add(lowered)
            if verify and fault is None:
                try:
                    check_shard(made.operation, shard, ranks, made.root, lowered)
                except Fault as found:
                    fault = Fault(f"shard {shard}: {found}")
    return counts, fault
