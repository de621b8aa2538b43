"""Halving-doubling: reduce-scatter by exchanging halves with ever farther ranks, and back.

In step k a rank exchanges with the one whose number differs in bit k, and each keeps the shards
whose number has that bit as its own; so what travels is one node of the order, and shard s ends at
rank s. A number of ranks that is not a power of two is a row of binary blocks, 4 + 2 + 1 for 7:
each halves for itself, then the smallest hands its result to the next larger, and so on. That is
the order, too.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), section 4.4; Rabenseifner and Träff, "More efficient reduction algorithms
for non-power-of-two number of processors", EuroPVM/MPI 2004 (binary blocks).
"""

from __future__ import annotations

from functools import lru_cache

from pycollective.schedule import handing
from pycollective.schedule.algorithms.base import Algorithm
from pycollective.schedule.algorithms.blocks import blocks, largest_block
from pycollective.schedule.algorithms.halving_doubling_counts import COUNTS
from pycollective.schedule.algorithms.halving_doubling_room import ROOM
from pycollective.schedule.algorithms.patterns import backwards, later, without_repeats
from pycollective.schedule.handing import Handing
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology


def _chain(ranks: int) -> list[int]:
    """The step in which each block, the largest first, has what the smaller ones hand it."""
    ready = 0
    steps: list[int] = []
    for _, size in reversed(blocks(ranks)):
        ready = max(ready + 1 if steps else 0, size.bit_length() - 1)
        steps.append(ready)
    return steps[::-1]


@lru_cache(maxsize=16)
def halving_steps(ranks: int) -> int:
    """Steps that `halve` takes."""
    return _chain(ranks)[0]


def halve(ranks: int, shard: int) -> list[Move]:
    """All leaves of a shard to rank ``shard % (largest block)``."""
    moves = []
    ready = _chain(ranks)
    keeper = None  # of the block before
    for (lo, size), steps in zip(blocks(ranks), ready, strict=True):
        target = shard % size
        bit = 1
        step = 0
        while bit < size:
            # Who has come this far shares the low bits with the target; half of them hand over.
            handing = target % bit + (bit if not target & bit else 0)
            moves += [
                Move(step, lo + rank, lo + (rank ^ bit)) for rank in range(handing, size, 2 * bit)
            ]
            bit *= 2
            step += 1
        if keeper is not None:
            moves.append(Move(steps, lo + target, keeper))
        keeper = lo + target
    return moves


def collect_steps(ranks: int) -> int:
    """Steps that `collect` takes."""
    return halving_steps(ranks) + (ranks != largest_block(ranks))


def collect(ranks: int, owner: int) -> list[Move]:
    """All leaves of a shard to rank `owner`."""
    moves = halve(ranks, owner)
    held = owner % largest_block(ranks)
    return moves if held == owner else [*moves, Move(halving_steps(ranks), held, owner)]


def halve_of(ranks: int, shard: int, rank: int) -> list[Handing]:
    """Those of `halve` that touch `rank`.

    A rank that has come to step k has the leaves of the 2**k ranks around it that differ from it in
    the low k bits alone. What a block hands to a larger one is all from its first rank on.
    """
    row = blocks(ranks)
    at = next(at for at, (lo, size) in enumerate(row) if rank < lo + size)
    lo, size = row[at]
    differ = (rank - lo) ^ (shard % size)
    found = []
    bit, step = 1, 0
    while bit < size and not differ & bit:
        other = lo + ((rank - lo) ^ bit)
        first = other & -bit
        found.append(Handing(step, other, rank, ((first, first + bit),)))
        bit *= 2
        step += 1
    if bit < size:
        first = rank & -bit
        found.append(Handing(step, rank, lo + ((rank - lo) ^ bit), ((first, first + bit),)))
        return found
    if at + 1 < len(row):
        first, smaller = row[at + 1]
        giver = first + shard % smaller
        found.append(Handing(smaller.bit_length() - 1, giver, rank, ((first, ranks),)))
    if at:
        first, larger = row[at - 1]
        # A block is never done before those that are smaller.
        found.append(Handing(step, rank, first + shard % larger, ((lo, ranks),)))
    return found


def collect_of(ranks: int, owner: int, rank: int) -> list[Handing]:
    """Those of `collect` that touch `rank`."""
    found = halve_of(ranks, owner, rank)
    held = owner % largest_block(ranks)
    if held != owner and rank in (held, owner):
        found.append(Handing(halving_steps(ranks), held, owner, None))
    return found


def _all_reduce_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    there = halve_of(n, shard, rank)
    steps = halving_steps(n)
    return there + handing.backwards(there, steps, after=steps)


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    there = collect_of(n, shard, rank)
    return handing.not_to(shard, handing.backwards(there, collect_steps(n)))


def _all_reduce(topology: Topology, shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    steps = halving_steps(n)
    moves = halve(n, shard)
    return moves + later(backwards(moves, steps), steps)


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    back = backwards(collect(topology.ranks, shard), collect_steps(topology.ranks))
    return without_repeats(shard, back)


HALVING_DOUBLING = Algorithm(
    "halving_doubling",
    "halves to ever farther ranks, and back; binary blocks where n is not a power of two",
    lambda topology: largest_block(topology.ranks),
    {
        "all_reduce": _all_reduce,
        "reduce_scatter": lambda topology, shard, _: collect(topology.ranks, shard),
        "all_gather": _all_gather,
    },
    {
        "all_reduce": _all_reduce_of,
        "reduce_scatter": lambda topology, shard, _, rank: collect_of(topology.ranks, shard, rank),
        "all_gather": _all_gather_of,
    },
    ROOM,
    COUNTS,
)
