"""Hierarchical: reduce within each host, then across hosts, then back.

Each rank of a host carries its own part of the buffer across, so that every network card works. On
each host a shard has one carrier: its owner on the owner's host, elsewhere the rank with the
owner's place. Within a host inputs go straight to the carrier; between hosts, carriers send their
host's node straight to the owner, or, from `FEW_HOSTS` on, by halving.

Where a host's ranks are an aligned block of the order, one node a host travels; otherwise more do,
and the bits are the same.
"""

from __future__ import annotations

from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import (
    Algorithm,
    Transfer,
    a_shard_each,
    backwards,
    leaf,
    leaves_of_hosts,
    not_to,
)

from . import direct, halving_doubling

# With so many, a message to each costs more than the steps that halving takes.
FEW_HOSTS = 8


def _across_steps(hosts: int, to_owner: bool) -> int:
    """Steps that `_across` takes."""
    if hosts <= FEW_HOSTS:
        return int(hosts > 1)
    return (halving_doubling.collect_steps if to_owner else halving_doubling.halving_steps)(hosts)


def _across(hosts: int, home: int, host: int, to_owner: bool) -> list[Transfer]:
    """What `host` sends and receives to collect a shard at host `home`, or near it.

    Leaves are hosts.
    """
    if hosts == 1:
        return []
    if hosts <= FEW_HOSTS:
        return direct.collect(hosts, home, host)
    if to_owner:
        return halving_doubling.collect(hosts, home, host)
    return halving_doubling.halve(hosts, home, host)


def _collect(
    topology: Topology, owner: int, rank: int, to_owner: bool
) -> tuple[list[Transfer], int]:
    """All inputs of a shard to rank `owner`, or to a carrier of it elsewhere; the steps of all."""
    hosts = topology.hosts
    place = topology.local_index[owner]
    host = topology.host_of[rank]
    members = hosts[host]
    carrier = members[place % len(members)]
    steps = 1 + _across_steps(len(hosts), to_owner)
    if rank != carrier:
        return [Transfer(0, rank, carrier, leaf(rank))], steps
    found = [Transfer(0, each, rank, leaf(each)) for each in members if each != rank]
    for step, a, b, group in _across(len(hosts), topology.host_of[owner], host, to_owner):
        source, target = hosts[a][place % len(hosts[a])], hosts[b][place % len(hosts[b])]
        leaves = None if group is None else leaves_of_hosts(topology, *group[0])
        found.append(Transfer(1 + step, source, target, leaves))
    return found, steps


def _all_reduce(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    # The rank that ends with the result spreads it: it need not be the owner.
    there, steps = _collect(topology, shard, rank, to_owner=False)
    return there + backwards(there, steps, after=steps)


def _reduce_scatter(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    return _collect(topology, shard, rank, to_owner=True)[0]


def _all_gather(topology: Topology, shard: int, _root: int, rank: int) -> list[Transfer]:
    return not_to(shard, backwards(*_collect(topology, shard, rank, to_owner=True)))


HIERARCHICAL = Algorithm(
    "hierarchical",
    "within each host, then across hosts, then back; every rank carries its part across",
    a_shard_each,
    {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
)
