"""Recursive doubling: every rank exchanges all it has with ever farther ranks. For small messages.

All-reduce: ``log2 n`` steps, in each of which a rank exchanges one node with the one whose number
differs in bit k. Ranks beyond the largest power of two p hand their leaf to rank ``r - p`` first,
and get the result last; what they gave travels beside the others' node, so a message has at most
two nodes, and the order is kept.

All-gather: in step k a rank sends all it has, ``2**k`` shards, to rank ``r - 2**k``; for any number
of ranks ``ceil(log2 n)`` steps. Source: Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), section 4.
"""

from __future__ import annotations

from .algorithm import Algorithm, whole
from .halving_doubling import largest_block
from .lower import Move
from .moves import log2_ceiling
from .topology import Topology


def _all_reduce(topology: Topology, _shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    p = largest_block(n)
    folded = range(p, n)
    moves = [Move(0, rank, rank - p) for rank in folded]
    step = 1 if folded else 0
    bit = 1
    while bit < p:
        moves += [Move(step, rank, rank ^ bit) for rank in range(p)]
        step += 1
        bit *= 2
    return moves + [Move(step, rank - p, rank) for rank in folded]


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    return [
        Move(step, (shard - behind) % n, (shard - behind - (1 << step)) % n)
        for step in range(log2_ceiling(n))
        for behind in range(min(1 << step, n - (1 << step)))
    ]


RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "all that a rank has to ever farther ranks, in the fewest steps; for small messages",
    whole,
    {"all_reduce": _all_reduce, "all_gather": _all_gather},
)
