"""What does a call cost by where the ranks' arrays lie, ours and each MPI's?

Two ranks; their arrays begin so many bytes behind a page each, as `pycollective bench --offsets`
has it. Of each size the median over the pairs of offsets, and the worst pair, within a phase of the
machine. All libraries get the same arrays. Three minutes.

Usage: python -m benchmarks.addresses [--out DIR] [--rounds N]
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.mpi_environments import ensure_all
from pycollective.bench.libraries import find_peers
from pycollective.bench.measurement import measure as measured
from pycollective.bench.settings import Settings, format_size

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "all_to_all")
SIZES = (64 << 10, 1 << 20, 16 << 20)
# As NumPy's arrays, torch's and pages have them, and at a small or large distance of each other.
OFFSETS = (
    (16, 16),
    (64, 64),
    (0, 0),
    (16, 64),
    (64, 16),
    (16, 24),
    (24, 16),
    (16, 2064),
    (4, 4080),
)


def measure(run: Run) -> Record:
    """Each operation at each pair of offsets."""
    ensure_all()
    peers = tuple(find_peers("mpich,openmpi,impi"))
    rows: list[Record] = []
    machine: Record = {}
    for operation in OPERATIONS:
        seconds: dict[tuple[int, str, str], dict[str, float]] = defaultdict(dict)
        for offsets in OFFSETS:
            settings = Settings(
                operation, SIZES, peers=peers, offsets=offsets, rounds=run.rounds, checks=1
            )
            *_, record = measured(settings)
            if record.wrong:
                raise SystemExit(f"{operation}: {record.wrong} wrong elements at {offsets}")
            machine = machine or record.machine
            for row in record.rows:
                if row.timing is not None:
                    key = row.size, row.phase, row.library
                    seconds[key][", ".join(map(str, offsets))] = row.timing.median
        for (size, phase, library), times in sorted(seconds.items()):
            worst = max(times, key=lambda at: times[at])
            median = statistics.median(times.values())
            rows.append(
                {
                    "operation": operation,
                    "size": size,
                    "phase": phase,
                    "library": library,
                    "pairs": len(times),
                    "median": median,
                    "worst": times[worst],
                    "at": worst,
                }
            )
            print(
                f"{operation:10} {format_size(size):>4} {phase:5} {library:13} "
                f"{median * 1e6:8.1f} us; at worst {times[worst] * 1e6:8.1f}, "
                f"{times[worst] / median:5.2f} x, at {worst} ({len(times)} pairs)",
                flush=True,
            )
    return {"machine": machine, "rows": rows}


if __name__ == "__main__":
    Benchmark("addresses", __doc__, measure, rounds=3).main()
