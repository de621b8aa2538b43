"""Are the schedules right at a size at which nobody can run them, and what does the proof cost?

Proves every algorithm on 1,000 and on 1,024 ranks, and those whose steps are logarithmic on 4,096,
shard by shard, on all cores. A fault ends the run, with the shard and the step that it is in.

Usage: python -m benchmarks.schedule_proofs [--processes N] [--out DIR] [--quick]
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.driver import Benchmark, Record, Run
from pycollective.schedule import ALGORITHMS, Schedule, Topology, algorithms_for, make_schedule
from pycollective.schedule.proof import Fault, Traffic, verify

SCHEMA = "pycollective-schedule-proofs/2"
MOST_MEMORY = 4 << 30
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
LOGARITHMIC = ("tree", "halving_doubling", "recursive_doubling", "hierarchical")
RANKS_A_HOST = 8
# Ranges of shards a process: few enough that their counts are merged in no time, enough of them
# that all processes end together.
RANGES = 16
BFLOAT16, FLOAT32 = 2, 4  # bytes
TITLES = (
    *("operation", "algorithm", "ranks", "shards", "seconds", "MiB"),
    *("steps", "messages", "bf16 bytes"),
)
WIDTHS = (15, 19, 5, 6, 7, 5, 5, 8, 10)


@dataclass(frozen=True)
class Case:
    """A schedule to prove."""

    operation: str
    algorithm: str
    ranks: int

    def schedule(self) -> Schedule:
        """On hosts of `RANKS_A_HOST` where hosts matter to the algorithm, else on one."""
        hosts = self.algorithm == "hierarchical"
        topology = Topology.of_hosts([hosts and r // RANKS_A_HOST for r in range(self.ranks)])
        return make_schedule(self.operation, self.algorithm, topology)


@dataclass(frozen=True)
class Proof:
    """A schedule that is right, what it sends, and what it took to show that.

    Attributes:
        operation, algorithm, topology, ranks, shards: of the schedule.
        seconds: from the start of the processes to their end.
        peak_memory: bytes; the sum of all processes' peaks.
        steps: of the schedule.
        messages: that a rank sends, the most of all ranks.
        bytes_sent: by a rank for each element of a bf16 buffer, the most of all ranks.
        mean_bytes_sent: the same, the mean of all ranks.
        adds: of a rank for each element of the buffer, the most of all ranks.
    """

    operation: str
    algorithm: str
    topology: str
    ranks: int
    shards: int
    seconds: float
    peak_memory: int
    steps: int
    messages: int
    bytes_sent: float
    mean_bytes_sent: float
    adds: float


def cases(quick: bool) -> Iterator[Case]:
    """What is proved, the quickest sizes first."""
    for ranks in (24, 64) if quick else (1000, 1024):
        for name in ALGORITHMS:
            yield from (Case(op, name, ranks) for op in OPERATIONS if name in algorithms_for(op))
    for name in LOGARITHMIC:
        many = 256 if quick else 4096
        yield from (Case(op, name, many) for op in OPERATIONS if name in algorithms_for(op))


def prove(case: Case, processes: int) -> Proof:
    """Prove a schedule, by ranges of its shards.

    Raises:
        Fault: it is wrong.
    """
    schedule = case.schedule()
    traffic = Traffic(case.ranks, schedule.shards)
    peaks: dict[int, int] = {}
    ranges = _ranges(schedule.shards, RANGES * processes)
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    # The collector would look through each shard's steps again and again, and find no cycle.
    with context.Pool(min(processes, len(ranges)), gc.disable) as pool:
        parts = pool.imap_unordered(_prove_range, [(case, shards) for shards in ranges])
        for done, (part, process, peak) in enumerate(parts, 1):
            traffic.merge(part)
            peaks[process] = peak
            _show_progress(case, done, len(ranges), time.monotonic() - started)
    sent = [traffic.bytes_sent(rank, BFLOAT16, FLOAT32) for rank in range(case.ranks)]
    return Proof(
        operation=case.operation,
        algorithm=case.algorithm,
        topology=str(schedule.topology),
        ranks=case.ranks,
        shards=schedule.shards,
        seconds=time.monotonic() - started,
        peak_memory=sum(peaks.values()) + _peak_memory(),
        steps=traffic.steps,
        messages=max(traffic.messages),
        bytes_sent=max(sent),
        mean_bytes_sent=sum(sent) / case.ranks,
        adds=max(traffic.adds) / schedule.shards,
    )


def _ranges(shards: int, most: int) -> list[range]:
    """Up to `most` ranges of nearly equal length that make up the shards."""
    count = min(shards, most)
    ends = [shards * i // count for i in range(count + 1)]
    return [range(lo, hi) for lo, hi in pairwise(ends)]


def _prove_range(task: tuple[Case, range]) -> tuple[Traffic, int, int]:
    case, shards = task
    return verify(case.schedule(), shards), os.getpid(), _peak_memory()


def _peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    kibibytes = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kibibytes.split()[1]) << 10


def _show_progress(case: Case, done: int, ranges: int, seconds: float) -> None:
    if sys.stderr.isatty():
        what = f"{case.operation} {case.algorithm} {case.ranks}"
        text = f"{what}: {done / ranges:.0%} in {seconds:.0f} s" if done < ranges else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _columns(*texts: str) -> str:
    first, rest = texts[:2], texts[2:]
    return "".join(
        [f"{text:<{width}}" for text, width in zip(first, WIDTHS, strict=False)]
        + [f" {text:>{width}}" for text, width in zip(rest, WIDTHS[2:], strict=True)]
    )


def _line(proof: Proof) -> str:
    return _columns(
        proof.operation,
        proof.algorithm,
        str(proof.ranks),
        str(proof.shards),
        f"{proof.seconds:.1f}",
        f"{proof.peak_memory / 2**20:.0f}",
        str(proof.steps),
        str(proof.messages),
        f"{proof.bytes_sent:.3f}",
    )


def measure(run: Run) -> Record:
    """Prove all, and print a line a schedule."""
    processes = int(run.options["processes"])
    if processes < 1:
        raise SystemExit("--processes must be at least 1")

    print(f"{processes} processes; messages and bytes (for each element of the buffer) are")
    print("those that the busiest rank sends; MiB is the sum of all processes' peaks\n")
    print(_columns(*TITLES), flush=True)
    started = time.monotonic()
    proofs = []
    for case in cases("quick" in run.flags):
        try:
            proof = prove(case, processes)
        except Fault as fault:
            sys.exit(f"not a right schedule: {fault}")
        proofs.append(proof)
        print(_line(proof), flush=True)
        if proof.peak_memory > MOST_MEMORY:
            sys.exit(f"{proof.peak_memory / 2**30:.1f} GiB are more than {MOST_MEMORY >> 30}")
    seconds = time.monotonic() - started
    peak = max(proof.peak_memory for proof in proofs)
    print(f"\n{len(proofs)} schedules proved in {seconds:.0f} s, in {peak / 2**20:.0f} MiB at most")
    return {
        "schema": SCHEMA,
        "processes": processes,
        "seconds": seconds,
        "proofs": [asdict(proof) for proof in proofs],
    }


BENCHMARK = Benchmark(
    *("schedule_proofs", __doc__, measure),
    rounds=0,
    options={"processes": str(len(os.sched_getaffinity(0)))},
    flags={"quick": "few ranks: shows that all works"},
)

if __name__ == "__main__":
    BENCHMARK.main()
