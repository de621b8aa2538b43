"""Recursive doubling: exchange all there is with ever farther ranks. For small messages.

All-reduce, on one host: ``log2 n`` steps, in each of which a rank exchanges one node with the one
whose number differs in bit k. Ranks beyond the largest power of two p send their input to rank
``r - p`` first, and get the result last. What they gave travels with the others' node, so a message
has at most two nodes, and the order is kept. Between hosts the first rank of each does so, for all
of its host: h hosts, a power of two, exchange ``log2 h`` times, one message each way, however many
ranks they have; what a host has may be several nodes. Its ranks send it their inputs first, and
take the result last.

All-gather: in step k a rank sends all it has, ``2**k`` shards, to rank ``r - 2**k``; for any number
of ranks ``ceil(log2 n)`` steps. Source: Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), section 4.
"""

from __future__ import annotations

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import (
    Algorithm,
    Ranges,
    Transfer,
    backwards,
    largest_block,
    leaf,
    leaves_of_hosts,
    merged,
    whole,
)


def _exchange(n: int, place: int) -> list[Transfer]:
    """What place 0 to ``n - 1`` sends and receives; leaves are places."""
    p = largest_block(n)
    own = place if place < p else place - p
    folded = own + p  # its input comes to `own`, and the result goes back
    first = 1 if n > p else 0
    last = first + p.bit_length() - 1
    found = []
    if folded < n:
        found = [Transfer(0, folded, own, leaf(folded)), Transfer(last, own, folded)]
    if place == own:
        for number in range(p.bit_length() - 1):
            other = place ^ (1 << number)
            step = first + number
            found.append(Transfer(step, place, other, _group(place, number, n)))
            found.append(Transfer(step, other, place, _group(other, number, n)))
    return found


def _exchange_steps(n: int) -> int:
    p = largest_block(n)
    return p.bit_length() - 1 + (2 if n > p else 0)


def _group(place: int, number: int, n: int) -> Ranges:
    """Places whose inputs one has before its `number`-th exchange, those folded in included."""
    p = largest_block(n)
    size = 1 << number
    lo = place & -size
    if p + lo >= n:
        return ((lo, lo + size),)
    return (lo, lo + size), (p + lo, min(p + lo + size, n))


def _all_reduce(topology: Topology, _shard: int, _root: int, rank: int) -> list[Transfer]:
    if topology.single:
        return _exchange(topology.ranks, rank)
    hosts = topology.hosts
    host = topology.host_of[rank]
    first = hosts[host][0]
    wide = int(topology.widest > 1)
    last = wide + _exchange_steps(len(hosts))
    if rank != first:
        there = [Transfer(0, rank, first, leaf(rank))]
        return there + backwards(there, 1, after=last)
    within = [Transfer(0, each, rank, leaf(each)) for each in hosts[host][1:]]
    found = within + backwards(within, 1, after=last)
    for number, a, b, groups in _exchange(len(hosts), host):
        leaves = None
        if groups is not None:
            leaves = merged(
                ranges for group in groups for ranges in leaves_of_hosts(topology, *group)
            )
        found.append(Transfer(wide + number, hosts[a][0], hosts[b][0], leaves))
    return found


def _all_gather(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    n = topology.ranks
    behind = (shard - rank) % n
    found = []
    number = behind.bit_length()  # of the step in which it has it
    if behind:
        size = 1 << (number - 1)
        found.append(Transfer(number - 1, (rank + size) % n, rank))
    while behind + (1 << number) < n:
        found.append(Transfer(number, rank, (rank - (1 << number)) % n))
        number += 1
    return found


RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "all that a rank has to ever farther ranks, in the fewest steps; for small messages",
    whole,
    {"all_reduce": _all_reduce, "all_gather": _all_gather},
)
