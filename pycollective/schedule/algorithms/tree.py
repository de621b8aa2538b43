"""Tree: reduce along a binomial tree to rank 0, and back.

Rank r hands what it has to ``r - (lowest bit of r)``. What it has then is always one node of the
order, for any number of ranks. ``2 log2 n`` steps of one message; the whole buffer in each.
"""

from __future__ import annotations

from pycollective.schedule import handing
from pycollective.schedule.algorithms.base import Algorithm, whole
from pycollective.schedule.algorithms.patterns import (
    backwards,
    later,
    log2_ceiling,
    without_repeats,
)
from pycollective.schedule.algorithms.tree_counts import COUNTS
from pycollective.schedule.algorithms.tree_room import ROOM
from pycollective.schedule.handing import Handing
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology


def _up(rank: int) -> Move:
    """The move of rank > 0 towards rank 0."""
    bit = rank & -rank
    return Move(bit.bit_length() - 1, rank, rank - bit)


def _all_up(ranks: int) -> list[Move]:
    return [_up(rank) for rank in range(1, ranks)]


def _path_up(rank: int) -> list[Move]:
    path = []
    while rank:
        path.append(_up(rank))
        rank = path[-1].target
    return path


def _seen_from(root: int, ranks: int, moves: list[Move]) -> list[Move]:
    """Moves of a tree whose rank 0 is `root`."""
    return [Move(step, (a + root) % ranks, (b + root) % ranks) for step, a, b in moves]


def _all_reduce(topology: Topology, _shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    depth = log2_ceiling(n)
    return _all_up(n) + later(backwards(_all_up(n), depth), depth)


def _reduce(topology: Topology, _shard: int, root: int) -> list[Move]:
    n = topology.ranks
    # To rank 0 first, for any root: from there the tree is the order.
    return _all_up(n) + ([Move(log2_ceiling(n), 0, root)] if root else [])


def _broadcast(topology: Topology, _shard: int, root: int) -> list[Move]:
    n = topology.ranks
    return _seen_from(root, n, backwards(_all_up(n), log2_ceiling(n)))


def _gather(topology: Topology, shard: int, root: int) -> list[Move]:
    n = topology.ranks
    return _seen_from(root, n, _path_up((shard - root) % n))


def _scatter(topology: Topology, shard: int, root: int) -> list[Move]:
    n = topology.ranks
    return _seen_from(root, n, backwards(_path_up((shard - root) % n), log2_ceiling(n)))


def _reduce_scatter(topology: Topology, shard: int, _root: int) -> list[Move]:
    depth = log2_ceiling(topology.ranks)
    return _all_up(topology.ranks) + later(_scatter(topology, shard, 0), depth)


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    n = topology.ranks
    to_all = later(_broadcast(topology, shard, 0), log2_ceiling(n))
    return without_repeats(shard, _gather(topology, shard, 0) + to_all)


def _all_up_of(ranks: int, rank: int) -> list[Handing]:
    """Those of `_all_up` that touch `rank`; what travels is what is below the rank that hands."""
    found = []
    bit = 1
    while not rank & bit and rank + bit < ranks:
        child = rank + bit
        below = ((child, min(child + bit, ranks)),)
        found.append(Handing(bit.bit_length() - 1, child, rank, below))
        bit *= 2
    if rank:
        step, _, target = _up(rank)
        found.append(Handing(step, rank, target, ((rank, min(2 * rank - target, ranks)),)))
    return found


def _is_below(rank: int, other: int) -> bool:
    """Whether the way of `other` to rank 0 leads through `rank`, or begins there."""
    return not rank or rank <= other < rank + (rank & -rank)


def _path_up_of(start: int, rank: int) -> list[Handing]:
    """Those of `_path_up` from `start` that touch `rank`, with what is only moved."""
    if not _is_below(rank, start):
        return []
    found = []
    if rank != start:
        bit = 1 << ((start - rank).bit_length() - 1)
        found.append(Handing(bit.bit_length() - 1, rank + bit, rank, None))
    return [*found, Handing(*_up(rank), None)] if rank else found


def _turned(root: int, ranks: int, handings: list[Handing]) -> list[Handing]:
    """As `_seen_from`."""
    return [
        Handing(step, (a + root) % ranks, (b + root) % ranks, leaves)
        for step, a, b, leaves in handings
    ]


def _all_reduce_of(topology: Topology, _shard: int, _root: int, rank: int) -> list[Handing]:
    depth = log2_ceiling(topology.ranks)
    up = _all_up_of(topology.ranks, rank)
    return up + handing.backwards(up, depth, after=depth)


def _reduce_of(topology: Topology, _shard: int, root: int, rank: int) -> list[Handing]:
    up = _all_up_of(topology.ranks, rank)
    if root and rank in (0, root):
        up.append(Handing(log2_ceiling(topology.ranks), 0, root, None))
    return up


def _broadcast_of(topology: Topology, _shard: int, root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    up = _all_up_of(n, (rank - root) % n)
    return _turned(root, n, handing.backwards(up, log2_ceiling(n)))


def _gather_of(topology: Topology, shard: int, root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    return _turned(root, n, _path_up_of((shard - root) % n, (rank - root) % n))


def _scatter_of(topology: Topology, shard: int, root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    path = _path_up_of((shard - root) % n, (rank - root) % n)
    return _turned(root, n, handing.backwards(path, log2_ceiling(n)))


def _reduce_scatter_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    up = _all_up_of(topology.ranks, rank)
    depth = log2_ceiling(topology.ranks)
    return up + handing.later(_scatter_of(topology, shard, 0, rank), depth)


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    depth = log2_ceiling(topology.ranks)
    down = handing.backwards(_all_up_of(topology.ranks, rank), depth)
    # Whoever the shard came through on its way up has it.
    lacking = [each for each in down if not _is_below(each.target, shard)]
    return _path_up_of(shard, rank) + handing.later(lacking, depth)


_HANDINGS = {
    "all_reduce": _all_reduce_of,
    "reduce_scatter": _reduce_scatter_of,
    "all_gather": _all_gather_of,
    "reduce": _reduce_of,
    "broadcast": _broadcast_of,
    "gather": _gather_of,
    "scatter": _scatter_of,
}


TREE = Algorithm(
    "tree",
    "along a binomial tree to rank 0 and back, the whole buffer in each message",
    whole,
    {
        "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "gather": _gather,
        "scatter": _scatter,
    },
    _HANDINGS,
    ROOM,
    COUNTS,
)
