"""Places that halving-doubling needs, by formula.

How far a rank goes with a shard depends on the low bits that its number within its block has in
common with the shard's: with k of them it makes k nodes, and hands the last one on in step k, or,
where k are all, to the next larger block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycollective.schedule.algorithms.base import Room
from pycollective.schedule.algorithms.blocks import blocks, largest_block
from pycollective.schedule.topology import Topology


@dataclass
class _Rank:
    """Whom a rank exchanges with, and of how many shards.

    Attributes:
        rank: its number.
        lo, size: its binary block.
        shards: number of shards.
        near: by step, whether that step's partner is on the same host.
        hands: by step, the shards of which it hands what it has to that partner; the partner hands
            it as many or one more.
        ends: the shards that its block collects here.
        smaller: the rank that hands it what the smaller blocks have, if there are any.
        from_smaller: whether that one is on the same host.
    """

    rank: int
    lo: int
    size: int
    shards: int
    near: list[bool]
    hands: list[int]
    ends: int
    smaller: int | None
    from_smaller: bool

    @property
    def takes(self) -> Iterator[tuple[int, int, bool]]:
        """Of each step: its number, the shards of which it is handed something, and `near`."""
        left = self.shards
        for step, (given, near) in enumerate(zip(self.hands, self.near, strict=True)):
            left -= given
            yield step, left, near

    def spreads(self) -> int:
        """Shards of which it sends the result to a rank of its host, on the way back.

        It sends it to all who handed it something: nobody in its block but those before the step in
        which it handed it on itself.
        """
        first = next((step for step, near in enumerate(self.near) if near), len(self.near))
        of_block = sum(self.hands[first + 1 :])
        return of_block + (self.ends if True in self.near or self.from_smaller else 0)


def _ranks(topology: Topology, shards: int) -> Iterator[_Rank]:
    n, host_of = topology.ranks, topology.host_of
    row = blocks(n)
    for (lo, size), after in zip(row, [*row[1:], None], strict=True):
        for place in range(size):
            near, hands = [], []
            left, bit = shards, 1
            host = host_of[lo + place]
            while bit < size:
                # Shards whose low bits are as the rank's, one bit more each time.
                alike = (shards - 1 - place % (2 * bit)) // (2 * bit) + 1
                near.append(host_of[lo + (place ^ bit)] == host)
                hands.append(left - alike)
                left = alike
                bit *= 2
            giver = after[0] + place % after[1] if after else None
            from_near = giver is not None and host_of[giver] == host
            yield _Rank(lo + place, lo, size, shards, near, hands, left, giver, from_near)


def _to_halve(topology: Topology, own: _Rank) -> tuple[int, int]:
    """Places for nodes and for leaves, but for the result."""
    n, host_of = topology.ranks, topology.host_of
    nodes = items = 0
    for step, shards, near in own.takes:
        nodes += shards  # the node that it makes
        if step == 0:  # a leaf that comes from afar, or goes to a neighbour
            items += own.hands[0] if near else shards
        elif not near:
            nodes += shards
    if own.lo == 0:
        nodes -= own.ends  # the last node is the result
    if own.smaller is not None and not own.from_smaller:
        if own.lo + own.size == n - 1:
            items += own.ends
        else:
            nodes += own.ends
    if own.size == 1:  # the last rank: its leaf goes straight to the next block
        first, size = blocks(n)[-2]
        host = host_of[own.rank]
        items += sum(
            host_of[first + place] == host and (own.shards - 1 - place) // size + 1
            for place in range(size)
        )
    return nodes, items


def _all_reduce(topology: Topology, _root: int) -> Room:
    block = largest_block(topology.ranks)
    nodes = items = 0
    for own in _ranks(topology, block):
        needed = _to_halve(topology, own)
        nodes, items = max(nodes, needed[0]), max(items, needed[1] + own.spreads())
    return Room(nodes, items, 2 * (block.bit_length() - 1))


def _steps(ranks: int) -> int:
    """Steps of halving, and the one to owners beyond the largest block."""
    block = largest_block(ranks)
    return block.bit_length() - 1 + (ranks != block)


def _reduce_scatter(topology: Topology, _root: int) -> Room:
    n = topology.ranks
    block = largest_block(n)
    nodes = items = 0
    for own in _ranks(topology, n):
        needed = _to_halve(topology, own)
        passed_on = own.rank + block < n  # the result of a shard whose owner is beyond the block
        nodes, items = max(nodes, needed[0]), max(items, needed[1] + passed_on)
    return Room(nodes, items, _steps(n))


def _all_gather(topology: Topology, _root: int) -> Room:
    n, host_of = topology.ranks, topology.host_of
    block = largest_block(n)
    items = 0
    for own in _ranks(topology, n):
        spread = own.spreads()
        if True not in own.near:
            if own.from_smaller and own.smaller is not None:
                # The shard that is that one's own does not go back to it.
                spread -= own.smaller % own.size == own.rank - own.lo
            elif own.rank >= block:  # its own shard goes to the block from which it is spread
                spread += host_of[own.rank - block] == host_of[own.rank]
        items = max(items, spread)
    return Room(0, items, _steps(n))


ROOM = {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather}
