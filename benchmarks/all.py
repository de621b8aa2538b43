"""Every question about the collectives on one host, then a table of the targets: `make bench`.

A question is one or more runs of `pycollective bench`. A target is what the project has set itself
to reach. A ratio is a peer's time over ours; a target looks at the size and the peer where it is
worst, or at the geometric mean over sizes, at the peer where that is worst. Open MPI is judged as
it comes, and without cross-memory attach (CMA): each is the faster one on some sizes.

Usage: python -m benchmarks.all [NAME ...] [--out DIR] [--quick]    some of `QUESTIONS`, else all
       python -m benchmarks.all --table [--out DIR]    the table again, from the files
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.mpi_environments import ensure_all
from pycollective.bench.libraries import Library, find_peers
from pycollective.bench.phase import FAR, MIXED, NEAR
from pycollective.bench.plot import plot
from pycollective.bench.record import Record, Row, read_json, write_json
from pycollective.bench.settings import Settings, format_size, ladder
from pycollective.bench.table import run
from pycollective.cli.common import progress_line

KI, MI = 1 << 10, 1 << 20
END = 64 * MI
MPIS = ("mpich", "openmpi", "openmpi-nocma", "impi")
PEERS = tuple(find_peers(",".join(("gloo", *MPIS))))
MOVING = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")
ROUNDS = 5


@dataclass(frozen=True)
class Question:
    """What is asked, and the runs that answer it, by the stem of the result's file."""

    text: str
    runs: dict[str, Settings]


def _beside_peers(operation: str, ranks: int, factor: int, *more: Library) -> dict[str, Settings]:
    sizes = tuple(ladder(KI, END, 0, factor))
    peers = (*PEERS, *find_peers("shared"), *more)
    settings = Settings(operation, sizes, ranks=ranks, peers=peers, rounds=ROUNDS)
    return {f"{operation}_{ranks}_ranks": settings}


QUESTIONS = {
    "all_reduce": Question(
        "all-reduce, 2 ranks: how fast beside Gloo and each MPI, how near to the limit, and do "
        "bf16 and fp16 take as long for the same bytes?",
        _beside_peers("all_reduce", 2, 2, *find_peers("bfloat16,float16")),
    ),
    "bfloat16": Question(
        "all-reduce of bf16, 2 ranks: how fast beside those who have it?",
        {
            "all_reduce_2_ranks_bfloat16": Settings(
                *("all_reduce", (MI, END), 2, "bfloat16"),
                peers=tuple(find_peers("gloo,mpich")),
                rounds=ROUNDS,
            )
        },
    ),
    "small_messages": Question(
        "small all-reduces, 2 ranks: what does a call cost in C++, from Python, through torch?",
        {
            "small_messages": Settings(
                "all_reduce",
                (16, KI, 16 * KI),
                ranks=2,
                peers=(*find_peers("native,torch,fake"), *PEERS),
                rounds=11,
            )
        },
    ),
    "reduce_scatter": Question(
        "reduce-scatter, 2 ranks: how fast beside Gloo and each MPI?",
        _beside_peers("reduce_scatter", 2, 4),
    ),
    **{
        f"{operation}_4_ranks": Question(
            f"{operation}, 4 ranks: what if there are more ranks than cores?",
            _beside_peers(operation, 4, 16),
        )
        for operation in ("all_reduce", "reduce_scatter")
    },
    **{
        operation: Question(
            f"{operation}, 2 ranks: how fast beside Gloo and each MPI?",
            _beside_peers(operation, 2, 4),
        )
        for operation in MOVING
    },
}


def answer(question: Question, out: Path, quick: bool) -> dict[str, Record]:
    """Run, print, and write a JSON file and a plot a run; `quick` only shows that all works."""
    environments = ensure_all()
    out.mkdir(parents=True, exist_ok=True)
    records = {}
    print(f"\n== {question.text}", flush=True)
    for stem, settings in question.runs.items():
        settings = replace(settings, mpi_environments=environments)
        started = time.monotonic()
        with progress_line() as progress:
            record = run(_shortened(settings) if quick else settings, progress)
        print(f"# {stem}: {time.monotonic() - started:.0f} s", flush=True)
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
    """One measured value: at which sizes, and of which peer or type."""

    value: float
    sizes: tuple[int, ...]
    of: str = ""

    def __str__(self) -> str:
        size = format_size(self.sizes[0]) if len(self.sizes) == 1 else ""
        return f"{self.of} {size}".strip()


