"""Tree: reduce along a binomial tree to rank 0, and back.

Rank r hands what it has to ``r - (lowest bit of r)``. What it has then is always one node of the
order, for any number of ranks. ``2 log2 n`` steps of one message; the whole buffer in each.
"""

from __future__ import annotations

from collections.abc import Callable

from .algorithm import Algorithm, whole
from .counts import LEAF, NODE, RESULT, Load, Phases, Transfer, on_the_way_back, step
from .lower import Move
from .moves import backwards, later, log2_ceiling, without_repeats
from .topology import Topology


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


def _steps_count(topology: Topology, load: Callable[[int], Load], adds: float = 0) -> Phases:
    """Each step towards rank 0, with what is sent in that between ranks so far apart."""
    ranks = range(topology.ranks)
    distances = [1 << number for number in range(log2_ceiling(len(ranks)))]
    return tuple(
        step(
            topology,
            Transfer(ranks[distance :: 2 * distance], ranks[:: 2 * distance], load(distance)),
            adds=adds,
        )
        for distance in distances
    )


def _up_count(topology: Topology) -> Phases:
    # The first who hands over at a distance has as many leaves, or those up to the last rank.
    alone = 1, topology.ranks - 1
    return _steps_count(topology, lambda distance: LEAF if distance in alone else NODE, adds=1)


def _down_count(topology: Topology) -> Phases:
    return on_the_way_back(_up_count(topology))


def _gather_count(topology: Topology) -> Phases:
    n = topology.ranks
    return _steps_count(topology, lambda distance: RESULT.times(min(distance, n - distance) / n))


def _scatter_count(topology: Topology) -> Phases:
    return on_the_way_back(_gather_count(topology))


def _all_gather_count(topology: Topology) -> Phases:
    n = topology.ranks

    def lacked(distance: int) -> Load:
        last = n - 1 - (n - 1 - distance) % (2 * distance)  # of those who receive
        return RESULT.times(1 - min(distance, n - last) / n)

    return _gather_count(topology) + on_the_way_back(_steps_count(topology, lacked))


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
    {
        "all_reduce": lambda topology: _up_count(topology) + _down_count(topology),
        "reduce_scatter": lambda topology: _up_count(topology) + _scatter_count(topology),
        "all_gather": _all_gather_count,
        "reduce": _up_count,
        "broadcast": _down_count,
        "gather": _gather_count,
        "scatter": _scatter_count,
    },
)
