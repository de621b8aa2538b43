"""Hierarchical: reduce within each host, then across hosts, then back.

Each rank of a host carries its own part of the buffer across, so that every network card works. On
each host a shard has one carrier: its owner on the owner's host, elsewhere the rank with the
owner's place. Within a host leaves go straight to the carrier; between hosts, carriers hand their
host's node straight to the owner, or, from `FEW_HOSTS` on, by halving.

Where a host's ranks are an aligned block of the order, one node a host travels; otherwise more do,
and the bits are the same.
"""

from __future__ import annotations

from functools import lru_cache

from pycollective.schedule import handing
from pycollective.schedule.algorithms import direct, halving_doubling
from pycollective.schedule.algorithms.base import Algorithm, Room, a_shard_each
from pycollective.schedule.algorithms.hierarchical_counts import collect_count, spread_count
from pycollective.schedule.algorithms.hierarchical_room import leaves_of, room
from pycollective.schedule.algorithms.patterns import backwards, later, on, without_repeats
from pycollective.schedule.counts import Phases
from pycollective.schedule.handing import Handing
from pycollective.schedule.lower import Move
from pycollective.schedule.topology import Topology

# With so many, a message to each costs more than the steps that halving takes.
FEW_HOSTS = 8


def _across(hosts: int, home: int, to_owner: bool) -> tuple[list[Move], int]:
    """Moves between hosts that collect a shard at host `home`, or near it, and their steps."""
    if hosts == 1:
        return [], 0
    if hosts <= FEW_HOSTS:
        return direct.collect(hosts, home), 1
    if to_owner:
        return halving_doubling.collect(hosts, home), halving_doubling.collect_steps(hosts)
    return halving_doubling.halve(hosts, home), halving_doubling.halving_steps(hosts)


def _collect(topology: Topology, owner: int, to_owner: bool) -> tuple[list[Move], int]:
    """All leaves of a shard to rank `owner`, or to a carrier of it elsewhere; and the steps."""
    hosts = topology.hosts
    place = topology.local_index[owner]
    home = topology.host_of[owner]
    carriers = tuple(members[place % len(members)] for members in hosts)
    moves = [
        Move(0, rank, carrier)
        for members, carrier in zip(hosts, carriers, strict=True)
        for rank in members
        if rank != carrier
    ]
    across, steps = _across(len(hosts), home, to_owner)
    return moves + later(on(carriers, across), 1), 1 + steps


def _reduce_scatter(topology: Topology, shard: int, _root: int) -> list[Move]:
    return _collect(topology, shard, to_owner=True)[0]


def _all_gather(topology: Topology, shard: int, _root: int) -> list[Move]:
    return without_repeats(shard, backwards(*_collect(topology, shard, to_owner=True)))


def _all_reduce(topology: Topology, shard: int, _root: int) -> list[Move]:
    # Whoever ends with the root spreads it: nobody asks for it to be at the shard's owner.
    moves, steps = _collect(topology, shard, to_owner=False)
    return moves + later(backwards(moves, steps), steps)


@lru_cache(maxsize=16)
def _across_steps(hosts: int, to_owner: bool) -> int:
    return _across(hosts, 0, to_owner)[1]


def _across_of(hosts: int, home: int, host: int, to_owner: bool) -> list[Handing]:
    """Those of `_across` that touch `host`."""
    if hosts == 1:
        return []
    if hosts <= FEW_HOSTS:
        return direct.collect_of(hosts, home, host)
    if to_owner:
        return halving_doubling.collect_of(hosts, home, host)
    return halving_doubling.halve_of(hosts, home, host)


def _collect_of(
    topology: Topology, owner: int, rank: int, to_owner: bool
) -> tuple[list[Handing], int]:
    """Those of `_collect` that touch `rank`, and the steps of all."""
    hosts = topology.hosts
    place = topology.local_index[owner]
    host = topology.host_of[rank]
    members = hosts[host]
    carrier = members[place % len(members)]
    steps = 1 + _across_steps(len(hosts), to_owner)
    if rank != carrier:
        return [Handing(0, rank, carrier, ((rank, rank + 1),))], steps
    across = _across_of(len(hosts), topology.host_of[owner], host, to_owner)
    found = [Handing(0, each, rank, ((each, each + 1),)) for each in members if each != rank]
    for step, a, b, groups in across:
        source, target = hosts[a][place % len(hosts[a])], hosts[b][place % len(hosts[b])]
        leaves = None if groups is None else leaves_of(topology, *groups[0])
        found.append(Handing(1 + step, source, target, leaves))
    return found, steps


def _all_reduce_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    there, steps = _collect_of(topology, shard, rank, to_owner=False)
    return there + handing.backwards(there, steps, after=steps)


def _reduce_scatter_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    return _collect_of(topology, shard, rank, to_owner=True)[0]


def _all_gather_of(topology: Topology, shard: int, _root: int, rank: int) -> list[Handing]:
    back = handing.backwards(*_collect_of(topology, shard, rank, to_owner=True))
    return handing.not_to(shard, back)


def _all_reduce_room(topology: Topology, _root: int) -> Room:
    steps = 2 + 2 * _across_steps(len(topology.hosts), to_owner=False)
    nodes, items = room(topology, FEW_HOSTS, reduces=True, to_all=True)
    return Room(nodes, items, steps - (topology.widest == 1))  # the last step is nobody's


def _reduce_scatter_room(topology: Topology, _root: int) -> Room:
    nodes, items = room(topology, FEW_HOSTS, reduces=True, to_all=False)
    return Room(nodes, items, 1 + _across_steps(len(topology.hosts), to_owner=True))


def _all_gather_room(topology: Topology, _root: int) -> Room:
    nodes, items = room(topology, FEW_HOSTS, reduces=False, to_all=True)
    return Room(
        nodes, items, 1 + _across_steps(len(topology.hosts), to_owner=True) - (topology.widest == 1)
    )


def _all_reduce_count(topology: Topology) -> Phases:
    there = collect_count(topology, FEW_HOSTS, to_owner=False)
    return there + spread_count(topology, FEW_HOSTS, from_owner=False)


HIERARCHICAL = Algorithm(
    "hierarchical",
    "within each host, then across hosts, then back; every rank carries its part across",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
    {
        "all_reduce": _all_reduce_of,
        "reduce_scatter": _reduce_scatter_of,
        "all_gather": _all_gather_of,
    },
    {
        "all_reduce": _all_reduce_room,
        "reduce_scatter": _reduce_scatter_room,
        "all_gather": _all_gather_room,
    },
    {
        "all_reduce": _all_reduce_count,
        "reduce_scatter": lambda topology: collect_count(topology, FEW_HOSTS, to_owner=True),
        "all_gather": lambda topology: spread_count(topology, FEW_HOSTS, from_owner=True),
    },
)
