"""Reductions of accumulators for tests: cases, and what a rank does with one.

It imports what there is under mpiexec, too, where nothing is tested with pytest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

import pycollective as pc
from pycollective import reference
from pycollective.dtypes import numpy_type
from pycollective.schedule import algorithms_for
from pycollective.testing.inputs import leaves as any_leaves

KINDS = ("all_reduce", "reduce_scatter", "reduce")
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
MOST_ELEMENTS = 20_000


@dataclass(frozen=True)
class Case:
    """A reduction.

    Attributes:
        given: of each rank its leaves, which are dealt by `Communicator.deal`; None: `leaves_of`.
        counts: of a reduce_scatter, the elements of each rank's shard; else of no meaning.
        gradient, result: dtypes.
        seed: of the gradients, of the order in which they are added, and of the root.
    """

    kind: str
    leaves: int
    given: tuple[tuple[int, ...], ...] | None
    counts: tuple[int, ...]
    gradient: str
    result: str
    op: str
    divisor: float | None
    seed: int


def any_case(turns: random.Random, ranks: int) -> Case:
    """Drawn at random: runs of leaves or any sets; to all ranks or a few; blocks among them."""
    kind = turns.choice(KINDS)
    leaves = turns.choice([1, 2, 3, ranks, 2 * ranks, 4 * ranks, turns.randrange(1, 40)])
    given = None
    if turns.random() < 0.5:
        givers = turns.sample(range(ranks), turns.randrange(1, ranks + 1))
        owners = [turns.choice(givers) for _ in range(leaves)]
        given = tuple(tuple(i for i in range(leaves) if owners[i] == r) for r in range(ranks))
    scale = turns.choice([0, 1, 40, 3000, MOST_ELEMENTS])
    if turns.random() < 0.5:
        counts = (scale // ranks,) * ranks
    else:
        counts = tuple(turns.randrange(scale // ranks + 1) for _ in range(ranks))
    op = turns.choice(["sum", "avg"])
    divisor = turns.choice([None, 3.0, 1.5e-3, 3 * 2**24 + 1, 2**53 - 1]) if op == "avg" else None
    gradient, result = turns.choice(FLOATS), turns.choice(FLOATS)
    return Case(kind, leaves, given, counts, gradient, result, op, divisor, turns.randrange(1000))


def gradients(case: Case) -> list[np.ndarray]:
    """Of each leaf."""
    return any_leaves(case.gradient, "sum", case.leaves, sum(case.counts), case.seed)


def accumulated(comm: Any, case: Case, inputs: list[np.ndarray]) -> pc.Accumulator:
    """This rank's accumulator; its leaves are added in any order."""
    mine = list(
        case.given[comm.rank]
        if case.given is not None
        else pc.leaves_of(comm.rank, comm.size, case.leaves)
    )
    random.Random(case.seed * 64 + comm.rank).shuffle(mine)
    acc = pc.Accumulator(sum(case.counts), leaves=case.leaves)
    for leaf in mine:
        acc.add(leaf, inputs[leaf])
    return acc


def ways(kind: str) -> list[str]:
    return ["auto", *algorithms_for(kind)]


def wrong(comm: Any, case: Case, algorithms: list[str], wires: tuple[Any, ...] = (None,)) -> Any:
    """By which of the algorithms, and wires, the result on this rank is not the reference's."""
    inputs = gradients(case)
    want = reference.reduce(inputs, case.op, case.divisor, numpy_type(case.result))
    deal = comm.deal(case.leaves, case.given[comm.rank]) if case.given is not None else None
    n, r, root = comm.size, comm.rank, case.seed % comm.size
    shard = slice(sum(case.counts[:r]), sum(case.counts[: r + 1]))
    found = []
    for algorithm in algorithms:
        for wire in wires:
            acc = accumulated(comm, case, inputs)
            given = {"op": case.op, "divisor": case.divisor, "deal": deal, "wire": wire}
            given |= {"algorithm": algorithm, "async_op": (case.seed + len(found)) % 3 == 0}
            out = np.full(sum(case.counts), 7).astype(numpy_type(case.result))
            expected = want
            if case.kind == "all_reduce":
                got = comm.all_reduce(acc, out=out, **given)
            elif case.kind == "reduce":
                got = comm.reduce(acc, root=root, out=out, **given)
                expected = want if r == root else np.full_like(want, 7)
            else:
                out, expected = out[shard], want[shard]
                even = len(set(case.counts)) == 1
                got = comm.reduce_scatter(out, acc, counts=None if even else case.counts, **given)
            if given["async_op"]:
                got = got.wait(timeout=30)
            if got is not (None if case.kind == "reduce" and r != root else out):
                found.append((algorithm, wire, "returns", got))
            if out.tobytes() != expected.tobytes():
                found.append((algorithm, wire, n, np.flatnonzero(out != expected)[:4]))
    return found


def wrong_of_each(comm: Any, cases: list[Case], some: int, wires: tuple[Any, ...] = (None,)) -> Any:
    """The same of many, each by `some` of the algorithms, in turns, and as the library chooses."""
    found = []
    for number, case in enumerate(cases):
        possible = ways(case.kind)
        named = [possible[(number + turn) % len(possible)] for turn in range(some)]
        found += [(case, *each) for each in wrong(comm, case, ["auto", *named], wires)]
    return found
