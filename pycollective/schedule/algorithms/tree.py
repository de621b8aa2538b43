"""Tree: reduce along a binomial tree to rank 0, and back.

Rank r sends what it has to ``r - (lowest bit of r)``. What it has then is always one node of the
order, for any number of ranks. ``2 log2 n`` steps of one message; the whole buffer in each.
"""

from __future__ import annotations

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import (
    Algorithm,
    Transfer,
    backwards,
    later,
    log2_ceiling,
    whole,
)


def _all_up(ranks: int, rank: int) -> list[Transfer]:
    """What every rank has to rank 0: from the children of `rank`, then to its parent."""
    found = []
    bit = 1
    while not rank & bit and rank + bit < ranks:
        child = rank + bit
        below = ((child, min(child + bit, ranks)),)
        found.append(Transfer(bit.bit_length() - 1, child, rank, below))
        bit *= 2
    if rank:
        bit = rank & -rank
        below = ((rank, min(rank + bit, ranks)),)
        found.append(Transfer(bit.bit_length() - 1, rank, rank - bit, below))
    return found


def _is_below(rank: int, other: int) -> bool:
    """Whether the way of `other` to rank 0 leads through `rank`, or begins there."""
    return not rank or rank <= other < rank + (rank & -rank)


def _one_up(start: int, rank: int) -> list[Transfer]:
    """A shard of rank `start` to rank 0."""
    if not _is_below(rank, start):
        return []
    found = []
    if rank != start:
        bit = 1 << ((start - rank).bit_length() - 1)
        found.append(Transfer(bit.bit_length() - 1, rank + bit, rank))
    if rank:
        bit = rank & -rank
        found.append(Transfer(bit.bit_length() - 1, rank, rank - bit))
    return found


def _turned(root: int, ranks: int, transfers: list[Transfer]) -> list[Transfer]:
    """Transfers of a tree whose rank 0 is `root`."""
    return [
        Transfer(step, (a + root) % ranks, (b + root) % ranks, leaves)
        for step, a, b, leaves in transfers
    ]


def _all_reduce(topology: Topology, _shard: int, _root: int, rank: int) -> list[Transfer]:
    depth = log2_ceiling(topology.ranks)
    up = _all_up(topology.ranks, rank)
    return up + backwards(up, depth, after=depth)


def _reduce(topology: Topology, _shard: int, root: int, rank: int) -> list[Transfer]:
    # To rank 0 first, for any root: from there the tree is the order.
    up = _all_up(topology.ranks, rank)
    if root and rank in (0, root):
        up.append(Transfer(log2_ceiling(topology.ranks), 0, root))
    return up


def _broadcast(topology: Topology, _shard: int, root: int, rank: int) -> list[Transfer]:
    n = topology.ranks
    up = _all_up(n, (rank - root) % n)
    return _turned(root, n, backwards(up, log2_ceiling(n)))


def _gather(topology: Topology, shard: int, root: int, rank: int) -> list[Transfer]:
    n = topology.ranks
    return _turned(root, n, _one_up((shard - root) % n, (rank - root) % n))


def _scatter(topology: Topology, shard: int, root: int, rank: int) -> list[Transfer]:
    n = topology.ranks
    up = _one_up((shard - root) % n, (rank - root) % n)
    return _turned(root, n, backwards(up, log2_ceiling(n)))


def _reduce_scatter(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    depth = log2_ceiling(topology.ranks)
    return _all_up(topology.ranks, rank) + later(_scatter(topology, shard, 0, rank), depth)


def _all_gather(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    depth = log2_ceiling(topology.ranks)
    down = backwards(_all_up(topology.ranks, rank), depth)
    # The ranks that the shard came through on its way up have it.
    lacking = [each for each in down if not _is_below(each.target, shard)]
    return _one_up(shard, rank) + later(lacking, depth)


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
)
