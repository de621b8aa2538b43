"""A run on the console: the table as it grows, and a line that says what is being done."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.bench import measurement, table
from pycollective.bench.record import Record
from pycollective.bench.settings import Settings


def run(settings: Settings) -> Record:
    """Measure, printing the table as it grows and, on a terminal, what is being done."""
    with progress_line() as progress:
        records = measurement.measure(settings, progress)
        record = next(records)
        _print(table.header(record), progress)
        for record in records:
            _print(table.rows(record, record.rows[-1].size), progress)
        _print(table.footer(record), progress)
    return record


def _print(lines: Iterator[str], progress: measurement.Progress) -> None:
    progress("")
    for line in lines:
        print(line)
    sys.stdout.flush()


@contextmanager
def progress_line() -> Iterator[measurement.Progress]:
    """A line on the terminal's last row that is overwritten; nothing where stderr is no terminal.

    An empty one clears it, which is for whoever prints something else meanwhile.

    No thread refreshes it: it would run on a core that is being measured.
    """
    if not sys.stderr.isatty():
        yield lambda line: None
        return

    shown = False

    def show(line: str) -> None:
        nonlocal shown
        if line or shown:  # not what another rank shows
            columns = shutil.get_terminal_size().columns  # a longer line could not be overwritten
            sys.stderr.write(f"\r\x1b[K{line[: columns - 1]}")
            sys.stderr.flush()
        shown = bool(line)

    try:
        yield show
    finally:
        show("")
