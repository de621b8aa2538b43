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

from itertools import repeat
from operator import xor

from .algorithm import Algorithm, Room, whole
from .blocks import largest_block
from .counts import LEAF, NODE, RESULT, Phases, Transfer, ceil_div, on_the_way_back, step
from .handing import Handing, Ranges
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


def _all_reduce_of(topology: Topology, _shard: int, _root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    p = largest_block(n)
    own = rank if rank < p else rank - p
    folded = own + p  # its leaf comes to `own`, and the result goes back
    first = 1 if n > p else 0
    last = first + p.bit_length() - 1
    found = []
    if folded < n:
        there = ((folded, folded + 1),)
        found = [Handing(0, folded, own, there), Handing(last, own, folded, None)]
    if rank == own:
        for number in range(p.bit_length() - 1):
            other = rank ^ (1 << number)
            step = first + number
            found.append(Handing(step, rank, other, _group(rank, number, n)))
            found.append(Handing(step, other, rank, _group(other, number, n)))
    return found


def _group(rank: int, number: int, ranks: int) -> Ranges:
    """Leaves that a rank has before it exchanges for the `number`-th time: with those folded in."""
    p = largest_block(ranks)
    size = 1 << number
    lo = rank & -size
    if p + lo >= ranks:
        return ((lo, lo + size),)
    return (lo, lo + size), (p + lo, min(p + lo + size, ranks))


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    behind = (shard - rank) % n
    found = []
    number = behind.bit_length()  # of the step in which it has it
    if behind:
        size = 1 << (number - 1)
        found.append(Handing(number - 1, (rank + size) % n, rank, None))
    while behind + (1 << number) < n:
        found.append(Handing(number, rank, (rank - (1 << number)) % n, None))
        number += 1
    return found


def _all_gather_room(topology: Topology, _root: int) -> Room:
    """Each shard that goes to a rank of the same host; what goes to a farther one includes it."""
    n, host_of = topology.ranks, topology.host_of
    items = 0
    for number in range(log2_ceiling(n)):
        size = 1 << number
        if any(host_of[rank] == host_of[rank - size] for rank in range(n)):
            items = max(items, min(size, n - size))
    return Room(0, items, log2_ceiling(n))


def _all_reduce_count(topology: Topology) -> Phases:
    n = topology.ranks
    p = largest_block(n)
    folded = n - p
    phases = []
    distance = 1
    while distance < p:
        plain = LEAF if distance == 1 else NODE
        # Groups of so many ranks among which is one with a folded rank's leaf carry a second node.
        both = plain.plus((LEAF if folded == 1 else plain).times(1, messages=0))
        doubled = range(ceil_div(folded, distance) * distance)
        single = range(len(doubled), p)
        transfers = [
            Transfer(ranks, map(xor, ranks, repeat(distance)), load)
            for ranks, load in ((doubled, both), (single, plain))
            if ranks
        ]
        adds = 1 + (folded > distance) + (2 * distance == p and folded > 0)
        phases.append(step(topology, *transfers, adds=adds))
        distance *= 2
    if folded:
        fold = step(topology, Transfer(range(p, n), range(folded), LEAF))
        phases = [fold, *phases, *on_the_way_back((fold,))]
    return tuple(phases)


def _all_gather_count(topology: Topology) -> Phases:
    n = topology.ranks
    ranks = range(n)
    phases = []
    for distance in (1 << number for number in range(log2_ceiling(n))):
        targets = [*ranks[-distance:], *ranks[:-distance]]
        load = RESULT.times(min(distance, n - distance) / n)
        phases.append(step(topology, Transfer(ranks, targets, load)))
    return tuple(phases)


RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "all that a rank has to ever farther ranks, in the fewest steps; for small messages",
    whole,
    {"all_reduce": _all_reduce, "all_gather": _all_gather},
    {"all_reduce": _all_reduce_of, "all_gather": _all_gather_of},
    {"all_gather": _all_gather_room},
    {"all_reduce": _all_reduce_count, "all_gather": _all_gather_count},
)
