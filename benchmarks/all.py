"""Every question, then a table of the targets: `make bench`.

Usage: python -m benchmarks.all [--out DIR] [--quick]
"""

from __future__ import annotations

import time

from benchmarks import (
    all_reduce_2_ranks,
    all_reduce_4_ranks,
    other_collectives,
    small_messages,
    targets,
)
from benchmarks.question import answer, end_if_wrong, parse_arguments
from pycollective.bench.record import Record

QUESTIONS = (
    all_reduce_2_ranks.QUESTION,
    all_reduce_4_ranks.QUESTION,
    small_messages.QUESTION,
    other_collectives.QUESTION,
)


def main() -> None:
    """Answer all, write all, print the targets; status 1 where elements of ours are wrong."""
    arguments = parse_arguments("every benchmark, then a table of the targets")
    started = time.monotonic()
    records: dict[str, Record] = {}
    for question in QUESTIONS:
        records.update(answer(question, arguments.out, arguments.quick))
    print()
    for line in targets.table(records):
        print(line)
    print(f"\n{len(records)} runs in {time.monotonic() - started:.0f} s; see {arguments.out}")
    end_if_wrong(records)


if __name__ == "__main__":
    main()
