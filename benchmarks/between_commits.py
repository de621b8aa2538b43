"""Is a commit slower than another one, on one host or between two that it simulates?

Two built source trees take turns with themselves: the other one, the other one again, and this one,
each in processes of its own, which block in a read while the others have their turns. What the
other one differs from itself is what the machine's noise makes of equal code; a ratio within that
says nothing. Each block of calls begins with the same inputs, and so does its last call, whose
result is compared with the oracle's, bit for bit.

Ranks are pinned. The phase of the machine (`pycollective/bench/phase.py` of this tree, for both) is
looked at before and after each block. A block whose looks disagree is repeated. A ratio is the
median of those of single rounds, in which all three had a block in the same phase: near and far
apart. All is done several times with new processes, whose memory lies elsewhere.

    git worktree add ../old COMMIT && (cd ../old && python setup.py build_ext --inplace)
    python -m benchmarks.between_commits ../old --ranks 4 --dtype bfloat16
    python -m benchmarks.between_commits ../old --over mpich

`compression_step.py` compares other calls in the same way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mpi_environments import ensure
from pycollective.bench import phase
from pycollective.cores import cores_of

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24)
TREES = ("other", "again", "this")
ORDERS = tuple(itertools.permutations(TREES))  # a block of each call in each
Round = dict[str, phase.Turn[float]]  # a block of each tree, by its name: seconds a call

# These run in either tree, so they use what both have. Before CALLS, which has a block of each call
# by its name in `blocks`, and in `made` what is to be the same of both trees:
BEGIN = """
import dataclasses, json, os, runpy, sys, time
import numpy as np
import pycollective as pc

phase = runpy.run_path(sys.argv[1])
folder, cores, given = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
comm = pc.init(timeout=60)
me, n = comm.rank, comm.size
os.sched_setaffinity(0, {cores[me]})
blocks, made = {}, {}
"""
CALLS = """
import ml_dtypes  # gives NumPy the name bfloat16
from pycollective import reference
from pycollective.testing.inputs import leaves

def add(size):
    dtype = np.dtype(given["dtype"])
    count = size // dtype.itemsize
    count -= count % n
    every = leaves(given["dtype"], "sum", n, count, 0)
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
    def restore():
        x[:], part[:], other.view("u1")[:] = every[me], shard[me], 0xA5
    for name, (call, result, wanted) in calls.items():
        def block(name=name, call=call, result=result, wanted=wanted):
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
        blocks[f"{name} {size}"] = block

for size in given["sizes"]:
    add(size)
"""
# Rank 0 answers each order, which all ranks read, with a block.
END = """
def looks():
    return phase["look_together"](comm, cores)

def answer(what):
    if me == 0:
        print(json.dumps(what), flush=True)

answer({"calls": list(blocks), "made": made})
with open(f"{folder}/{me}") as orders:
    for order in orders:
        answer(dataclasses.asdict(phase["within_one"](blocks[order.strip()], looks)))
