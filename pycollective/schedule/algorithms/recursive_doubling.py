"""Recursive doubling: exchange all there is with ever farther ranks. For small messages.

All-reduce, on one host: ``log2 n`` steps, in each of which a rank exchanges one node with the one
whose number differs in bit k. Ranks beyond the largest power of two p hand their leaf to rank
``r - p`` first, and get the result last; what they gave travels beside the others' node, so a
message has at most two nodes, and the order is kept. Between hosts the first rank of each does so,
for all of its host: h hosts, a power of two, exchange ``log2 h`` times, one message each way,
however many ranks they have; what a host has may be several nodes. Its ranks hand it their leaves
first, and take the result last.

All-gather: in step k a rank sends all it has, ``2**k`` shards, to rank ``r - 2**k``; for any number
of ranks ``ceil(log2 n)`` steps. Source: Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), section 4.
"""

from __future__ import annotations

from pycollective.schedule import handing
from pycollective.schedule.algorithms.base import Algorithm, Room, whole
from pycollective.schedule.algorithms.blocks import largest_block
from pycollective.schedule.algorithms.hierarchical_room import leaves_of
from pycollective.schedule.algorithms.patterns import backwards, later, log2_ceiling, on
from pycollective.schedule.algorithms.recursive_doubling_counts import COUNTS
from pycollective.schedule.handing import Handing, Ranges, merged
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology


def _exchange(n: int) -> list[Move]:
    """Moves between places 0 to ``n - 1``."""
    p = largest_block(n)
    folded = range(p, n)
    moves = [Move(0, place, place - p) for place in folded]
    number = 1 if folded else 0
    bit = 1
    while bit < p:
        moves += [Move(number, place, place ^ bit) for place in range(p)]
        number += 1
        bit *= 2
    return moves + [Move(number, place - p, place) for place in folded]


def _exchange_steps(n: int) -> int:
    p = largest_block(n)
    return p.bit_length() - 1 + (2 if n > p else 0)


def _all_reduce(topology: Topology, _shard: int, _root: int) -> list[Move]:
    if topology.single:
        return _exchange(topology.ranks)
    hosts = topology.hosts
    firsts = tuple(host[0] for host in hosts)
    within = [Move(0, rank, host[0]) for host in hosts for rank in host[1:]]
    if not within:
        return on(firsts, _exchange(len(hosts)))
    across = later(on(firsts, _exchange(len(hosts))), 1)
    return within + across + later(backwards(within, 1), 1 + _exchange_steps(len(hosts)))


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    return [
        Move(step, (shard - behind) % n, (shard - behind - (1 << step)) % n)
        for step in range(log2_ceiling(n))
        for behind in range(min(1 << step, n - (1 << step)))
    ]


def _exchange_of(n: int, place: int) -> list[Handing]:
    """Those of `_exchange` that touch `place`, with the places whose leaves they carry."""
    p = largest_block(n)
    own = place if place < p else place - p
    folded = own + p  # its leaves come to `own`, and the result goes back
    first = 1 if n > p else 0
    last = first + p.bit_length() - 1
    found = []
    if folded < n:
        there = ((folded, folded + 1),)
        found = [Handing(0, folded, own, there), Handing(last, own, folded, None)]
    if place == own:
        for number in range(p.bit_length() - 1):
            other = place ^ (1 << number)
            step = first + number
            found.append(Handing(step, place, other, _group(place, number, n)))
            found.append(Handing(step, other, place, _group(other, number, n)))
    return found


def _group(place: int, number: int, n: int) -> Ranges:
    """Places whose leaves one has before its `number`-th exchange: with those folded in."""
    p = largest_block(n)
    size = 1 << number
    lo = place & -size
    if p + lo >= n:
        return ((lo, lo + size),)
    return (lo, lo + size), (p + lo, min(p + lo + size, n))


def _all_reduce_of(topology: Topology, _shard: int, _root: int, rank: int) -> list[Handing]:
    if topology.single:
        return _exchange_of(topology.ranks, rank)
    hosts = topology.hosts
    host = topology.host_of[rank]
    first = hosts[host][0]
    wide = int(topology.widest > 1)
    last = wide + _exchange_steps(len(hosts))
    if rank != first:
        there = [Handing(0, rank, first, ((rank, rank + 1),))]
        return there + handing.backwards(there, 1, after=last)
    within = [Handing(0, each, rank, ((each, each + 1),)) for each in hosts[host][1:]]
    found = within + handing.backwards(within, 1, after=last)
    for number, a, b, groups in _exchange_of(len(hosts), host):
        leaves = None
        if groups is not None:
            leaves = merged(leaf for group in groups for leaf in leaves_of(topology, *group))
        found.append(Handing(wide + number, hosts[a][0], hosts[b][0], leaves))
    return found


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


RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "all that a rank has to ever farther ranks, in the fewest steps; for small messages",
    whole,
    {"all_reduce": _all_reduce, "all_gather": _all_gather},
    {"all_reduce": _all_reduce_of, "all_gather": _all_gather_of},
    {"all_gather": _all_gather_room},
    COUNTS,
)
