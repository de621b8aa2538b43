"""Places that the hierarchical algorithm needs, by formula.

What a rank needs of a shard that it carries follows from its host, and from how far the host goes
with the shard: by halving between hosts that depends on the low bits that its number has in common
with that of the owner's host (`halving_doubling_room.py`). So each host is looked at once, and each
of its ranks for how many shards of each kind it carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from pycollective.order import Node
from pycollective.schedule.algorithms.blocks import blocks
from pycollective.schedule.handing import Ranges, merged, nodes_of, ranges_of
from pycollective.schedule.topology import Topology


@lru_cache(maxsize=1 << 13)
def leaves_of(topology: Topology, first: int, end: int) -> Ranges:
    """The leaves of hosts `first` to ``end - 1``."""
    hosts = topology.hosts[first:end]
    return ranges_of(rank for host in hosts for rank in host)


def _carried(place: int, size: int, other: int) -> int:
    """Shards whose owner is on a host of `other` ranks, carried at a place of a host of `size`."""
    return (other - 1 - place) // size + 1 if place < other else 0


class _Need(NamedTuple):
    """What a shard needs, in places."""

    nodes: int
    items: int

    def plus(self, nodes: int, items: int) -> _Need:
        return _Need(self.nodes + nodes, self.items + items)


def _kinds(nodes: Iterable[Node]) -> _Need:
    """How many nodes, and how many leaves."""
    sizes = [hi - lo for lo, hi in nodes]
    leaves = sizes.count(1)
    return _Need(len(sizes) - leaves, leaves)


class _Hosts:
    """The hosts, and what each has on the way."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.count = len(topology.hosts)
        self.partials: dict[tuple[int, int, int], frozenset[Node]] = {}
        # By so many low bits of a host's number, and these bits: how many hosts of each size.
        sizes = [len(host) for host in topology.hosts]
        self.alike = [
            [Counter(sizes[low :: 1 << bits]) for low in range(1 << bits)]
            for bits in range(self.count.bit_length())
        ]

    def partial(self, first: int, end: int, beyond: int) -> frozenset[Node]:
        """The nodes of hosts `first` to ``end - 1``, and of those from `beyond` on."""
        key = first, end, beyond
        if key not in self.partials:
            leaves = leaves_of(self.topology, first, end)
            if beyond < self.count:
                leaves = merged((*leaves, *leaves_of(self.topology, beyond, self.count)))
            self.partials[key] = frozenset(nodes_of(leaves, self.topology.ranks))
        return self.partials[key]

    def halved(self, host: int, block: tuple[int, int], after: tuple[int, int]) -> list[_Need]:
        """What it takes to come to each step of halving, and to the end, on a host.

        Args:
            host: the host.
            block: first host and size of its binary block.
            after: of the next smaller block; of size 0 where there is none.
        """
        lo, size = block
        needs = [_Need(0, 0)]
        bit = 1
        while bit < size:
            needs.append(self._joined(needs[-1], host, bit, self.count, self.count))
            bit *= 2
        if not after[1]:
            last = needs[-1]
        else:
            last = needs[after[1].bit_length() - 1]
            for bit in (1 << step for step in range(after[1].bit_length() - 1, len(needs) - 1)):
                before = self.count if bit == after[1] else after[0]
                last = self._joined(last, host, bit, before, after[0])
        # In the largest block the last node is the result.
        return [*needs[:-1], last.plus(-(lo == 0), 0)]

    def _joined(self, need: _Need, host: int, bit: int, before: int, beyond: int) -> _Need:
        """With what a group of `bit` hosts takes from the next such group.

        Args:
            need: so far.
            host: of the group.
            bit: hosts of the group.
            before: the group has the leaves of hosts from here on as well,
            beyond: and afterwards those from here on: from the smaller blocks.
        """
        first, other = host & -bit, (host ^ bit) & -bit
        had = self.partial(first, first + bit, before)
        come = self.partial(other, other + bit, self.count)
        if beyond < before:
            come |= self.partial(beyond, self.count, self.count)
        both = self.partial(min(first, other), max(first, other) + bit, beyond)
        return need.plus(*_kinds(come)).plus(len(both - had - come), 0)

    def alike_to(self, number: int, bits: int, size: int, place: int) -> int:
        """Shards that a rank carries of owners on hosts whose numbers have these low bits.

        Args:
            number: with these low bits.
            bits: how many of them.
            size: of the rank's host.
            place: of the rank on it.
        """
        sizes = self.alike[bits][number & ((1 << bits) - 1)]
        return sum(count * _carried(place, size, other) for other, count in sizes.items())


def room(topology: Topology, few: int, reduces: bool, to_all: bool) -> tuple[int, int]:
    """Places for nodes and items: the most that any rank needs.

    Args:
        topology: of two ranks or more.
        few: up to so many hosts exchange directly.
        reduces: shards are reduced, not only moved.
        to_all: every rank must end with them, not only their owners.
    """
    hosts, n = _Hosts(topology), topology.ranks
    of_host = [_kinds(hosts.partial(host, host + 1, hosts.count)) for host in range(hosts.count)]
    together = _Need(*map(sum, zip(*of_host, strict=True)))
    row = blocks(hosts.count)
    nodes = items = 0
    for block, after in zip(row, [*row[1:], (0, 0)], strict=True):
        lo, size = block
        for host in range(lo, lo + size):
            needs: list[_Need] = []
            if reduces and hosts.count > few:
                needs = hosts.halved(host, block, after)
            ranks = len(topology.hosts[host])
            for place in range(ranks):
                carried = hosts.alike_to(0, 0, ranks, place)
                need = _Need(0, carried if to_all and ranks > 1 else 0)  # results for this host
                if reduces and ranks > 1:  # leaves for this host
                    need = need.plus(0, n - carried)
                if reduces and hosts.count > 1:
                    own = of_host[host]
                    need = need.plus(carried * own.nodes, 0)
                    if not needs:  # its own shard, from all other hosts
                        need = need.plus(together.nodes - own.nodes, together.items - own.items)
                left = carried
                for bits, each in enumerate(needs):
                    further = 0
                    if bits < len(needs) - 1:
                        further = hosts.alike_to(host - lo, bits + 1, ranks, place)
                    there = left - further  # shards that come so far
                    need = need.plus(there * each.nodes, there * each.items)
                    left = further
                if needs and not to_all and lo == 0:  # results for owners beyond the largest block
                    need = need.plus(0, there - 1)
                nodes, items = max(nodes, need.nodes), max(items, need.items)
    return nodes, items