comm.close()
"""


@dataclass(frozen=True)
class Started:
    """The ranks of one tree.

    Attributes:
        calls: the names of what they can be asked for.
        made: what they have made, to be compared with that of other trees.
    """

    calls: list[str]
    made: dict[str, Any]
    _process: subprocess.Popen[str]
    _orders: list[Any]

    def block(self, call: str) -> phase.Turn[float]:
        """A block of that call, on all ranks."""
        for each in self._orders:
            each.write(f"{call}\n")
            each.flush()
        return phase.Turn(**_answer(self._process))


@dataclass(frozen=True)
class Comparison:
    """What is compared, in any tree.

    Attributes:
        calls: the text between BEGIN and END.
        given: to it.
        ranks: how many.
        over: shm, or gloo or mpich between ranks that are each a host of its own.
    """

    calls: str
    given: Mapping[str, Any]
    ranks: int
    over: str

    @contextmanager
    def started(self, tree: Path) -> Iterator[Started]:
        """Ranks with the pycollective of a source tree, until the end of the block."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            orders = []
            for rank in range(self.ranks):
                os.mkfifo(folder / str(rank))
                # Opened for reading too, so that it need not wait for the rank.
                pipe = os.open(folder / str(rank), os.O_RDWR)
                orders.append(stack.enter_context(open(pipe, "w")))
            process = subprocess.Popen(
                [
                    *(*self._start(), "-c", BEGIN + self.calls + END, phase.__file__, str(folder)),
                    *(json.dumps(cores_of(self.ranks)), json.dumps(self.given)),
                ],
                env=self._environment(tree),
                cwd=tree,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            answer = _answer(process)
            yield Started(answer["calls"], answer["made"], process, orders)
            for each in orders:
                each.close()  # the end of what ranks read
            if process.wait(60):
                raise SystemExit(f"the ranks of {tree} ended with {process.returncode}")

    def _start(self) -> list[str]:
        if self.over == "mpich":
            programs = ensure(self.over) / "bin"
            return [str(programs / "mpiexec"), "-n", str(self.ranks), str(programs / "python")]
        run = ["-m", "pycollective", "run", "-n", str(self.ranks), sys.executable]
        return [sys.executable, *run]

    def _environment(self, tree: Path) -> dict[str, str]:
        there = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.over != "shm":
            there["PYCOLLECTIVE_TOPOLOGY"] = f"{self.ranks}x1"
        return {**os.environ, **there}

    def rounds(self, other: Path, launches: int) -> dict[str, list[Round]]:
        """Of each call the blocks of the other tree, of it again and of this, in each order.

        Raises:
            SystemExit: the trees make other bits, or ranks have failed.
        """
        seen: dict[str, list[Round]] = {}
        for launch in range(launches):
            first = launch % len(TREES)  # to start; it is often a little slower for it
            with ExitStack() as stack:
                trees = {
                    name: stack.enter_context(self.started(ROOT if name == "this" else other))
                    for name in (*TREES[first:], *TREES[:first])
                }
                calls, made = trees["this"].calls, trees["this"].made
                if wrong := [key for key in made if made[key] != trees["other"].made[key]]:
                    raise SystemExit(f"the trees make other bits of {', '.join(wrong)}")
                for order, call in itertools.product(ORDERS, calls):
                    now = {name: trees[name].block(call) for name in order}
                    seen.setdefault(call, []).append(now)
        return seen


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    # Rank 0's line, which some commits tag; others know no --no-tag-output.
    line = process.stdout.readline().removeprefix("[0] ")
    if not line:
        raise SystemExit(f"the ranks ended with {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


@dataclass(frozen=True)
class Row:
    """A call in one phase of the machine.

    Attributes:
        call, phase: their names.
        rounds: those in which all trees had a block in this phase.
        seconds: the other tree's, a call; the median.
        again: the median ratio of the other tree to itself.
        this: the median ratio of this tree to the other one.
    """

    call: str
    phase: str
    rounds: int
    seconds: float
    again: float
    this: float

    def __str__(self) -> str:
        return (
            f"{self.call:24} {self.phase:6} {self.seconds * 1e6:10.2f} us  "
            f"again {self.again:.3f}  this {self.this:.3f}"
        )


def rows_of(seen: Mapping[str, list[Round]]) -> Iterator[Row]:
    """Each call in each phase that it was seen in."""
    for call, rounds in seen.items():
        for now in (phase.SINGLE, phase.NEAR, phase.FAR):
            same = [each for each in rounds if {turn.phase for turn in each.values()} == {now}]
            took = [{name: turn.result for name, turn in each.items()} for each in same]
            if took:
                yield Row(
                    *(call, now, len(took)),
                    statistics.median(each["other"] for each in took),
                    statistics.median(each["again"] / each["other"] for each in took),
                    statistics.median(each["this"] / each["other"] for each in took),
                )


def phases_of(seen: Mapping[str, list[Round]]) -> str:
    """How many blocks were seen in each phase, and how many were of no use."""
    rounds = [each for of_call in seen.values() for each in of_call]
    every = [turn for each in rounds for turn in each.values()]
    phases = Counter(turn.phase for turn in every)
    kept = sum(
        len(each)
        for each in rounds
        if len(found := {turn.phase for turn in each.values()}) == 1 and found != {phase.MIXED}
    )
    many = "one phase seen" if len(phases) == 1 else "phases seen"
    return (
        f"{many}, in blocks: {', '.join(f'{count} {now}' for now, count in phases.items())}; "
        f"{sum(turn.repeated for turn in every)} repeated, {len(every) - kept} dropped"
    )


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a source tree, built in place")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="launches")
    parser.add_argument("--over", choices=("shm", "gloo", "mpich"), default="shm")
    arguments = parser.parse_args()
    given = {"dtype": arguments.dtype, "sizes": SIZES}
    comparison = Comparison(CALLS, given, arguments.ranks, arguments.over)
    seen = comparison.rounds(arguments.other.resolve(), arguments.rounds)
    print(f"{arguments.ranks} ranks over {arguments.over}, {arguments.dtype}, medians of blocks")
    for row in rows_of(seen):
        print(row)
    print(phases_of(seen))


if __name__ == "__main__":
    main()
