"""Every question about the collectives on one host, then a table of the targets: `make bench`.

A question is one or more runs of `pycollective bench`. A target is what the project has set itself
to reach: a ratio is a peer's time over ours, at the size where it is worst. Open MPI is judged as
it comes, and without cross-memory attach (CMA): each is the faster one on some sizes.

Usage: python -m benchmarks.all [NAME ...] [--out DIR] [--quick]    some of `QUESTIONS`, else all
       python -m benchmarks.all --table [--out DIR]    the table again, from the files
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.mpi_environments import ensure_all
from pycollective.bench.libraries import find_peers
from pycollective.bench.phase import FAR, NEAR, phase_of
from pycollective.bench.plot import plot
from pycollective.bench.record import Limit, Record, Row, read_json, write_json
from pycollective.bench.settings import Settings, format_size, ladder
from pycollective.bench.table import run
from pycollective.cli.common import progress_line

KI, MI = 1 << 10, 1 << 20
PEERS = tuple(find_peers("gloo,mpich,openmpi,openmpi-nocma,impi"))
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


@dataclass(frozen=True)
class Outcome:
    """One measured value, and the size that it is of."""

    value: float
    size: int


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        what: in words.
        stem: of the record that shows it.
        phase: NEAR or FAR where the target is of one phase of the machine; "" for both. It is
            told for each size, since virtual cores move in the course of a run: then a verdict is
            of some of the sizes, and says of how many.
        measure: finds the values in that record, one a size.
        bound: what it must reach, or, where `most` is True, not exceed.
        unit: printed after numbers.
    """

    what: str
    stem: str
    phase: str
    measure: Callable[[Record], list[Outcome]]
    bound: float
    most: bool = False
    unit: str = "x"

    def worst(self, outcomes: list[Outcome]) -> Outcome:
        """The least good of them."""
        return (max if self.most else min)(outcomes, key=lambda outcome: outcome.value)

    def met(self, outcome: Outcome) -> bool:
        """Whether that is good enough."""
        return outcome.value <= self.bound if self.most else outcome.value >= self.bound


def _ratio(library: str, smallest: int, largest: int) -> Callable[[Record], list[Outcome]]:
    """The ratios of `library`, from `smallest` to `largest` bytes."""
    return lambda record: [
        Outcome(row.ratio, row.size)
        for row in record.rows
        if row.library == library and row.ratio and smallest <= row.size <= largest
    ]


def _share(size: int) -> Callable[[Record], list[Outcome]]:
    """Our share of the limit, in per cent."""
    return lambda record: [
        Outcome(100 * limit.share, size) for limit in record.limits if limit.size == size
    ]


def _time(library: str, size: int) -> Callable[[Record], list[Outcome]]:
    """The median time of `library`, in microseconds."""

    def median(record: Record) -> list[Outcome]:
        row = record.row(library, size)
        return [Outcome(row.timing.median * 1e6, size)] if row and row.timing else []

    return median


def _python_over(library: str) -> Callable[[Record], list[Outcome]]:
    """Our time over that of `library`, called from Python too."""
    peer = _ratio(library, KI, KI)
    return lambda record: [Outcome(1 / outcome.value, KI) for outcome in peer(record)]


_TWO, _FOUR, _SMALL = "all_reduce_2_ranks_float32", "all_reduce_4_ranks_float32", "small_messages"
_END = 64 * MI
_OPEN_MPI = (("openmpi", "Open MPI"), ("openmpi-nocma", "Open MPI without CMA"))