Records = Mapping[str, Record]
Measure = Callable[[Records, "Target"], list[Outcome]]


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        what: in words.
        stem: of the record that shows it.
        phase: NEAR or FAR where the target is of one phase of the machine; "" for all. Virtual
            cores move in the course of a run: then a verdict is of some of the sizes, and says of
            how many.
        measure: finds the values.
        bound: what each must reach, or, where `most` is True, not exceed.
        smallest, largest: of the sizes, in bytes.
        unit: printed after numbers.
    """

    what: str
    stem: str
    phase: str
    measure: Measure
    bound: float
    smallest: int = KI
    largest: int = END
    most: bool = False
    unit: str = "x"

    def worst(self, outcomes: list[Outcome]) -> Outcome:
        """The least good of them."""
        return (max if self.most else min)(outcomes, key=lambda outcome: outcome.value)

    def met(self, outcome: Outcome) -> bool:
        """Whether that is good enough."""
        return outcome.value <= self.bound if self.most else outcome.value >= self.bound

    def rows(self, record: Record, *libraries: str) -> list[Row]:
        """Return what was measured of these libraries at its sizes, in its phase."""
        return [
            row
            for row in record.rows
            if row.library in libraries and self.smallest <= row.size <= self.largest
            if row.phase == self.phase or (not self.phase and row.phase != MIXED)
        ]

    def medians(
        self, record: Record, library: str = "pycollective"
    ) -> dict[tuple[int, str], float]:
        """Return the median seconds of a library, by size and phase."""
        return {
            (row.size, row.phase): row.timing.median
            for row in self.rows(record, library)
            if row.timing
        }


def _ratios(*peers: str) -> Measure:
    """The ratio of each of these peers at each size."""
    return lambda records, target: [
        Outcome(row.ratio, (row.size,), row.library)
        for row in target.rows(records[target.stem], *peers)
        if row.ratio
    ]


def _ratios_of_shared(*peers: str) -> Measure:
    """The ratio of each of these peers' times to ours with arrays of `Communicator.empty`."""

    def ratios(records: Records, target: Target) -> list[Outcome]:
        record = records[target.stem]
        shared = {(row.size, row.phase): row.ratio for row in target.rows(record, "shared")}
        return [
            Outcome(row.ratio / of_ours, (row.size,), row.library)
            for row in target.rows(record, *peers)
            if row.ratio and (of_ours := shared.get((row.size, row.phase)))
        ]

    return ratios


def _means(*peers: str) -> Measure:
    """The geometric mean of each of these peers' ratios over all sizes."""

    def means(records: Records, target: Target) -> list[Outcome]:
        ratios = _ratios(*peers)(records, target)
        of_peers = ([each for each in ratios if each.of == peer] for peer in peers)
        return [
            Outcome(
                statistics.geometric_mean(each.value for each in found),
                tuple(each.sizes[0] for each in found),
                found[0].of,
            )
            for found in of_peers
            if found
        ]

    return means


def _shares(records: Records, target: Target) -> list[Outcome]:
    """Our share of the limit, in per cent."""
    return [
        Outcome(100 * limit.share, (limit.size,))
        for limit in records[target.stem].limits
        if target.smallest <= limit.size <= target.largest and limit.phase == target.phase
    ]


def _microseconds(records: Records, target: Target) -> list[Outcome]:
    """The median time of a call from Python."""
    medians = target.medians(records[target.stem])
    return [Outcome(median * 1e6, (size,)) for (size, _), median in medians.items()]


def _over_fake(records: Records, target: Target) -> list[Outcome]:
    """What the call through torch takes longer than over a backend that does nothing, in us."""
    ours, fake = (target.medians(records[target.stem], library) for library in ("torch", "fake"))
    return [Outcome((ours[then] - fake[then]) * 1e6, then[:1]) for then in ours if then in fake]


def _over_near(records: Records, target: Target) -> list[Outcome]:
    """Our time in its phase over that in near."""
    record = records[target.stem]
    here, near = target.medians(record), replace(target, phase=NEAR).medians(record)
    return [
        Outcome(median / near[size, NEAR], (size,))
        for (size, _), median in here.items()
        if (size, NEAR) in near
    ]


