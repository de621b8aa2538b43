"""Is a commit slower than another one, on one host?

Two built source trees take turns with themselves: the other one, the other one again, and this one,
each in processes of its own. What the other one differs from itself is what the machine's noise
makes of equal code; a ratio within that says nothing. Each block of calls begins with the same
inputs, and so does its last call, whose result is compared with the oracle's, bit for bit.

    git worktree add ../old COMMIT && (cd ../old && python setup.py build_ext --inplace)
    python -m benchmarks.between_commits ../old --ranks 4 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24)
REPEATS = 7
# Runs in either tree, so it uses what both have. Rank 0 prints the medians, in seconds.
PROGRAM = """
import json, statistics, sys, time
import ml_dtypes  # gives NumPy the name bfloat16
import numpy as np
import pycollective as pc
from pycollective import reference
from pycollective.bench.problem import leaves

dtype = np.dtype(sys.argv[1])
comm = pc.init(timeout=60)
me, n = comm.rank, comm.size
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
        times = []
        for _ in range(int(sys.argv[3])):
            took = 0.0
            for calls_now in (calls_in_a_row - 1, 1):
                restore()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(calls_now):
                    call()
                took += time.perf_counter() - start
            assert result.tobytes() == wanted.tobytes(), f"{name} of {size} bytes is wrong"
            times.append(took / calls_in_a_row)
        seen[f"{name} {size}"] = statistics.median(times)
if comm.rank == 0:
    print(json.dumps(seen), flush=True)
comm.close()
"""


def seconds_in(tree: Path, ranks: int, dtype: str) -> dict[str, float]:
    """Seconds of each call, by its name and bytes, with the pycollective of a source tree."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pycollective", "run", "-n", str(ranks)),
            *(sys.executable, "-c", PROGRAM, dtype, json.dumps(SIZES), str(REPEATS)),
        ],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    seen: dict[str, float] = json.loads(done.stdout)
    return seen


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a source tree, built in place")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    trees = {"other": arguments.other.resolve(), "again": arguments.other.resolve(), "this": ROOT}
    rounds = [
        {name: seconds_in(tree, arguments.ranks, arguments.dtype) for name, tree in trees.items()}
        for _ in range(arguments.rounds)
    ]
    print(f"{arguments.ranks} ranks, {arguments.dtype}, medians of {arguments.rounds} runs")
    for case in rounds[0]["other"]:
        other, again, this = (
            statistics.median(each[name][case] for each in rounds) for name in trees
        )
        print(
            f"{case:24} {other * 1e6:10.2f} us  again {again / other:.2f}  this {this / other:.2f}"
        )


if __name__ == "__main__":
    main()
