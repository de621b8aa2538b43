"""What the project has set itself to reach, and whether it does.

A ratio is a peer's time over ours, at the size where it is worst.

Usage: python -m benchmarks.targets [DIR]    the table again, from result files
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.question import KI, MI
from pycollective.bench.limits import regime_of
from pycollective.bench.record import Record, read_json
from pycollective.bench.sizes import format_size


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
        regime: "near" or "split" where the target is of one kind of machine; "" for both. It is
            told for each size, since virtual cores move in the course of a run.
        measure: finds the value in that record; None where the record lacks it.
        bound: what it must reach, or, where `most` is True, not exceed.
        unit: printed after numbers.
    """

    what: str
    stem: str
    regime: str
    measure: Callable[[Record], Outcome | None]
    bound: float
    most: bool = False
    unit: str = "x"

    def met(self, outcome: Outcome) -> bool:
        """Whether that is good enough."""
        return outcome.value <= self.bound if self.most else outcome.value >= self.bound


def _ratio(library: str, smallest: int, largest: int) -> Callable[[Record], Outcome | None]:
    """The worst ratio of `library`, from `smallest` to `largest` bytes."""

    def worst(record: Record) -> Outcome | None:
        outcomes = [
            Outcome(row.ratio, row.size)
            for row in record.rows
            if row.library == library and row.ratio and smallest <= row.size <= largest
        ]
        return min(outcomes, key=lambda outcome: outcome.value, default=None)

    return worst


def _share(size: int) -> Callable[[Record], Outcome | None]:
    """Our share of the limit, in per cent."""
    return lambda record: next(
        (Outcome(100 * limit.share, size) for limit in record.limits if limit.size == size), None
    )


def _time(library: str, size: int) -> Callable[[Record], Outcome | None]:
    """The median time of `library`, in microseconds."""

    def median(record: Record) -> Outcome | None:
        row = record.row(library, size)
        return Outcome(row.timing.median * 1e6, size) if row and row.timing else None

    return median


def _python_over_openmpi(record: Record) -> Outcome | None:
    row = record.row("openmpi", KI)
    return Outcome(1 / row.ratio, KI) if row and row.ratio else None


_TWO, _FOUR, _SMALL = "all_reduce_2_ranks_float32", "all_reduce_4_ranks_float32", "small_messages"
_END = 64 * MI

TARGETS = (
    Target("2 ranks, over Gloo, to 64 Ki", _TWO, "near", _ratio("gloo", KI, 64 * KI), 50),
    Target("2 ranks, over Gloo, to 1 Mi", _TWO, "near", _ratio("gloo", 64 * KI + 1, MI), 10),
    Target("2 ranks, over Gloo, above 1 Mi", _TWO, "near", _ratio("gloo", MI + 1, _END), 6),
    *(
        Target(
            f"2 ranks, {dtype}, over Gloo, above 1 Mi",
            f"all_reduce_2_ranks_{dtype}",
            "near",
            _ratio("gloo", MI + 1, _END),
            8,
        )
        for dtype in ("bfloat16", "float16")
    ),
    Target("2 ranks, over MPICH", _TWO, "near", _ratio("mpich", KI, _END), 2),
    Target("2 ranks, over Open MPI, from 4 Ki", _TWO, "near", _ratio("openmpi", 4 * KI, _END), 1.5),
    Target("2 ranks, over Gloo, 64 Mi", _TWO, "split", _ratio("gloo", _END, _END), 3.5),
    Target("2 ranks, over MPICH", _TWO, "split", _ratio("mpich", KI, _END), 1),
    Target("2 ranks, over Open MPI", _TWO, "split", _ratio("openmpi", KI, _END), 1),
    Target("2 ranks, 64 Mi, share of the limit", _TWO, "near", _share(_END), 70, unit=" %"),
    Target("native call, 1 Ki", _SMALL, "near", _time("native", KI), 0.5, most=True, unit=" us"),
    Target("Python call over mpi4py's, 1 Ki", _SMALL, "", _python_over_openmpi, 0.7, most=True),
    Target("dist.all_reduce, 4 floats", _SMALL, "", _time("torch", 16), 7, most=True, unit=" us"),
    Target("4 ranks, over Gloo", _FOUR, "", _ratio("gloo", KI, _END), 6),
    Target("4 ranks, over MPICH", _FOUR, "", _ratio("mpich", KI, _END), 1),
    Target("4 ranks, over Open MPI", _FOUR, "", _ratio("openmpi", KI, _END), 1),
)


def _within(record: Record, regime: str) -> Record:
    """What was measured while the machine was of this regime."""
    limits = [limit for limit in record.limits if regime in ("", regime_of(limit.latency))]
    sizes = {limit.size for limit in limits}
    return replace(record, limits=limits, rows=[row for row in record.rows if row.size in sizes])


def table(records: dict[str, Record]) -> Iterator[str]:
    """A line a target: bound, what was measured (at its worst size), met or missed."""
    yield f"{'target (float32 unless said)':48}{'bound':>12}{'measured':>12}  at    verdict"
    for target in TARGETS:
        record = records.get(target.stem)
        if record is None:
            continue
        what = f"{target.what}{f' ({target.regime})' if target.regime else ''}"
        bound = f"{'<=' if target.most else '>='} {target.bound:g}{target.unit}"
        outcome = target.measure(_within(record, target.regime))
        if outcome is None:
            yield f"{what:48}{bound:>12}{'-':>12}  -     not measured"
            continue
        measured = f"{outcome.value:.2f}{target.unit}"
        verdict = "met" if target.met(outcome) else "MISSED"
        at = format_size(outcome.size)
        yield f"{what:48}{bound:>12}{measured:>12}  {at:6}{verdict}"


def main() -> None:
    """Print the table of the results in a folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    stems = sorted({target.stem for target in TARGETS})
    files = {stem: folder / f"{stem}.json" for stem in stems}
    records = {stem: read_json(path) for stem, path in files.items() if path.exists()}
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