TARGETS = (
    Target("2 ranks, over Gloo, to 64 Ki", _TWO, NEAR, _ratio("gloo", KI, 64 * KI), 50),
    Target("2 ranks, over Gloo, to 1 Mi", _TWO, NEAR, _ratio("gloo", 64 * KI + 1, MI), 10),
    Target("2 ranks, over Gloo, above 1 Mi", _TWO, NEAR, _ratio("gloo", MI + 1, _END), 6),
    *(
        Target(
            f"2 ranks, {dtype}, over Gloo, above 1 Mi",
            f"all_reduce_2_ranks_{dtype}",
            NEAR,
            _ratio("gloo", MI + 1, _END),
            8,
        )
        for dtype in ("bfloat16", "float16")
    ),
    Target("2 ranks, over MPICH", _TWO, NEAR, _ratio("mpich", KI, _END), 2),
    *(
        Target(f"2 ranks, over {name}, from 4 Ki", _TWO, NEAR, _ratio(library, 4 * KI, _END), 1.5)
        for library, name in _OPEN_MPI
    ),
    Target("2 ranks, over Gloo, 64 Mi", _TWO, FAR, _ratio("gloo", _END, _END), 3.5),
    Target("2 ranks, over MPICH", _TWO, FAR, _ratio("mpich", KI, _END), 1),
    *(
        Target(f"2 ranks, over {name}", _TWO, FAR, _ratio(library, KI, _END), 1)
        for library, name in _OPEN_MPI
    ),
    Target("2 ranks, 64 Mi, share of the limit", _TWO, NEAR, _share(_END), 70, unit=" %"),
    Target("native call, 1 Ki", _SMALL, NEAR, _time("native", KI), 0.5, most=True, unit=" us"),
    *(
        Target(f"Python over mpi4py, {name}, 1 Ki", _SMALL, "", _python_over(peer), 0.7, most=True)
        for peer, name in _OPEN_MPI
    ),
    Target("dist.all_reduce, 4 floats", _SMALL, "", _time("torch", 16), 7, most=True, unit=" us"),
    Target("4 ranks, over Gloo", _FOUR, "", _ratio("gloo", KI, _END), 6),
    Target("4 ranks, over MPICH", _FOUR, "", _ratio("mpich", KI, _END), 1),
    *(
        Target(f"4 ranks, over {name}", _FOUR, "", _ratio(library, KI, _END), 1)
        for library, name in _OPEN_MPI
    ),
)


def _within(record: Record, phase: str) -> Record:
    """What was measured while the machine was in this phase."""
    latency = {limit.size: limit.latency for limit in record.limits}

    def was_then(of: Row | Limit) -> bool:
        # Files from before say no phase, only the median latency of each size.
        return phase in ("", of.phase or phase_of(latency.get(of.size, 0.0)))

    return replace(
        record,
        limits=list(filter(was_then, record.limits)),
        rows=list(filter(was_then, record.rows)),
    )


def table(records: dict[str, Record]) -> Iterator[str]:
    """A line a target: bound, what was measured (at its worst size), met or missed."""
    yield f"{'target (float32 unless said)':54}{'bound':>11}{'measured':>11}  at    verdict"
    for target in TARGETS:
        if target.stem in records:
            yield _line(target, records[target.stem])


def _line(target: Target, record: Record) -> str:
    what = f"{target.what}{f' ({target.phase})' if target.phase else ''}"
    bound = f"{'<=' if target.most else '>='} {target.bound:g}{target.unit}"
    start = f"{what:54}{bound:>11}"
    outcomes = target.measure(_within(record, target.phase))
    if not outcomes:
        return f"{start}{'-':>11}  -     not measured"
    worst = target.worst(outcomes)
    verdict = "met" if target.met(worst) else "MISSED"
    measured_at, sizes = (
        len({outcome.size for outcome in each}) for each in (outcomes, target.measure(record))
    )
    if measured_at < sizes:
        verdict += f", {measured_at} of {sizes} sizes"
    measured = f"{worst.value:.2f}{target.unit}"
    return f"{start}{measured:>11}  {format_size(worst.size):6}{verdict}"


def main() -> None:
    """Answer, write, print the targets; status 1 where elements of ours are wrong."""
    parser = argparse.ArgumentParser(description="benchmarks, then a table of the targets")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.names) - set(QUESTIONS):
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    started = time.monotonic()
    records: dict[str, Record] = {}
    if options.table:
        files = {target.stem: options.out / f"{target.stem}.json" for target in TARGETS}
        records = {stem: read_json(path) for stem, path in files.items() if path.exists()}
        print("\n".join(table(records)))
        return
    for name in options.names or QUESTIONS:
        records.update(answer(QUESTIONS[name], options.out, options.quick))
    print("", *table(records), sep="\n")
    print(f"\n{len(records)} runs in {time.monotonic() - started:.0f} s; see {options.out}")
    end_if_wrong(records)


if __name__ == "__main__":
    main()
