"""Every question about the collectives on one host, then a table of the targets: `make bench`.

A question is one or more runs of `pycollective bench`.

Usage: python -m benchmarks.all [NAME ...] [--out DIR] [--quick]    some of `QUESTIONS`, else all
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import targets
from benchmarks.mpi_environments import ensure_all
from benchmarks.targets import KI, MI
from pycollective.bench.libraries import find_peers
from pycollective.bench.plot import plot
from pycollective.bench.record import Record, write_json
from pycollective.bench.settings import Settings, ladder
from pycollective.bench.table import run
from pycollective.cli.common import progress_line

# Without cross-memory attach Open MPI is faster on some sizes and slower on others: both are shown.
PEERS = tuple(find_peers("gloo,mpich,openmpi,openmpi-nocma"))
SIZES = tuple(ladder(KI, 64 * MI, 0, 2))


@dataclass(frozen=True)
class Question:
    """What is asked, and the runs that answer it, by the stem of the result's file."""

    text: str
    runs: dict[str, Settings]


def _all_reduce(ranks: int, *dtypes: str) -> dict[str, Settings]:
    return {
        f"all_reduce_{ranks}_ranks_{dtype}": Settings(
            "all_reduce", SIZES, ranks=ranks, dtype=dtype, peers=PEERS
        )
        for dtype in dtypes
    }


QUESTIONS = {
    "all_reduce_2_ranks": Question(
        "all-reduce, 2 ranks: how fast beside Gloo, MPICH and Open MPI, and how near to the limit?",
        _all_reduce(2, "float32", "bfloat16", "float16"),
    ),
    "all_reduce_4_ranks": Question(
        "all-reduce, 4 ranks: what if there are more ranks than cores?",
        _all_reduce(4, "float32", "bfloat16"),
    ),
    "small_messages": Question(
        "small all-reduces, 2 ranks: what does a call cost in C++, from Python, through torch?",
        {
            "small_messages": Settings(
                "all_reduce",
                (16, 64, 256, KI, 4 * KI, 16 * KI),
                ranks=2,
                peers=(*find_peers("native,torch"), *PEERS),
                rounds=11,
            )
        },
    ),
    "other_collectives": Question(
        "reduce-scatter, all-gather, broadcast, 2 ranks: how fast beside Gloo, MPICH and Open MPI?",
        {
            f"{operation}_2_ranks": Settings(
                operation, tuple(ladder(KI, 64 * MI, 0, 4)), ranks=2, peers=PEERS
            )
            for operation in ("reduce_scatter", "all_gather", "broadcast")
        },
    ),
}


def answer(question: Question, out: Path, quick: bool) -> dict[str, Record]:
    """Run, print, and write a JSON file and a plot a run; `quick` only shows that all works."""
    environments = ensure_all()
    out.mkdir(parents=True, exist_ok=True)
    records = {}
    print(f"\n== {question.text}", flush=True)
    for stem, settings in question.runs.items():
        settings = replace(settings, mpi_environments=environments)
        with progress_line() as progress:
            record = run(_shortened(settings) if quick else settings, progress)
        write_json(record, out / f"{stem}.json")
        plot(record, out / f"{stem}.png")
        records[stem] = record
    return records


def _shortened(settings: Settings) -> Settings:
    """Every fourth size, where there are many, up to 1 Mi; two short rounds."""
    step = 4 if len(settings.sizes) > 8 else 1
    sizes = tuple(size for size in settings.sizes[::step] if size <= MI)
    return replace(settings, sizes=sizes, rounds=2, round_seconds=0.005)


def end_if_wrong(records: Mapping[str, Record]) -> None:
    """End the program with status 1 where elements of this library's are wrong."""
    if bad := [stem for stem, record in records.items() if record.wrong]:
        raise SystemExit(f"elements are wrong: see {', '.join(bad)}")


def main() -> None:
    """Answer, write, print the targets; status 1 where elements of ours are wrong."""
    parser = argparse.ArgumentParser(description="benchmarks, then a table of the targets")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    options = parser.parse_args()
    if unknown := set(options.names) - set(QUESTIONS):
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    started = time.monotonic()
    records: dict[str, Record] = {}
    for name in options.names or QUESTIONS:
        records.update(answer(QUESTIONS[name], options.out, options.quick))
    print()
    for line in targets.table(records):
        print(line)
    print(f"\n{len(records)} runs in {time.monotonic() - started:.0f} s; see {options.out}")
    end_if_wrong(records)


if __name__ == "__main__":
    main()
