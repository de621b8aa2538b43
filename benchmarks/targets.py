"""What the project has set itself to reach, and whether it does.

A ratio is a peer's time over ours, at the size where it is worst. Open MPI is judged as it comes,
and without cross-memory attach (CMA): each is the faster one on some sizes.

Usage: python -m benchmarks.targets [DIR]    the table again, from result files
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pycollective.bench.machine import regime_of
from pycollective.bench.record import Record, read_json
from pycollective.bench.settings import format_size

KI, MI = 1 << 10, 1 << 20


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
            told for each size, since virtual cores move in the course of a run: then a verdict is
            of some of the sizes, and says of how many.
        measure: finds the values in that record, one a size.
        bound: what it must reach, or, where `most` is True, not exceed.
        unit: printed after numbers.
    """

    what: str
    stem: str
    regime: str
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
    *(
        Target(f"2 ranks, over {name}, from 4 Ki", _TWO, "near", _ratio(library, 4 * KI, _END), 1.5)
        for library, name in _OPEN_MPI
    ),
    Target("2 ranks, over Gloo, 64 Mi", _TWO, "split", _ratio("gloo", _END, _END), 3.5),
    Target("2 ranks, over MPICH", _TWO, "split", _ratio("mpich", KI, _END), 1),
    *(
        Target(f"2 ranks, over {name}", _TWO, "split", _ratio(library, KI, _END), 1)
        for library, name in _OPEN_MPI
    ),
    Target("2 ranks, 64 Mi, share of the limit", _TWO, "near", _share(_END), 70, unit=" %"),
    Target("native call, 1 Ki", _SMALL, "near", _time("native", KI), 0.5, most=True, unit=" us"),
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


def _within(record: Record, regime: str) -> Record:
    """What was measured while the machine was of this regime."""
    limits = [limit for limit in record.limits if regime in ("", regime_of(limit.latency))]
    sizes = {limit.size for limit in limits}
    return replace(record, limits=limits, rows=[row for row in record.rows if row.size in sizes])


def table(records: dict[str, Record]) -> Iterator[str]:
    """A line a target: bound, what was measured (at its worst size), met or missed."""
    yield f"{'target (float32 unless said)':54}{'bound':>11}{'measured':>11}  at    verdict"
    for target in TARGETS:
        if target.stem in records:
            yield _line(target, records[target.stem])


def _line(target: Target, record: Record) -> str:
    what = f"{target.what}{f' ({target.regime})' if target.regime else ''}"
    bound = f"{'<=' if target.most else '>='} {target.bound:g}{target.unit}"
    start = f"{what:54}{bound:>11}"
    outcomes = target.measure(_within(record, target.regime))
    if not outcomes:
        return f"{start}{'-':>11}  -     not measured"
    worst = target.worst(outcomes)
    verdict = "met" if target.met(worst) else "MISSED"
    sizes = len(target.measure(record))
    if len(outcomes) < sizes:
        verdict += f", {len(outcomes)} of {sizes} sizes"
    measured = f"{worst.value:.2f}{target.unit}"
    return f"{start}{measured:>11}  {format_size(worst.size):6}{verdict}"


def main() -> None:
    """Print the table of the results in a folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    stems = sorted({target.stem for target in TARGETS})
    files = {stem: folder / f"{stem}.json" for stem in stems}
    records = {stem: read_json(path) for stem, path in files.items() if path.exists()}
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
