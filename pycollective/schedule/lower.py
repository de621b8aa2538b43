"""From moves to steps: follows the partials of one shard through an algorithm's moves.

A **partial** is a set of finished nodes of the order, each with its buffer. A move sends what the
target lacks of the source's partial. Where the target then holds two siblings, they are combined,
and so on upwards; so whoever holds all leaves holds the root, and finishes it. This is the only
place that knows partials: what comes out are steps over buffers (`steps.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from pycollective.order import Node, split

from .operation import Operation
from .steps import INPUT, OUTPUT, Combine, Copy, RankSteps, Receive, Send, Step, Type


class Move(NamedTuple):
    """At `step`, `source` hands `target` what it has of the shard and `target` lacks."""

    step: int
    source: int
    target: int


class ScheduleError(AssertionError):
    """An algorithm's moves make no sense: a fault of the algorithm, never of its user."""


# By name here, since a member of an enum takes longer to find than the rest of a line.
_LEAF, _NODE, _RESULT = Type.LEAF, Type.NODE, Type.RESULT

Family = dict[Node, tuple[Node | None, Node]]
_MADE = -1  # stands for the buffer of a node that is still to be combined


@lru_cache(maxsize=4)
def family_of(leaves: int) -> Family:
    """Each node's sibling and parent, made once since they are asked for millions of times."""
    root = 0, leaves
    found: Family = {root: (None, root)}
    below = [root]
    while below:
        node = lo, hi = below.pop()
        if hi - lo > 1:
            middle = split(lo, hi)
            left, right = (lo, middle), (middle, hi)
            found[left], found[right] = (right, node), (left, node)
            below += left, right
    return found


class Holding:
    """What one rank has of the shard, and its steps so far."""

    __slots__ = ("nodes", "result", "steps", "types", "wants")

    def __init__(self, wants: bool) -> None:
        self.nodes: dict[Node, int] = {}  # the partial: each node's buffer
        self.result: int | None = None  # buffer
        self.wants = wants
        self.steps: list[Step] = []
        self.types = [_LEAF, _RESULT]  # INPUT, OUTPUT

    def begin(self, reduces: bool, rank: int, ranks: int) -> None:
        """Have an input: a leaf, or what is only moved."""
        if reduces:
            leaf = rank, rank + 1
            self.nodes[leaf] = INPUT
            if ranks == 1:
                self.combine(-1, leaf, [(leaf, INPUT)], finish=True)
            return
        self.types[INPUT] = _RESULT
        self.result = INPUT
        if self.wants:
            self.steps.append(Copy(-1, OUTPUT, INPUT))

    def all_buffers(self) -> tuple[int, ...]:
        """All that it has: the result, or else the nodes, ascending."""
        if self.result is not None:
            return (self.result,)
        if len(self.nodes) == 1:
            return tuple(self.nodes.values())
        return tuple([self.nodes[node] for node in sorted(self.nodes)])

    def new(self, kind: Type) -> int:
        """A new buffer; for the result the output, where that is wanted."""
        if kind is _RESULT and self.wants:
            return OUTPUT
        self.types.append(kind)
        return len(self.types) - 1

    def make_room(
        self, source: Holding, arrived: dict[Node, int], move: Move
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Buffers for the nodes that `source` has and this has not: theirs, and the new ones."""
        mine, nodes, types = self.nodes, source.nodes, self.types
        sent = []
        first = len(types)
        for node in sorted(nodes) if len(nodes) > 1 else nodes:
            if node in mine:
                continue
            if node in arrived:
                raise ScheduleError(f"{move} brings node {node} a second time")
            buffer = nodes[node]
            sent.append(buffer)
            arrived[node] = len(types)
            types.append(source.types[buffer])
        if not sent:
            raise ScheduleError(f"{move} carries nothing")
        return tuple(sent), tuple(range(first, len(types)))

    def add(self, step: int, arrived: dict[Node, int], family: Family) -> None:
        """Take in nodes; combine siblings, as far up as it goes."""
        nodes = self.nodes
        made: list[Node] = []
        operands: list[tuple[Node, int]] = []
        for node, buffer in arrived.items():
            other, above = family[node]
            if other not in nodes:
                nodes[node] = buffer
                continue
            operands.append((node, buffer))
            while other in nodes:
                buffer = nodes.pop(other)
                if buffer == _MADE:  # of operands that are in the list
                    made.remove(other)
                else:
                    operands.append((other, buffer))
                node = above
                other, above = family[node]
            nodes[node] = _MADE
            made.append(node)
        operands.sort()
        made.sort()
        for node in made:
            end = bisect_left(operands, ((node[1], 0), 0)) if len(made) > 1 else len(operands)
            self.combine(step, node, operands[:end], finish=family[node][0] is None)
            del operands[:end]

    def combine(
        self, step: int, node: Node, operands: list[tuple[Node, int]], finish: bool
    ) -> None:
        """Compute a node; the root is the result as well."""
        out = self.nodes[node] = self.new(_RESULT if finish else _NODE)
        self.steps.append(Combine(step, out, node, tuple(operands), finish))
        if finish:
            self.result = out


class _Holdings(dict[int, Holding]):
    """Of each rank that has anything to do with the shard."""

    def __init__(self, wanted: range) -> None:
        super().__init__()
        self.wanted = wanted

    def __missing__(self, rank: int) -> Holding:
        own = self[rank] = Holding(rank in self.wanted)
        return own


def lower(
    operation: Operation, shard: int, ranks: int, root: int, moves: Iterable[Move]
) -> dict[int, RankSteps]:
    """The steps of each rank that has any, for one shard.

    Args:
        operation: what is asked of the shard.
        shard: its number.
        ranks: number of ranks.
        root: of the operation, where it has one.
        moves: the algorithm's, in any order.

    Raises:
        ScheduleError: a move carries nothing, or a node or the result twice.
    """
    family = family_of(ranks)
    holdings = _Holdings(operation.wants(shard, ranks, root))
    for rank in operation.sources(shard, ranks, root):
        holdings[rank].begin(operation.reduces, rank, ranks)

    for step, together in groupby(sorted(moves), key=itemgetter(0)):
        # What arrives in a step is there for others from the next one on.
        receives: list[tuple[Holding, Receive]] = []
        results: dict[int, int] = {}
        arrived: dict[int, dict[Node, int]] = {}
        for move in together:
            _, giver, taker = move
            source, target = holdings[giver], holdings[taker]
            if source.result is not None:
                if target.result is not None or taker in results:
                    raise ScheduleError(f"{move} brings the result a second time")
                buffer = results[taker] = target.new(_RESULT)
                sent: tuple[int, ...] = (source.result,)
                received: tuple[int, ...] = (buffer,)
            else:
                here = arrived.setdefault(taker, {})
                sent, received = target.make_room(source, here, move)
            source.steps.append(Send(step, taker, sent))
            receives.append((target, Receive(step, giver, received)))
        for target, receive in receives:
            target.steps.append(receive)
        for taker, buffer in results.items():
            holdings[taker].result = buffer
        for taker, parts in arrived.items():
            holdings[taker].add(step, parts, family)
    return {rank: RankSteps(own.steps, own.types) for rank, own in holdings.items() if own.steps}
