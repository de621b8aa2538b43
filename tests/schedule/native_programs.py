"""Real programs as text, for the native tests: `python -m tests.schedule.native_programs`.

With a topology and a folder, such as ``16x64 out/scale``, those of large all-reduces.

A line a program: its numbers in the order of csrc/tests/program_text.h; a list is preceded by its
length. Lines of one schedule follow each other, one a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from pycollective.schedule import ALGORITHMS, OPERATIONS, Topology, algorithms_for, make_schedule
from pycollective.schedule.assemble import Program, assemble
from pycollective.schedule.layout import Layout

FILE = Path(__file__).resolve().parents[2] / "csrc" / "tests" / "programs.txt"
TOPOLOGIES = ("1x1", "1x3", "1x4", "2x1", "3x1", "4x1", "2x2", "2,3", "1,3,1,2")


def text_of(program: Program) -> str:
    """One program's line."""
    p = program
    lists = [
        list(chain.from_iterable(p.refs)),
        list(chain.from_iterable(p.instructions)),
        list(chain.from_iterable(map(int, each) for each in p.combines)),
        p.terms,
        p.recipes,
        p.readers,
        list(chain.from_iterable(p.messages)),
        p.message_pieces,
        p.far,
    ]
    words: list[object] = [p.algorithm, p.operation, p.pieces]
    words += [p.root, p.rank, p.ranks, p.member, p.members, p.tags, p.shards, p.nodes, p.items]
    for each in lists:
        words += [len(each), *each]
    return " ".join(map(str, words))


def _ranks(topology: str) -> int:
    if "x" in topology:
        hosts, ranks = map(int, topology.split("x"))
        return hosts * ranks
    return sum(map(int, topology.split(",")))


def lines() -> Iterator[str]:
    """All of them: every algorithm, operation and topology."""
    for topology in TOPOLOGIES:
        where = Topology.parse(topology, _ranks(topology))
        for operation in OPERATIONS:
            for algorithm in ALGORITHMS:
                if algorithm not in algorithms_for(operation):
                    continue
                root = where.ranks - 1 if OPERATIONS[operation].rooted else 0
                schedule = make_schedule(operation, algorithm, where, root)
                for rank in range(where.ranks):
                    yield text_of(assemble(schedule, rank))


def main() -> None:
    """Write the file, or one for each all-reduce algorithm of a large topology into a folder."""
    if len(sys.argv) == 1:
        FILE.write_text("".join(f"{line}\n" for line in lines()))
        return
    topology, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    where = Topology.parse(topology, _ranks(topology))
    for algorithm in algorithms_for("all_reduce"):
        schedule = make_schedule("all_reduce", algorithm, where, 0)
        with (folder / f"{algorithm}.txt").open("w") as file:
            for members in where.hosts:
                layouts: dict[int, Layout] = {}  # of one host's ranks, which look at each other's
                file.writelines(
                    f"{text_of(assemble(schedule, rank, layouts))}\n" for rank in members
                )


if __name__ == "__main__":
    main()
