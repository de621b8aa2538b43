"""A run on the console: the table as it grows, and a line that says what is being done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.bench import measurement, table
from pycollective.bench.record import Record
from pycollective.bench.settings import Settings


def run(settings: Settings) -> Record:
    """Measure, printing the table as it grows and, on a terminal, what is being done."""
    with _progress_line() as progress:
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
def _progress_line() -> Iterator[measurement.Progress]:
    """A line on the terminal's last row that is overwritten; nothing where stderr is no terminal.

    No thread refreshes it: it would run on a core that is being measured.
    """
    if not sys.stderr.isatty():
        yield lambda line: None
        return

    def show(line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        show("")
