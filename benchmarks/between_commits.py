"""Is a commit slower than another one, on one host or between two that it simulates?

Two built source trees take turns with themselves: the other one, the other one again, and this one,
each in processes of its own. What the other one differs from itself is what the machine's noise
makes of equal code; a ratio within that says nothing. Each block of calls begins with the same
inputs, and so does its last call, whose result is compared with the oracle's, bit for bit.

Ranks are pinned. A virtual machine's caches are near or far for seconds at a time (below or above
110 ns from core to core), which is measured before and after each block: only blocks of one phase
are compared, the commonest.

    git worktree add ../old COMMIT && (cd ../old && python setup.py build_ext --inplace)
    python -m benchmarks.between_commits ../old --ranks 4 --dtype bfloat16
    python -m benchmarks.between_commits ../old --over mpich
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.mpi_environments import ensure

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24)
REPEATS = 7
Blocks = dict[str, list[tuple[str, float]]]  # of each call: a block's phase, and seconds a call
# Runs in either tree, so it uses what both have. Rank 0 prints the blocks of each call.
PROGRAM = """
import json, os, sys, time
import ml_dtypes  # gives NumPy the name bfloat16
import numpy as np
import pycollective as pc
from pycollective import _core, reference
from pycollective.testing.inputs import leaves

dtype = np.dtype(sys.argv[1])
comm = pc.init(timeout=60)
me, n = comm.rank, comm.size
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[me % len(cpus)]})

def is_near():
    comm.barrier()
    near = me > 0 or len(cpus) < 2 or _core.core_to_core_latency(cpus[0], cpus[1], 5000) < 110e-9
    comm.barrier()
    return near

seen = {}
for size in json.loads(sys.argv[2]):
    count = size // dtype.itemsize
    count -= count % comm.size
    every = leaves(sys.argv[1], "sum", n, count, 0)
    shard = [each[: count // n] for each in every]
    x, other = every[me].copy(), np.empty(count, dtype)
    part = shard[me].copy()
    # Of each: the call, where its result is, and the oracle's.
    calls = {
        "all_reduce": (lambda: comm.all_reduce(x), x, reference.all_reduce(every)[me]),
        "reduce_scatter": (
            lambda: comm.reduce_scatter(part, x), part, reference.reduce_scatter(every)[me]
        ),
        "all_gather": (lambda: comm.all_gather(x, part), x, reference.all_gather(shard)[me]),
        "broadcast": (lambda: comm.broadcast(x), x, every[0]),
        "all_to_all": (lambda: comm.all_to_all(other, x), other, reference.all_to_all(every)[me]),
    }
    # In place sums grow; what has become an infinity costs the same.
    calls_in_a_row = max(2, min(2000, (8 << 20) // size))
    for name, (call, result, wanted) in calls.items():
        def restore():
            x[:], part[:], other.view("u1")[:] = every[me], shard[me], 0xA5
        call()  # warm
        blocks = []
        for _ in range(int(sys.argv[3])):
            took = 0.0
            before = is_near()
            for calls_now in (calls_in_a_row - 1, 1):
                restore()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(calls_now):
                    call()
                took += time.perf_counter() - start
            assert result.tobytes() == wanted.tobytes(), f"{name} of {size} bytes is wrong"
            phase = {(True, True): "near", (False, False): "far"}.get((before, is_near()), "both")
            blocks.append((phase, took / calls_in_a_row))
        seen[f"{name} {size}"] = blocks
if comm.rank == 0:
    print(json.dumps(seen), flush=True)
comm.close()
"""


def blocks_in(tree: Path, ranks: int, dtype: str, over: str) -> Blocks:
    """The blocks of each call, by its name and bytes, with the pycollective of a source tree."""
    program = ["-c", PROGRAM, dtype, json.dumps(SIZES), str(REPEATS)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    if over != "shm":
        environment["PYCOLLECTIVE_TOPOLOGY"] = f"{ranks}x1"
    if over == "mpich":
        programs = ensure(over) / "bin"
        start = [str(programs / "mpiexec"), "-n", str(ranks), str(programs / "python")]
    else:
        run = ["-m", "pycollective", "run", "-n", str(ranks), sys.executable]
        start = [sys.executable, *run]
    done = subprocess.run(
        [*start, *program],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    # Rank 0's line, which some commits tag; others know no --no-tag-output.
    seen: Blocks = json.loads(done.stdout.removeprefix("[0] "))
    return seen


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a source tree, built in place")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--over", choices=("shm", "gloo", "mpich"), default="shm")
    arguments = parser.parse_args()
    trees = {"other": arguments.other.resolve(), "again": arguments.other.resolve(), "this": ROOT}
    seen: dict[str, Blocks] = {name: {} for name in trees}
    for _ in range(arguments.rounds):
        for name, tree in trees.items():
            found = blocks_in(tree, arguments.ranks, arguments.dtype, arguments.over)
            for case, blocks in found.items():
                seen[name].setdefault(case, []).extend((phase, took) for phase, took in blocks)
    phases = Counter(phase for each in seen.values() for all_ in each.values() for phase, _ in all_)
    phase = max(("near", "far"), key=phases.__getitem__)
    print(
        f"{arguments.ranks} ranks over {arguments.over}, {arguments.dtype}, medians of the "
        f"{phases[phase]} blocks of {phases.total()} in which caches were {phase}"
    )
    for case in seen["other"]:
        times = {
            name: [seconds for found, seconds in seen[name][case] if found == phase]
            for name in trees
        }
        if not all(times.values()):
            print(f"{case:24} no block")
            continue
        other, again, this = (statistics.median(each) for each in times.values())
        print(
            f"{case:24} {other * 1e6:10.2f} us  again {again / other:.2f}  this {this / other:.2f}"
        )


if __name__ == "__main__":
    main()
