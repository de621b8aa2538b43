"""Is a commit slower than another one, on one host or between two that it simulates?

Two built source trees take turns with themselves: the other one, the other one again, and this one,
each in processes of its own. What the other one differs from itself is what the machine's noise
makes of equal code; a ratio within that says nothing. Each block of calls begins with the same
inputs, and so does its last call, whose result is compared with the oracle's, bit for bit.

Ranks are pinned. The phase of the machine (`pycollective/bench/phase.py` of this tree, for both) is
looked at before and after each block. A block whose looks disagree is repeated, and blocks are
compared within one phase: near and far apart.

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
from collections.abc import Iterator
from pathlib import Path

from benchmarks.mpi_environments import ensure
from pycollective.bench import phase
from pycollective.cores import cores_of

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24)
REPEATS = 7
Blocks = dict[str, list[phase.Turn[float]]]  # of each call: seconds a call
# Runs in either tree, so it uses what both have. Rank 0 prints the blocks of each call.
PROGRAM = """
import dataclasses, json, os, runpy, sys, time
import ml_dtypes  # gives NumPy the name bfloat16
import numpy as np
import pycollective as pc
from pycollective import reference
from pycollective.testing.inputs import leaves

phase = runpy.run_path(sys.argv[4])
dtype = np.dtype(sys.argv[1])
comm = pc.init(timeout=60)
me, n = comm.rank, comm.size
cores = json.loads(sys.argv[5])
os.sched_setaffinity(0, {cores[me]})

def looks():
    return phase["look_together"](comm, cores)

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
        def block():
            took = 0.0
            for calls_now in (calls_in_a_row - 1, 1):
                restore()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(calls_now):
                    call()
                took += time.perf_counter() - start
            assert result.tobytes() == wanted.tobytes(), f"{name} of {size} bytes is wrong"
            return took / calls_in_a_row
        call()  # warm
        blocks = [phase["within_one"](block, looks) for _ in range(int(sys.argv[3]))]
        seen[f"{name} {size}"] = [dataclasses.asdict(each) for each in blocks]
if comm.rank == 0:
    print(json.dumps(seen), flush=True)
comm.close()
"""


def blocks_in(tree: Path, ranks: int, dtype: str, over: str) -> Blocks:
    """The blocks of each call, by its name and bytes, with the pycollective of a source tree."""
    program = ["-c", PROGRAM, dtype, json.dumps(SIZES), str(REPEATS), phase.__file__]
    program.append(json.dumps(cores_of(ranks)))
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
    seen = json.loads(done.stdout.removeprefix("[0] "))
    return {case: [phase.Turn(**each) for each in blocks] for case, blocks in seen.items()}


def report(seen: dict[str, Blocks]) -> Iterator[str]:
    """A line a call and phase: the other tree's time, and the ratios; then what was seen.

    `seen` has the blocks of the trees other, again and this.
    """
    kept, every = 0, [block for tree in seen.values() for all_ in tree.values() for block in all_]
    for case in seen["other"]:
        compared = phase.by_phase({name: blocks[case] for name, blocks in seen.items()})
        if not compared:
            yield f"{case:24} no phase with blocks of all"
        for now, blocks in compared.items():
            kept += sum(map(len, blocks.values()))
            other, again, this = (
                statistics.median(block.result for block in blocks[name])
                for name in ("other", "again", "this")
            )
            yield (
                f"{case:24} {now:6} {other * 1e6:10.2f} us  again {again / other:.2f}  "
                f"this {this / other:.2f}"
            )
    phases = Counter(block.phase for block in every)
    many = "one phase seen" if len(phases) == 1 else "phases seen"
    yield (
        f"{many}, in blocks: {', '.join(f'{count} {now}' for now, count in phases.items())}; "
        f"{sum(block.repeated for block in every)} repeated, {len(every) - kept} dropped"
    )


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
                seen[name].setdefault(case, []).extend(blocks)
    print(f"{arguments.ranks} ranks over {arguments.over}, {arguments.dtype}, medians of blocks")
    print("\n".join(report(seen)))


if __name__ == "__main__":
    main()