def _of_reductions() -> Iterator[Target]:
    others = tuple(peer.name for peer in PEERS if peer.name != "impi")
    for operation in ("all_reduce", "reduce_scatter"):
        for ranks in (2, 4):
            start, stem = f"{operation}, {ranks} ranks, ", f"{operation}_{ranks}_ranks"
            yield Target(f"{start}mean over each but Intel MPI", stem, NEAR, _means(*others), 3)
            yield Target(f"{start}mean over Intel MPI", stem, NEAR, _means("impi"), 2)
            yield Target(f"{start}each peer", stem, NEAR, _ratios(*others, "impi"), 1.1)


def _of_moving() -> Iterator[Target]:
    each = tuple(peer.name for peer in PEERS)
    for operation in MOVING:
        stem = f"{operation}_2_ranks"
        yield Target(f"{operation}, mean over each peer", stem, NEAR, _means(*each), 1.5)
        yield Target(
            f"{operation}, each peer, below 4 Mi", stem, NEAR, _ratios(*each), 1, largest=4 * MI - 1
        )
        for what, measure, bound in (
            ("from 4 Mi", _ratios(*each), 0.95),
            ("from 4 Mi, comm.empty", _ratios_of_shared(*each), 1.2),
        ):
            what = f"{operation}, each peer, {what}"
            yield Target(what, stem, NEAR, measure, bound, smallest=4 * MI)


_ALL, _SMALL = "all_reduce_2_ranks", "small_messages"

TARGETS = (
    *_of_reductions(),
    *_of_moving(),
    *(
        Target(
            f"all_reduce, share of the limit, {sizes}",
            *(_ALL, NEAR, _shares, bound, smallest, largest),
            unit=" %",
        )
        for sizes, bound, smallest, largest in (
            ("256 Ki to 4 Mi", 60, 256 * KI, 4 * MI),
            ("16 Mi", 70, 16 * MI, 16 * MI),
            ("64 Mi", 85, END, END),
        )
    ),
    Target("all_reduce, time over near, to 256 Ki", _ALL, FAR, _over_near, 2, KI, 256 * KI, True),
    Target("all_reduce, time over near", _ALL, FAR, _over_near, 3, most=True),
    Target("all_reduce, each MPI", _ALL, FAR, _ratios(*MPIS), 1),
    Target(
        "all_reduce, time over fp32's", _ALL, "", _ratios("bfloat16", "float16"), 1.1, most=True
    ),
    Target("Python call, 1 Ki", _SMALL, NEAR, _microseconds, 0.4, KI, KI, True, " us"),
    Target("dist.all_reduce over fake, 4 floats", _SMALL, "", _over_fake, 2, 16, 16, True, " us"),
)


def verdict(target: Target, records: Records) -> tuple[str, str, str, str, str, str]:
    """Return target, phase, bound, what was measured, where it is worst, and met or missed."""
    bound = f"{'<=' if target.most else '>='} {target.bound:g}{target.unit}"
    start = target.what, target.phase, bound
    outcomes = target.measure(records, target)
    if not outcomes:
        return (*start, "-", "-", "not measured")
    worst = target.worst(outcomes)
    said = "met" if target.met(worst) else f"MISSED by {abs(1 - worst.value / target.bound):.0%}"
    seen = {size for outcome in outcomes for size in outcome.sizes}
    sizes = {
        row.size
        for row in records[target.stem].rows
        if target.smallest <= row.size <= target.largest
    }
    if len(seen) < len(sizes):
        said += f", {len(seen)} of {len(sizes)} sizes"
    return (*start, f"{worst.value:.2f}{target.unit}", str(worst), said)


def table(records: Records) -> Iterator[str]:
    """A line a target whose record is there."""
    known = [verdict(target, records) for target in TARGETS if target.stem in records]
    head = ("target (float32, 2 ranks unless said)", "phase", "bound", "measured", "at", "")
    for what, phase, bound, measured, at, said in (head, *known):
        yield f"{what:54}{phase:5}{bound:>9}{measured:>10}  {at:20}{said}".rstrip()


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
        stems = [stem for question in QUESTIONS.values() for stem in question.runs]
        files = {stem: options.out / f"{stem}.json" for stem in stems}
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
