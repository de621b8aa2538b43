"""What recursive doubling takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from pycollective.schedule.algorithms.blocks import largest_block
from pycollective.schedule.algorithms.partials import Partial, add_to, message_of
from pycollective.schedule.algorithms.patterns import log2_ceiling
from pycollective.schedule.counts import (
    LEAF,
    RESULT,
    Load,
    Phase,
    Phases,
    Transfer,
    on_the_way_back,
    step,
)
from pycollective.schedule.topology import Topology


def _exchange_count(partials: list[Partial], leaves: int) -> list[tuple[int, Load, int]]:
    """Each step of `_exchange`: messages of the busiest, both ways; what one carries; adds."""
    p = largest_block(len(partials))
    folded = partials[p:]
    groups = [set(partial) for partial in partials[:p]]
    steps = []
    if folded:
        most = max(map(message_of, folded), key=lambda load: load.weight)
        adds = max(
            add_to(group, partial, leaves) for group, partial in zip(groups, folded, strict=False)
        )
        steps.append((1, most, adds))
    while len(groups) > 1:
        most = max(map(message_of, groups), key=lambda load: load.weight)
        adds = max(
            add_to(group, other, leaves)
            for group, other in zip(groups[::2], groups[1::2], strict=True)
        )
        groups = groups[::2]
        steps.append((2, most, adds))
    return steps


def _all_reduce_count(topology: Topology) -> Phases:
    n, hosts = topology.ranks, topology.hosts
    if topology.single:
        exchanged = _exchange_count([{(rank, rank + 1)} for rank in range(n)], n)
        there = [Phase(local=load, adds=adds) for _, load, adds in exchanged]
        return (*there, *((Phase(local=RESULT),) if n > largest_block(n) else ()))
    partials: list[Partial] = [set() for _ in hosts]
    within = max(
        add_to(partial, ((rank, rank + 1) for rank in host), n)
        for partial, host in zip(partials, hosts, strict=True)
    )
    there = [
        Phase(across=Load(messages).plus(load.times(1, messages=0)), adds=adds)
        for messages, load, adds in _exchange_count(partials, n)
    ]
    if len(hosts) > largest_block(len(hosts)):
        there.append(Phase(across=RESULT))
    taken = topology.widest - 1
    if not taken:
        return tuple(there)
    first = Phase(local=LEAF.times(taken, taken), adds=within)
    return (first, *there, *on_the_way_back((first,)))


def _all_gather_count(topology: Topology) -> Phases:
    n = topology.ranks
    ranks = range(n)
    phases = []
    for distance in (1 << number for number in range(log2_ceiling(n))):
        targets = [*ranks[-distance:], *ranks[:-distance]]
        load = RESULT.times(min(distance, n - distance) / n)
        phases.append(step(topology, Transfer(ranks, targets, load)))
    return tuple(phases)


COUNTS = {"all_reduce": _all_reduce_count, "all_gather": _all_gather_count}
