"""Who reduces what: a tensor's shards, their ranks, and what crosses to other hosts for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pycollective.leaves.deal import Deal
from pycollective.order import Node, held


@dataclass(frozen=True)
class Shard:
    """Elements that one rank reduces.

    Attributes:
        host, rail: the rank is number ``rail`` of that host.
        begin, end: where its leaves lie in every rank's input.
        at: where its result lies in the output.
        rank: who keeps the result; None for all.
    """

    host: int
    rail: int
    begin: int
    end: int
    at: int
    rank: int | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """How the ranks of a group stand to each other.

    The ranks with the same number on each host are a *rail*. A rail reduces the same shards, so
    only its ranks exchange with other hosts. Hosts with more ranks than the smallest have some
    that reduce nothing.

    Attributes:
        rank: this one.
        hosts: the ranks of each host, ascending. One rank a host: all exchange with all.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        return next(h for h, ranks in enumerate(self.hosts) if self.rank in ranks)

    @cached_property
    def apart(self) -> bool:
        """Whether every rank stands for itself, so that leaves travel and no sums."""
        return len(self.hosts) == self.size

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @cached_property
    def index(self) -> int:
        """This rank's number on its host."""
        return self.local.index(self.rank)

    @cached_property
    def peers_of_rail(self) -> tuple[int, ...]:
        """The rank of this one's rail on each host; none where it has no rail."""
        on_rail = self.index < self.rails
        return tuple(ranks[self.index] for ranks in self.hosts) if on_rail else ()

    @cached_property
    def rails(self) -> int:
        return min(map(len, self.hosts))

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """What each host has of the order: leaves or sums of them, ascending."""
        return tuple(tuple(held(ranks, self.size)) for ranks in self.hosts)

    def nodes_of(self, deal: Deal) -> tuple[tuple[Node, ...], ...]:
        """What each host has of the order where ranks give what a deal says."""
        if self.apart:
            return tuple(tuple(deal.nodes(rank)) for (rank,) in self.hosts)
        given = [[run for rank in ranks for run in deal.held[rank]] for ranks in self.hosts]
        leaves = [[leaf for run in runs for leaf in range(*run)] for runs in given]
        return tuple(tuple(held(each, deal.leaves)) for each in leaves)

    def most_messages(self, kind: str) -> int:
        """How many messages one rank sends another in one round of a call, at most."""
        nodes = max(map(len, self.nodes))
        if kind == "all_reduce":
            return nodes
        shards = -(-max(map(len, self.hosts)) // self.rails)  # of a host and a rail
        return shards * max(len(self.hosts), nodes)

    def owner(self, shard: Shard) -> int:
        """The rank that reduces it."""
        return self.hosts[shard.host][shard.rail]

    def shards_of(self, begin: int, end: int, unit: int = 1) -> list[Shard]:
        """Cut elements into a shard for each rank that reduces, whose results all ranks keep.

        Those of a rail are neighbours. They begin `unit` elements apart, or a multiple of that.
        Sizes differ by less than two units, and by one element where that is the unit; some may
        be empty.
        """
        parts, hosts = self.rails * len(self.hosts), len(self.hosts)
        cuts = [begin + (end - begin) * i // parts // unit * unit for i in range(parts)] + [end]
        return [Shard(i % hosts, i // hosts, cuts[i], cuts[i + 1], cuts[i]) for i in range(parts)]

    def shards_for_ranks(self, each: int, begin: int, end: int) -> list[Shard]:
        """Elements `begin` to `end` of each rank's `each` elements, which that rank keeps."""
        shards = [
            Shard(h, i % self.rails, rank * each + begin, rank * each + end, begin, rank)
            for h, ranks in enumerate(self.hosts)
            for i, rank in enumerate(ranks)
        ]
        return sorted(shards, key=lambda shard: shard.begin)


def spans(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """The elements of shards, ascending, neighbours as one: (begin, end)."""
    found: list[tuple[int, int]] = []
    for shard in sorted(shards, key=lambda each: each.begin):
        if found and found[-1][1] == shard.begin:
            found[-1] = found[-1][0], shard.end
        elif shard.size:
            found.append((shard.begin, shard.end))
    return found


def offsets(shards: Sequence[Shard]) -> list[int]:
    """Where each shard begins when all lie one behind the other, and where the last one ends."""
    return list(accumulate((each.size for each in shards), initial=0))


def inter_host_bytes(layout: Layout, host_of: Sequence[int], leaf: int, node: int) -> float:
    """Bytes an element of an all-reduce that leave hosts by this layout, of all hosts together.

    Args:
        layout: of any rank.
        host_of: the host of each rank.
        leaf: bytes of an element of a leaf.
        node: bytes of one of a sum.
    """
    total = 0.0
    share = 1 / (layout.rails * len(layout.hosts))
    for h, ranks in enumerate(layout.hosts):
        for others in layout.hosts:
            for rail in range(layout.rails):
                if host_of[ranks[rail]] != host_of[others[rail]]:
                    term = leaf if layout.apart else node * len(layout.nodes[h])
                    total += share * (term + leaf)
    return total


def layout_of(rank: int, host_of: Sequence[int]) -> Layout:
    """The layout by which the fewest bytes leave hosts.

    Args:
        rank: this one.
        host_of: the host of each rank, as all ranks know it.
    """
    size = len(host_of)
    apart = Layout(rank, tuple((each,) for each in range(size)))
    hosts = dict.fromkeys(host_of)
    by_host = Layout(
        rank, tuple(tuple(r for r in range(size) if host_of[r] == host) for host in hosts)
    )
    if len(hosts) == 1 or inter_host_bytes(apart, host_of, 2, 4) <= inter_host_bytes(
        by_host, host_of, 2, 4
    ):
        return apart
    return by_host
