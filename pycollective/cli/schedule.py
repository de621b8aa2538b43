"""`pycollective schedule`: what an algorithm sends, proved, counted and drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pycollective.cli import schedule_program, schedule_table
from pycollective.cli.schedule_messages import Counts, Sizes
from pycollective.errors import ConfigurationError
from pycollective.planning.elements import ELEMENTS
from pycollective.schedule import Schedule, ScheduleError, Topology, make_schedule
from pycollective.schedule.verify import Fault, check_shard

_MOST_RANKS = 1 << 20
# With more shards times ranks, which is a matter of minutes, some shards are looked at unless all
# are asked for.
_MOST_UNASKED = 1 << 22
_SOME = 16


def schedule(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="direct, ring, tree, halving_doubling, recursive_doubling or hierarchical."
        ),
    ],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.")],
    operation: Annotated[
        str, typer.Option(help="all_reduce, or another collective that the algorithm can do.")
    ] = "all_reduce",
    topology: Annotated[
        str,
        typer.Option(
            help="2x4: two hosts of four ranks; 3,1: a host of three and one of one; one host "
            "unless given."
        ),
    ] = "",
    root: Annotated[int, typer.Option("-r", "--root", help="Where the operation has one.")] = 0,
    dtype: Annotated[str, typer.Option("-d", "--dtype", help="Element type.")] = "bfloat16",
    size: Annotated[
        str, typer.Option(help="Bytes of a rank's input or output, whichever is larger.")
    ] = "16M",
    picture: Annotated[
        Path | None, typer.Option(help="Draw who sends what when (PNG, SVG, PDF).")
    ] = None,
    shard: Annotated[
        int, typer.Option(help="Shard that the picture follows; the others are faint.")
    ] = 0,
    shards: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prove and count so many shards, spread evenly; all of them, or, where that "
            f"takes minutes, {_SOME}, unless given.",
        ),
    ] = 0,
    verify: Annotated[bool, typer.Option(help="Prove the schedule right.")] = True,
    program: Annotated[
        bool, typer.Option("--program", help="Print also what the engine carries out for a rank.")
    ] = False,
    rank: Annotated[
        str, typer.Option(help="Whose program that is: a rank's number (0), or all.")
    ] = "",
) -> None:
    """Show what an algorithm sends, step by step, and prove it right.

    Nothing is run: a schedule is data, and the same everywhere. K, M and G are binary; all shards
    count as equally large. Exit status 1: the schedule is wrong.
    """
    try:
        made = make_schedule(operation, algorithm, _topology(topology, ranks), root)
        sizes = _sizes(size, dtype)
        if rank and not program:
            raise ConfigurationError("--rank says whose program is printed: give --program, too")
        programs = schedule_program.ranks_named(rank or "0", made.topology) if program else ()
        if picture is not None:
            # Here, because matplotlib is slow to import, and may be missing.
            from pycollective.cli.schedule_picture import check, draw

            check(made, shard)
        looked_at = _spread(made, shards)
        counts, fault = _examine(made, looked_at, verify)
        if picture is not None:
            draw(made, sizes, picture, shard)
    except ConfigurationError as error:
        print(f"pycollective schedule: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except ScheduleError as error:
        print(f"pycollective schedule: wrong: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for line in schedule_table.report(made, counts, sizes, len(looked_at)):
        print(line)
    if fault is not None:
        print(f"pycollective schedule: wrong: {fault}", file=sys.stderr)
        raise typer.Exit(1)
    if verify:
        print(schedule_table.proof(made, len(looked_at)))
    for each in programs:
        print()
        for line in schedule_program.program(made, each):
            print(line)


def _topology(text: str, ranks: int) -> Topology:
    if not 1 <= ranks <= _MOST_RANKS:
        raise ConfigurationError(f"-n {ranks}: there may be 1 to {_MOST_RANKS} ranks")
    return Topology.parse(text, ranks) if text else Topology.single_host(ranks)


def _sizes(size: str, dtype: str) -> Sizes:
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bench.problem import ALIASES
    from pycollective.bench.sizes import parse_size

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
    ranks = made.topology.ranks
    several = len(made.topology.hosts) > 1
    counts, fault = Counts(ranks, made.topology.host_of if several else ()), None
    for shard in _with_progress(shards):
        lowered = made.lowered(shard)
        counts.add(lowered)
        if verify and fault is None:
            try:
                check_shard(made.operation, shard, ranks, made.root, lowered)
            except Fault as found:
                fault = Fault(f"shard {shard}: {found}")
    return counts, fault


def _with_progress(shards: Sequence[int]) -> Iterator[int]:
    """The shards' numbers; says on a terminal which one it is, since thousands take minutes."""
    show = len(shards) > 1 and sys.stderr.isatty()
    try:
        for done, shard in enumerate(shards):
            if show:
                text = f"\r\x1b[Kshard {done} of {len(shards)}"
                print(text, end="", file=sys.stderr, flush=True)
            yield shard
    finally:
        if show:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
