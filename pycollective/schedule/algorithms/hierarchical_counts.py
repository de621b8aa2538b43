"""What the hierarchical algorithm takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pycollective.schedule.algorithms.blocks import larger_neighbour, largest_block
from pycollective.schedule.algorithms.partials import Partial, add_to, message_of
from pycollective.schedule.counts import LEAF, NOTHING, RESULT, Load, Phase, Phases, ceil_div
from pycollective.schedule.topology import Topology


class _Hosts:
    """How shards are carried: on each host one rank carries a shard, all ranks about as many."""

    def __init__(self, topology: Topology) -> None:
        self.ranks = topology.ranks
        self.count = len(topology.hosts)
        self.sizes = [len(host) for host in topology.hosts]
        self.tally = Counter(self.sizes)
        # Ranks of a host that take what one rank of another carries, times those that carry.
        self.pairs = ceil_div(max(self.sizes), min(self.sizes)) * min(self.sizes)

    def most_carried(self, size: int) -> int:
        """Shards that one rank of a host of `size` carries, of those ranks the most."""
        return sum(count * ceil_div(other, size) for other, count in self.tally.items())

    def within(self, unit: Load) -> Load:
        """Each shard from all ranks of a host to the one that carries it, or back."""
        busiest = NOTHING
        for size in self.tally:
            if size > 1:
                taken = (size - 1) * self.most_carried(size)
                busiest = busiest.or_more(unit.times(taken / self.ranks, size - 1))
        return busiest

    def straight(self, partials: list[Load]) -> Load:
        """What each host has of a shard to the owner's host, or back."""
        together = NOTHING
        for partial in partials:
            together = together.plus(partial)
        busiest, messages = NOTHING, 0
        for size, partial in zip(self.sizes, partials, strict=True):
            given = partial.times((self.ranks - size) / self.ranks)
            taken = together.plus(partial.times(-1)).times(size / self.ranks)
            busiest = busiest.or_more(given).or_more(taken)
            # Each shard has another owner, so each is a message of its own.
            messages = max(messages, self.ranks - size + size * (self.count - 1))
        return Load(messages).plus(busiest.times(1, messages=0))

    def largest_class(self, classes: int) -> float:
        """The most of a buffer whose shards' owners are on every `classes`-th host."""
        return max(sum(self.sizes[first::classes]) for first in range(classes)) / self.ranks

    def halving(self, number: int, most: Load, done: Load) -> Load:
        """A step of `halving_doubling.halve` between hosts, or of the way back.

        Args:
            number: of the step.
            most: what a group of hosts has of a shard.
            done: what the block has that is done at this step, if there is one.
        """
        distance = 1 << number
        exchanged = self.largest_class(2 * distance)
        if not self.count & distance:
            return most.times(exchanged, 2 * self.pairs)
        load = most.times(exchanged, 3 * self.pairs)  # and from the block that is done, or to it
        several = larger_neighbour(self.count, distance) // distance * self.pairs
        return load.or_more(done.times(self.largest_class(distance), several))

    def steps(self) -> int:
        """Steps of `halving_doubling.halve` between hosts."""
        return largest_block(self.count).bit_length() - 1

    def to_owner(self) -> Phases:
        """The step after it, with which each shard comes to its owner."""
        if self.count == largest_block(self.count):
            return ()
        return (Phase(across=RESULT.times(max(self.sizes) / self.ranks, self.pairs)),)


class _Level(NamedTuple):
    """What the groups of hosts have at a step of halving between them.

    Attributes:
        most: the most that a group has of a shard.
        done: what the block of hosts that is done has, with all smaller ones, if there is one.
        adds: the most additions when two groups join.
    """

    most: Load
    done: Load
    adds: int


def _levels(groups: list[Partial], leaves: int) -> list[_Level]:
    """Each step of halving between hosts, whose partials are used up."""
    levels = []
    rest: Partial = set()
    while len(groups) > 1:
        most = max(map(message_of, groups), key=lambda load: load.weight)
        if len(groups) % 2:
            add_to(groups[-1], rest, leaves)
            rest = groups.pop()
        adds = [
            add_to(group, other, leaves)
            for group, other in zip(groups[::2], groups[1::2], strict=True)
        ]
        groups = groups[::2]
        if len(groups) % 2:  # a block that is complete, but for what was handed over to it
            adds[-1] += add_to(set(groups[-1]), rest, leaves)
        levels.append(_Level(most, message_of(rest), max(adds)))
    return levels


def collect_count(topology: Topology, few: int, to_owner: bool) -> Phases:
    """All leaves of each shard to its owner, or to whoever ends with them.

    Args:
        topology: which ranks share a host.
        few: up to so many hosts exchange directly.
        to_owner: it must be the owner.
    """
    n, hosts = topology.ranks, _Hosts(topology)
    partials: list[Partial] = [set() for _ in topology.hosts]
    phases = []
    within = [
        add_to(partial, ((rank, rank + 1) for rank in host), n)
        for partial, host in zip(partials, topology.hosts, strict=True)
    ]
    if hosts.count < n:
        adds = max(
            adds * hosts.most_carried(size)
            for adds, size in {*zip(within, hosts.sizes, strict=True)}
        )
        phases.append(Phase(local=hosts.within(LEAF), adds=adds / n))
    if hosts.count == 1:
        return tuple(phases)
    if hosts.count <= few:
        together = sum(map(len, partials))
        across = hosts.straight([message_of(partial) for partial in partials])
        return *phases, Phase(across=across, adds=(together - 1) / n)
    for number, level in enumerate(_levels(partials, n)):
        # Of what its host has, the rank of the smallest host carries most.
        carried = hosts.largest_class(2 << number) / min(hosts.sizes)
        across = hosts.halving(number, level.most, level.done)
        phases.append(Phase(across=across, adds=level.adds * carried))
    return *phases, *(hosts.to_owner() if to_owner else ())


def spread_count(topology: Topology, few: int, from_owner: bool) -> Phases:
    """The way back of `collect_count`, on which results travel."""
    hosts = _Hosts(topology)
    phases: list[Phase] = []
    if hosts.count < topology.ranks:
        phases.append(Phase(local=hosts.within(RESULT)))
    if hosts.count == 1:
        return tuple(phases)
    if hosts.count <= few:
        phases.append(Phase(across=hosts.straight([RESULT] * hosts.count)))
    else:
        phases += [
            Phase(across=hosts.halving(number, RESULT, RESULT)) for number in range(hosts.steps())
        ]
        phases += hosts.to_owner() if from_owner else ()
    return tuple(phases[::-1])
