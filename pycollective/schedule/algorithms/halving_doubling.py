"""Halving-doubling: reduce-scatter by exchanging halves with ever farther ranks, and back.

In step k a rank exchanges with the one whose number differs in bit k, and each keeps the shards
whose number has that bit as its own; so what travels is one node of the order, and shard s ends at
rank s. A number of ranks that is not a power of two is a row of binary blocks, 4 + 2 + 1 for 7:
each halves for itself, then the smallest sends its result to the next larger, and so on. That is
the order, too.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), section 4.4; Rabenseifner and Träff, "More efficient reduction algorithms
for non-power-of-two number of processors", EuroPVM/MPI 2004 (binary blocks).
"""

from __future__ import annotations

from functools import lru_cache

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import Algorithm, Transfer, backwards, largest_block, not_to


@lru_cache(maxsize=16)
def _blocks(ranks: int) -> list[tuple[int, int]]:
    """First rank and size of each binary block, the largest first."""
    found = []
    lo = 0
    while lo < ranks:
        size = largest_block(ranks - lo)
        found.append((lo, size))
        lo += size
    return found


def halving_steps(ranks: int) -> int:
    """Steps that `halve` takes."""
    return largest_block(ranks).bit_length() - 1


def halve(ranks: int, shard: int, rank: int) -> list[Transfer]:
    """All inputs of a shard to rank ``shard % (largest block)``.

    A rank that has come to step k has the inputs of the 2**k ranks around it that differ from it in
    the low k bits alone. What a block sends to a larger one is all from its first rank on.
    """
    row = _blocks(ranks)
    at = next(at for at, (lo, size) in enumerate(row) if rank < lo + size)
    lo, size = row[at]
    differ = (rank - lo) ^ (shard % size)
    found = []
    bit, step = 1, 0
    while bit < size and not differ & bit:
        other = lo + ((rank - lo) ^ bit)
        first = other & -bit
        found.append(Transfer(step, other, rank, ((first, first + bit),)))
        bit *= 2
        step += 1
    if bit < size:
        first = rank & -bit
        found.append(Transfer(step, rank, lo + ((rank - lo) ^ bit), ((first, first + bit),)))
        return found
    if at + 1 < len(row):
        first, smaller = row[at + 1]
        giver = first + shard % smaller
        found.append(Transfer(smaller.bit_length() - 1, giver, rank, ((first, ranks),)))
    if at:
        first, larger = row[at - 1]
        # A block is never done before those that are smaller.
        found.append(Transfer(step, rank, first + shard % larger, ((lo, ranks),)))
    return found


def collect_steps(ranks: int) -> int:
    """Steps that `collect` takes."""
    return halving_steps(ranks) + (ranks != largest_block(ranks))


def collect(ranks: int, owner: int, rank: int) -> list[Transfer]:
    """All inputs of a shard to rank `owner`."""
    found = halve(ranks, owner, rank)
    held = owner % largest_block(ranks)
    if held != owner and rank in (held, owner):
        found.append(Transfer(halving_steps(ranks), held, owner))
    return found


def _all_reduce(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    there = halve(topology.ranks, shard, rank)
    steps = halving_steps(topology.ranks)
    return there + backwards(there, steps, after=steps)


def _reduce_scatter(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    return collect(topology.ranks, shard, rank)


def _all_gather(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    there = collect(topology.ranks, shard, rank)
    return not_to(shard, backwards(there, collect_steps(topology.ranks)))


HALVING_DOUBLING = Algorithm(
    "halving_doubling",
    "halves to ever farther ranks, and back; binary blocks where n is not a power of two",
    lambda topology: largest_block(topology.ranks),
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
)
