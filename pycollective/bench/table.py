"""A run on the console, and its record in nccl-tests' columns: a line for each size and library.

All libraries work in place, and in all-to-all out of place, so there is one group of `time algbw
busbw #wrong`, where nccl-tests has two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pycollective import cores
from pycollective.bench import measurement
from pycollective.bench.operations import find_operation
from pycollective.bench.phase import PHASES
from pycollective.bench.record import Limit, Record, Row
from pycollective.bench.settings import Settings


def run(
    settings: Settings,
    progress: measurement.Progress = lambda line: None,
    verbose: bool = False,
) -> Record:
    """Measure, print the table as it grows, and say to `progress` what is being done.

    Args:
        settings: what to measure.
        progress: called with what is being done.
        verbose: print every phase's rows and the machine's limit, too.
    """
    records = measurement.measure(settings, progress)
    record = next(records)
    _print(header(record, verbose), progress)
    for record in records:
        _print(rows(record, record.rows[-1].size, verbose), progress)
    _print(footer(record), progress)
    return record


def _print(lines: Iterator[str], progress: measurement.Progress) -> None:
    progress("")
    for line in lines:
        print(line)
    sys.stdout.flush()


def header(record: Record, verbose: bool = False) -> Iterator[str]:
    """Yield what was measured, where, and what the columns mean."""
    settings, machine = record.settings, record.machine
    rounds = f"{settings['rounds']} rounds"
    hosts = _hosts(record)
    where = f" on {hosts} simulated hosts, {settings['wire']} between them" if hosts > 1 else ""
    yield (
        f"# pycollective bench {settings['operation']}: {settings['ranks']} ranks{where}, {rounds}"
    )
    caches = " ".join(f"{name} {size}" for name, size in machine["caches"].items())
    yield f"# machine: {machine['cpu']}, {machine['cores']} cores, {caches}, {machine['simd']}"
    if pinned := machine.get("pinned"):  # older files have none of these
        to = ", ".join(map(str, pinned))
        yield f"# pinned: rank by rank, the thread that calls, to cores {to}"
        if said := cores.shared_by(len(pinned), len(set(pinned))):
            yield f"# {said}"
    if said := cores.busy(machine.get("used_by_others", 0.0), machine["cores"]):
        yield f"# busy: {said}; times are shorter on an idle machine"
    if machine["phase"] != "single":
        yield (
            f"# core to core: {machine['phase']}, {machine['latency'] * 1e9:.0f} ns one way, "
            f"{machine['copy_rate'] / 1e9:.1f} GB/s copied by each of two"
        )
    gpus = record.libraries["pycollective"]["versions"].get("gpus")
    if gpus:
        yield f"# arrays in GPU memory: rank r on the GPU r modulo their number, of {gpus}"
    for name, library in record.libraries.items():
        version = library["versions"].get("library", "")
        yield f"# {name}: {library['what']} ({version}; {library['settings']})"
    placed = "out of place" if settings["operation"] == "all_to_all" else "in place"
    yield (
        f"# time: the slowest rank's, median over rounds; {placed}, inputs restored between blocks"
    )
    yield "# phase: near, cores share a cache, or far; measured before and after each turn"
    if not verbose:
        limit = "" if gpus else " and the limit"
        yield f"#   where both were seen, rows are near; --verbose adds far{limit}"
    if gpus:
        yield "#   by the host's clock, around calls and the end of their stream"
    yield (
        "# #wrong: elements over all ranks whose bits differ from the contract's one order and one "
        "rounding;"
    )
    yield "#   a peer promises neither, so there it counts how it differs, not mistakes"
    slower = "; limit: slower of streaming in place and copying" if verbose and not gpus else ""
    yield f"# ratio: time over pycollective's{slower}"
    if hosts > 1:
        yield "# sent: bytes a call that all ranks together sent to other hosts; raw: unpacked"
        yield "#   these inputs are made to show the order of additions, and pack badly"
    yield "#"
    titles = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "ratio")
    units = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "")
    yield "#" + _columns(*titles)[1:] + _between(record, "sent", "raw") + "  phase   library"
    yield ("#" + _columns(*units)[1:] + _between(record, "(B)", "(B)")).rstrip()


def rows(record: Record, size: int, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of one size: every library; if `verbose` in each phase, then the limit."""
    of_size = [row for row in record.rows if row.size == size]
    for row in of_size:
        if verbose or row.phase == of_size[0].phase:
            yield _row(record, row)
    for limit in record.limits:
        if verbose and limit.size == size:
            yield _limit(record, limit)


