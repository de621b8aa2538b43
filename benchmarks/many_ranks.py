"""What does it take to join 16, 64 and 128 processes under mpiexec, as 8 played hosts?

Each rank joins, checks all-reduce by each algorithm, all-gather, reduce-scatter and broadcast bit
for bit against the oracle or a formula, and reports what it has then: the seconds that `init` took,
resident memory beyond what mpi4py and NumPy had before, threads, descriptors.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.mpi_environments import NAMES

HOSTS = 8
RANKS = (16, 64, 128)
ALGORITHMS = ("auto", "hierarchical", "halving_doubling", "recursive_doubling", "tree", "ring")


def _resident() -> int:
    """Bytes of memory that this process has to itself or shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def on_a_rank(_run: Run) -> list[Record] | None:
    """What each rank runs; rank 0 has what all have seen."""
    import numpy as np
    from mpi4py import MPI

    import pycollective as pc
    from pycollective import reference
    from pycollective.testing.inputs import leaves

    world = MPI.COMM_WORLD
    world.Barrier()
    before = _resident()
    start = time.perf_counter()
    comm = pc.init(timeout=120)
    took = time.perf_counter() - start
    count = 64 * comm.size + 3
    inputs = leaves("float32", "sum", comm.size, count, 1)
    want = reference.reduce(inputs)
    wrong = 0
    for algorithm in ALGORITHMS:
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, algorithm=algorithm)
        wrong += int((x.view("u1") != want.view("u1")).sum())
    shard = np.full(5, comm.rank, np.int64)
    every = np.empty(5 * comm.size, np.int64)
    comm.all_gather(every, shard)
    wrong += int((every != np.repeat(np.arange(comm.size), 5)).sum())
    part = np.empty(5, np.int64)
    comm.reduce_scatter(part, np.arange(5 * comm.size, dtype=np.int64))
    wrong += int((part != comm.size * np.arange(5 * comm.rank, 5 * comm.rank + 5)).sum())
    sent = inputs[3].copy() if comm.rank == 3 else np.empty_like(want)
    comm.broadcast(sent, root=3)
    wrong += int((sent.view("u1") != inputs[3].view("u1")).sum())
    seen = {
        "wrong": wrong,
        "seconds to join": took,
        "resident MiB": (_resident() - before) / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    all_seen: list[Record] | None = world.gather(seen)
    comm.close()
    return all_seen


def join(run: Run, name: str, ranks: int) -> Record:
    """Run so many ranks under one MPI: the least, median and most of what they saw."""
    topology = f"{HOSTS}x{ranks // HOSTS}"
    start = time.monotonic()
    seen = run.ranks_under(name, ranks, topology)
    result: Record = {"topology": topology, "seconds of the whole job": time.monotonic() - start}
    for what in seen[0]:
        values = sorted(each[what] for each in seen)
        result[what] = {
            "least": values[0],
            "median": values[len(values) // 2],
            "most": values[-1],
        }
    return result


def measure(run: Run) -> Record:
    """Under each MPI, each number of ranks."""
    record = {}
    for name in run.options["mpi"].split(","):
        for ranks in RANKS:
            result = record[f"{name}, {ranks} ranks"] = join(run, name, ranks)
            line = f"{name:8} {ranks:4} ranks as {result['topology']:5}"
            for what in ("seconds to join", "resident MiB", "threads", "descriptors"):
                line += (
                    f"  {what} {result[what]['median']:.4g}, at most {result[what]['most']:.4g};"
                )
            print(f"{line}  wrong {result['wrong']['most']}", flush=True)
    return record


if __name__ == "__main__":
    options = {"mpi": ",".join(NAMES)}
    Benchmark("many_ranks", __doc__, measure, on_a_rank, options=options).main()
