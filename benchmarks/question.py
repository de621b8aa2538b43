"""What the files of this folder share: a question is one or more runs of `pycollective bench`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.mpi_environments import ensure_all
from pycollective.bench.libraries import find_peers
from pycollective.bench.plot import plot
from pycollective.bench.record import Record, write_json
from pycollective.bench.settings import Settings, ladder
from pycollective.bench.table import run
from pycollective.cli.common import progress_line

KI, MI = 1 << 10, 1 << 20
# Without cross-memory attach Open MPI is faster on some sizes and slower on others: both are shown.
PEERS = tuple(find_peers("gloo,mpich,openmpi,openmpi-nocma"))
SIZES = tuple(ladder(KI, 64 * MI, 0, 2))


@dataclass(frozen=True)
class Question:
    """What is asked, and the runs that answer it, by the stem of the result's file."""

    text: str
    runs: dict[str, Settings]


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


def end_if_wrong(records: Mapping[str, Record]) -> None:
    """End the program with status 1 where elements of this library's are wrong."""
    if bad := [stem for stem, record in records.items() if record.wrong]:
        raise SystemExit(f"elements are wrong: see {', '.join(bad)}")


def _shortened(settings: Settings) -> Settings:
    """Every fourth size, where there are many, up to 1 Mi; two short rounds."""
    step = 4 if len(settings.sizes) > 8 else 1
    sizes = tuple(size for size in settings.sizes[::step] if size <= MI)
    return replace(settings, sizes=sizes, rounds=2, round_seconds=0.005)


def parse_arguments(description: str) -> argparse.Namespace:
    """--out DIR and --quick."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    return parser.parse_args()


def main(question: Question) -> None:
    """Answer one question from the command line."""
    arguments = parse_arguments(question.text)
    records = answer(question, arguments.out, arguments.quick)
    end_if_wrong(records)
