"""Direct: every rank sends each shard straight to its owner, who sends the result to all.

Two steps, and the fewest bytes that an all-reduce can do with, because only inputs and results
travel; but n - 1 messages a rank in each step.
"""

from __future__ import annotations

from pycollective.schedule.algorithms.base import Algorithm, Room, a_shard_each
from pycollective.schedule.algorithms.direct_counts import COUNTS
from pycollective.schedule.algorithms.patterns import later
from pycollective.schedule.handing import Handing
from pycollective.schedule.handing import later as later_handings
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology


def collect(ranks: int, owner: int) -> list[Move]:
    """All ranks' leaves to `owner`; one step."""
    return [Move(0, rank, owner) for rank in range(ranks) if rank != owner]


def spread(ranks: int, owner: int) -> list[Move]:
    """The shard from `owner` to all; one step."""
    return [Move(0, owner, rank) for rank in range(ranks) if rank != owner]


def _straight(source: int, target: int) -> list[Move]:
    return [Move(0, source, target)] if source != target else []


def _all_reduce(topology: Topology, shard: int, _root: int) -> list[Move]:
    return collect(topology.ranks, shard) + later(spread(topology.ranks, shard), 1)


def _reduce(topology: Topology, shard: int, root: int) -> list[Move]:
    return collect(topology.ranks, shard) + later(_straight(shard, root), 1)


def _all_to_all(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _straight(*divmod(shard, topology.ranks))


def collect_of(ranks: int, owner: int, rank: int) -> list[Handing]:
    """Those of `collect` that touch `rank`."""
    if rank != owner:
        return [Handing(0, rank, owner, ((rank, rank + 1),))]
    return [
        Handing(0, other, owner, ((other, other + 1),)) for other in range(ranks) if other != owner
    ]


def spread_of(ranks: int, owner: int, rank: int) -> list[Handing]:
    """Those of `spread` that touch `rank`."""
    if rank != owner:
        return [Handing(0, owner, rank, None)]
    return [Handing(0, owner, other, None) for other in range(ranks) if other != owner]


def _straight_of(source: int, target: int, rank: int) -> list[Handing]:
    touches = source != target and rank in (source, target)
    return [Handing(0, source, target, None)] if touches else []


def _all_reduce_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    n = topology.ranks
    if rank != shard:
        return [Handing(0, rank, shard, ((rank, rank + 1),)), Handing(1, shard, rank, None)]
    return collect_of(n, shard, rank) + later_handings(spread_of(n, shard, rank), 1)


def _reduce_of(topology: Topology, shard: int, root: int, rank: int) -> list[Handing]:
    back = later_handings(_straight_of(shard, root, rank), 1)
    return collect_of(topology.ranks, shard, rank) + back


def _all_to_all_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    source, target = divmod(shard, topology.ranks)
    return _straight_of(source, target, rank)


def _all_reduce_room(topology: Topology, _root: int) -> Room:
    """Of a rank's own shard others' leaves from other hosts; of others' its leaf for this host.

    And the result, for this host.
    """
    return Room(0, topology.ranks - 1 + (topology.widest > 1), 2)


def _reduce_room(topology: Topology, _root: int) -> Room:
    return Room(0, topology.ranks, 2)  # the result too, but of the root's own shard


def _each_other(topology: Topology, _root: int) -> Room:
    """A leaf, or data that is moved, for or from each other rank."""
    return Room(0, topology.ranks - 1, 1)


def _at_root(topology: Topology, root: int) -> int:
    return len(topology.hosts[topology.host_of[root]])


_HANDINGS = {
    "all_reduce": _all_reduce_of,
    "reduce_scatter": lambda topology, shard, _, rank: collect_of(topology.ranks, shard, rank),
    "all_gather": lambda topology, shard, _, rank: spread_of(topology.ranks, shard, rank),
    "reduce": _reduce_of,
    "broadcast": lambda topology, _, root, rank: spread_of(topology.ranks, root, rank),
    "gather": lambda _, shard, root, rank: _straight_of(shard, root, rank),
    "scatter": lambda _, shard, root, rank: _straight_of(root, shard, rank),
    "all_to_all": _all_to_all_of,
}

# What goes to a rank of another host is sent from the input, but where that may be the output.
_ROOM = {
    "all_reduce": _all_reduce_room,
    "reduce_scatter": _each_other,
    "all_gather": lambda topology, _: Room(0, int(topology.widest > 1), 1),
    "reduce": _reduce_room,
    "gather": lambda topology, root: Room(0, int(_at_root(topology, root) > 1), 1),
    "scatter": lambda topology, root: Room(0, _at_root(topology, root) - 1, 1),
    "all_to_all": _each_other,
}

DIRECT = Algorithm(
    "direct",
    "inputs straight to the owner of each shard, results straight to all",
    a_shard_each,
    {
        "all_reduce": _all_reduce,
        "reduce_scatter": lambda topology, shard, _: collect(topology.ranks, shard),
        "all_gather": lambda topology, shard, _: spread(topology.ranks, shard),
        "reduce": _reduce,
        "broadcast": lambda topology, _, root: spread(topology.ranks, root),
        "gather": lambda _, shard, root: _straight(shard, root),
        "scatter": lambda _, shard, root: _straight(root, shard),
        "all_to_all": _all_to_all,
    },
    _HANDINGS,
    _ROOM,
    COUNTS,
)