def footer(record: Record) -> Iterator[str]:
    """Yield nccl-tests' closing lines, for this library's rows."""
    own = [row for row in record.rows if row.library == "pycollective"]
    verdict = "OK" if record.wrong == 0 else "FAILED"
    if record.settings["checks"] == 0:
        verdict = "not checked"
    yield f"# Out of bounds values : {record.wrong} {verdict}"
    for phase in dict.fromkeys(row.phase for row in own):
        busbw = [row.busbw for row in own if row.busbw is not None and row.phase == phase]
        within = f" ({phase})" if phase else ""
        yield f"# Avg bus bandwidth    : {sum(busbw) / len(busbw):.6g}{within}"
    if record.phases:
        yield _phases(record.phases)


def _phases(counts: dict[str, int]) -> str:
    """Return the line about the phases that turns were in."""
    seen = [f"{counts[phase]} {phase}" for phase in PHASES if counts[phase]]
    many = "one phase seen" if len(seen) == 1 else "phases seen"
    return (
        f"# {many}, in turns  : {', '.join(seen)}; {counts['repeated']} repeated, "
        f"{counts['dropped']} dropped"
    )


def _row(record: Record, row: Row) -> str:
    dtype = record.libraries.get(row.library, {}).get("dtype", record.settings["dtype"])
    start = _start(record, row.size, row.count, dtype)
    if row.timing is None or row.algbw is None or row.busbw is None or row.ratio is None:
        none = _columns(*start, *["n/a"] * 5) + _between(record, "n/a", "n/a")
        return f"{none}  {row.phase:6}  {row.library}: {row.note}"
    wrong = "n/a" if row.wrong is None else str(row.wrong)
    return (
        _columns(
            *start,
            _time(row.timing.median),
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            wrong,
            f"{row.ratio:.2f}",
        )
        + _between(record, *(_bytes(each) for each in (row.sent, row.sent_raw)))
        + f"  {row.phase:6}  {row.library}"
    )


def _limit(record: Record, limit: Limit) -> str:
    operation = find_operation(record.settings["operation"])
    ranks = record.settings["ranks"]
    count = next(row.count for row in record.rows if row.size == limit.size)
    start = _start(record, limit.size, count, record.settings["dtype"])
    algbw = limit.size / 1e9 / limit.seconds
    return (
        _columns(
            *start,
            _time(limit.seconds),
            f"{algbw:.2f}",
            f"{algbw * operation.bus_factor(ranks):.2f}",
            "",
            f"{limit.share:.2f}",
        )
        + _between(record, "", "")
        + f"  {limit.phase:6}  limit (stream {_time(limit.stream)}, copy {_time(limit.copy)} us)"
    )


def _start(record: Record, size: int, count: int, dtype: str) -> tuple[str, str, str, str, str]:
    settings = record.settings
    operation = find_operation(settings["operation"])
    return (
        str(size),
        str(count),
        dtype,
        settings["reduce_op"] if operation.reduces else "none",
        str(settings["root"] if operation.rooted else -1),
    )


def _hosts(record: Record) -> int:
    return int(record.settings.get("hosts", 1))  # older files have none


def _between(record: Record, sent: str, raw: str) -> str:
    """Return the columns that only several hosts have."""
    return f"{sent:>13}{raw:>13}" if _hosts(record) > 1 else ""


def _bytes(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.0f}"


def _time(seconds: float) -> str:
    """Return microseconds, with as many digits as mean something."""
    microseconds = seconds * 1e6
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"


def _columns(*texts: str) -> str:
    widths = (12, 13, 14, 7, 7, 9, 8, 8, 9, 8)
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
