"""Writes the tables of README.md and docs/measured.md from the files of results/.

A table stands between `<!-- BEGIN its name -->` and `<!-- END its name -->`. What is there is
replaced, so that no number of them is written by hand.

Usage: python -m benchmarks.measured_tables [--check]    --check changes nothing, and ends with 1
where a table is not what the files say
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pycollective.bench.phase import FAR, NEAR, phase_of
from pycollective.bench.record import Record, read_json

KI, MI = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_TWO, _FOUR = "all_reduce_2_ranks", "all_reduce_4_ranks"
# Neither of its settings is the faster one everywhere.
_OPEN_MPI = ("openmpi", "openmpi-nocma")
_PHASES = {NEAR: "that share a cache", FAR: "that share no cache"}


def readme() -> str:
    """Five rows: small and large, both phases of the machine, one that is lost, two hosts."""
    rows = [
        _readme_row("All-reduce, 2 ranks, fp32, 16 KiB", f"{_TWO}_float32", 16 * KI),
        _readme_row("All-reduce, 2 ranks, fp32, 1 MiB", f"{_TWO}_float32", MI),
        _readme_row("All-reduce, 2 ranks, bf16, 64 MiB", f"{_TWO}_bfloat16", 64 * MI),
        _readme_row("All-gather, 2 ranks, fp32, 64 MiB", "all_gather_2_ranks", 64 * MI),
    ]
    record = _two_hosts()
    seconds = _row_of(record, "bfloat16", 16 * MI, "gradients")["seconds"]
    rows.append(
        (
            'All-reduce, 2 hosts of 2 ranks, bf16, 16 MiB of gradients, `wire="exact"`',
            _time(seconds["exact"]),
            _times(seconds["gloo"] / seconds["exact"]),
            *("", ""),
            f"{_machine(record['machine'])}; a link of {record['link']} decides, not the phase",
        )
    )
    head = ("", "pycollective", "Gloo", "MPICH", "Open MPI", "Machine and phase")
    return _table(head, rows)


def _readme_row(what: str, stem: str, size: int) -> tuple[str, ...]:
    record = _record(stem)
    latency = _latency(record, size)
    open_mpi = min(_OPEN_MPI, key=lambda library: _ratio(record, library, size) or 0)
    phase = f"{_PHASES[phase_of(latency)]} ({latency * 1e9:.0f} ns)"
    return (
        what,
        _own_time(record, size),
        *(_ratio_cell(record, library, size) for library in ("gloo", "mpich", open_mpi)),
        f"{_machine(record.machine)} {phase}",
    )


def all_reduce() -> str:
    """Sizes and types, beside every library."""
    libraries = ("gloo", "mpich", *_OPEN_MPI)
    head = ("Ranks, type", "Message", "pycollective", "Gloo", "MPICH", "Open MPI")
    rows = []
    for stem, what, sizes in (
        (f"{_TWO}_float32", "2, fp32", (KI, 16 * KI, 64 * KI, MI, 16 * MI, 64 * MI)),
        (f"{_TWO}_bfloat16", "2, bf16", (MI, 64 * MI)),
        (f"{_TWO}_float16", "2, fp16", (64 * MI,)),
        (f"{_FOUR}_float32", "4, fp32", (KI, MI, 16 * MI, 64 * MI)),
        (f"{_FOUR}_bfloat16", "4, bf16", (MI, 64 * MI)),
    ):
        record = _record(stem)
        for place, size in enumerate(sizes):
            rows.append(
                (
                    what if place == 0 else "",
                    _size(size),
                    _own_time(record, size),
                    *(_ratio_cell(record, library, size) for library in libraries),
                    f"{_latency(record, size) * 1e9:.0f} ns",
                )
            )
    return _table((*head, "Open MPI without CMA", "Core to core"), rows)


def two_hosts() -> str:
    """Over a slow link: raw, packed, and what the link alone takes for the raw bytes."""
    record = _two_hosts()
    rows = []
    for name, dtype, sizes in (
        ("fp32", "float32", (KI, MI, 16 * MI)),
        ("bf16", "bfloat16", (MI, 16 * MI)),
    ):
        for size in sizes:
            seconds = _row_of(record, dtype, size, "Gaussian")["seconds"]
            ways = (_time(seconds[way]) for way in ("raw", "exact", "gloo", "link"))
            rows.append((name, _size(size), *ways))
    head = ("Type", "Message", "raw", "packed", "Gloo", "The link alone, raw")
    return _table(head, rows)


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"measured": readme},
    "docs/measured.md": {"all-reduce": all_reduce, "two hosts": two_hosts},
}


def filled(document: str, text: str) -> str:
    """The text of a document with its tables as the files have them.

    Raises:
        SystemExit: the document has not exactly one place for each of them.
    """
    for name, make in TABLES[document].items():
        begin, end = f"<!-- BEGIN {name} -->\n", f"<!-- END {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{document} has not one place for the table {name!r}")
        above, _, rest = text.partition(begin)
        text = above + begin + make() + end + rest.partition(end)[2]
    return text


def _record(stem: str) -> Record:
    return read_json(RESULTS / f"{stem}.json")


def _two_hosts() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / "two_hosts.json").read_text())
    return record


def _row_of(record: Mapping[str, Any], dtype: str, size: int, data: str) -> Mapping[str, Any]:
    wanted = {"dtype": dtype, "size": size, "data": data}
    row: Mapping[str, Any] = next(row for row in record["rows"] if wanted.items() <= row.items())
    return row


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


def _latency(record: Record, size: int) -> float:
    row = record.row("pycollective", size)
    phase = row.phase if row else ""  # of two, that of the ratios
    return next(each.latency for each in record.limits if (each.size, each.phase) == (size, phase))


def _ratio(record: Record, library: str, size: int) -> float | None:
    row = record.row(library, size)
    return row.ratio if row else None


def _ratio_cell(record: Record, library: str, size: int) -> str:
    ratio = _ratio(record, library, size)
    if ratio is not None:
        return _times(ratio)
    return "no bf16" if record.settings["dtype"] == "bfloat16" else "not measured"


def _own_time(record: Record, size: int) -> str:
    row = record.row("pycollective", size)
    if row is None or row.timing is None or row.wrong:
        raise SystemExit(f"{size} bytes were not measured, or came out wrong")
    return _time(row.timing.median)


def _times(ratio: float) -> str:
    """Two digits, as 4,300 x, 57 x, 9.1 x, 0.74 x."""
    short = float(f"{ratio:.2g}")
    return f"{short:,.{0 if short >= 10 else 1 if short >= 1 else 2}f} x"


def _time(seconds: float) -> str:
    """Three digits, in microseconds or milliseconds."""
    unit, scaled = ("ms", seconds * 1e3) if seconds >= 1e-3 else ("µs", seconds * 1e6)
    return f"{scaled:#.3g}".rstrip(".") + f" {unit}"


def _size(size: int) -> str:
    return f"{size // MI} MiB" if size >= MI else f"{size // KI} KiB"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they differ")
    check = parser.parse_args().check
    stale = []
    for document in TABLES:
        path = ROOT / document
        before = path.read_text()
        after = filled(document, before)
        if after != before:
            stale.append(document)
            if not check:
                path.write_text(after)
    if check and stale:
        raise SystemExit(
            f"{', '.join(stale)}: tables are not what benchmarks/results says; "
            "python -m benchmarks.measured_tables writes them"
        )


if __name__ == "__main__":
    main()
