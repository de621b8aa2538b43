"""Real plans, for the native tests: `python -m tests.schedule.native_plans`.

With a topology and a folder, such as ``16x64 out/scale``, those of large all-reduces; of some
algorithms if these follow.

A plan is words, the algorithm, the operation and the pieces, and numbers in the order of
csrc/tests/program_text.h; a list is preceded by its length. Those of a deal end with two more.
Plans of one schedule follow each other, one a rank. Those of a small schedule are a line of text;
of large ones the numbers are binary, each behind a line with the words, the bytes of a number, and
how many there are.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from multiprocessing import Pool
from pathlib import Path

from pycollective.leaves.deal import Deal
from pycollective.schedule import ALGORITHMS, OPERATIONS, Topology, algorithms_for, make_schedule
from pycollective.schedule.layout import Layout
from pycollective.schedule.plan import Plan, make_plan

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "tests"
# By file: the topologies, and of each the algorithms; none: all.
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "programs.txt": dict.fromkeys(
        ("1x1", "1x3", "1x4", "2x1", "3x1", "4x1", "2x2", "2,3", "1,3,1,2"), ()
    ),
    # For GPUs on one host, in addition.
    "device_programs.txt": {
        "1x2": (),
        "1x5": (),
        "1x6": ("direct",),
        "1x7": ("direct",),
        "1x8": (),
    },
    "dealt_programs.txt": {},
}


# Of the last: by topology, the leaves that each rank gives.
DEALT: dict[str, Deal] = {
    "1x3": Deal.contiguous(3, 11),
    "2,1": Deal.of(9, [(0, 1, 5), (), (2, 3, 4, 6, 7, 8)]),
}


def words_of(plan: Plan) -> str:
    """What is no number."""
    return f"{plan.algorithm} {plan.operation} {plan.pieces}"


def numbers_of(plan: Plan) -> list[int]:
    """All the rest."""
    p = plan
    numbers = [p.root, p.rank, p.ranks, p.member, p.members, p.steps, p.shards, p.nodes, p.items]
    for each in (
        list(chain.from_iterable(p.refs)),
        list(chain.from_iterable(p.instructions)),
        list(chain.from_iterable(p.combines)),
        p.terms,
        p.recipes,
        p.readers,
        list(chain.from_iterable(p.messages)),
        p.message_pieces,
        p.peers,
    ):
        numbers.append(len(each))
        numbers += each
    return numbers + [p.leaves, p.rows] * (p.leaves != 0)


def text_of(plan: Plan) -> str:
    """A plan as text."""
    return " ".join([words_of(plan), *(str(int(each)) for each in numbers_of(plan))])


def binary_of(plan: Plan) -> bytes:
    """The same with binary numbers as this machine has them, of 16 bits where these are enough."""
    numbers = numbers_of(plan)
    try:
        packed = array("h", numbers)
    except OverflowError:
        packed = array("i", numbers)
    line = f"{words_of(plan)} {packed.itemsize} {len(packed)}\n"
    return line.encode() + packed.tobytes()


def _ranks(topology: str) -> int:
    if "x" in topology:
        hosts, ranks = map(int, topology.split("x"))
        return hosts * ranks
    return sum(map(int, topology.split(",")))


def lines(file: str) -> Iterator[str]:
    """All of a file: every algorithm, operation and topology."""
    for topology, algorithms in FILES[file].items():
        where = Topology.parse(topology, _ranks(topology))
        for operation in OPERATIONS:
            for algorithm in ALGORITHMS:
                if algorithm not in algorithms_for(operation):
                    continue
                if algorithms and algorithm not in algorithms:
                    continue
                root = where.ranks - 1 if OPERATIONS[operation].rooted else 0
                schedule = make_schedule(operation, algorithm, where, root)
                yield " / ".join(text_of(make_plan(schedule, r)) for r in range(where.ranks))
    for topology, deal in DEALT.items() if file == "dealt_programs.txt" else ():
        where = Topology.parse(topology, deal.size)
        for operation, each in OPERATIONS.items():
            for algorithm in algorithms_for(operation) if each.reduces else ():
                root = where.ranks - 1 if each.rooted else 0
                schedule = make_schedule(operation, algorithm, where, root, deal)
                yield " / ".join(text_of(make_plan(schedule, r)) for r in range(where.ranks))


def _of_host(what: tuple[str, str, int]) -> bytes:
    """The plans of a host's ranks, for an algorithm and a topology."""
    algorithm, topology, host = what
    gc.disable()  # nothing here goes round in circles, and millions of tuples are looked through
    where = Topology.parse(topology, _ranks(topology))
    schedule = make_schedule("all_reduce", algorithm, where, 0)
    layouts: dict[int, Layout] = {}  # of one host's ranks, which look at each other's
    return b"".join(binary_of(make_plan(schedule, r, layouts)) for r in where.hosts[host])


def write_all_reduces(topology: str, folder: Path, algorithms: Sequence[str]) -> None:
    """A file for each all-reduce algorithm; hosts are lowered in as many processes as may run."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts = range(len(Topology.parse(topology, _ranks(topology)).hosts))
    with Pool(len(os.sched_getaffinity(0))) as pool:
        parts = pool.imap(_of_host, [(name, topology, h) for name in algorithms for h in hosts])
        for name in algorithms:
            with (folder / f"{name}.programs").open("wb") as file:
                file.writelines(next(parts) for _ in hosts)


def main() -> None:
    """Write the files, or those of a large topology into a folder."""
    if len(sys.argv) == 1:
        for file in FILES:
            (FOLDER / file).write_text("".join(f"{line}\n" for line in lines(file)))
    else:
        algorithms = sys.argv[3:] or algorithms_for("all_reduce")
        write_all_reduces(sys.argv[1], Path(sys.argv[2]), algorithms)


if __name__ == "__main__":
    main()
