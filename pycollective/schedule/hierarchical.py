"""Hierarchical: reduce within each host, then across hosts, then back.

Each rank of a host carries its own part of the buffer across, so that every network card works. On
each host a shard has one carrier: its owner on the owner's host, elsewhere the rank with the
owner's place. Within a host leaves go straight to the carrier; between hosts, carriers hand their
host's node straight to the owner, or, from `FEW_HOSTS` on, by halving.

Where a host's ranks are an aligned block of the order, one node a host travels; otherwise more do,
and the bits are the same.
"""

from __future__ import annotations

from . import direct, halving_doubling
from .algorithm import Algorithm, a_shard_each
from .counts import Phases
from .hierarchical_counts import collect_count, spread_count
from .lower import Move
from .moves import backwards, later, on, without_repeats
from .topology import Topology

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


def _all_reduce_count(topology: Topology) -> Phases:
    there = collect_count(topology, FEW_HOSTS, to_owner=False)
    return there + spread_count(topology, FEW_HOSTS, from_owner=False)


HIERARCHICAL = Algorithm(
    "hierarchical",
    "within each host, then across hosts, then back; every rank carries its part across",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
    {
        "all_reduce": _all_reduce_count,
        "reduce_scatter": lambda topology: collect_count(topology, FEW_HOSTS, to_owner=True),
        "all_gather": lambda topology: spread_count(topology, FEW_HOSTS, from_owner=True),
    },
)
