"""From moves to steps: follows the partials of one shard through an algorithm's moves.

A **partial** is a set of finished nodes of the order, each with its buffer. A move sends what the
target lacks of the source's partial. Where the target then holds two siblings, they are combined,
and so on upwards; so whoever holds all leaves holds the root, and finishes it. This is the only
place that knows partials: what comes out are steps over buffers (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from pycollective.order import Node, parent, sibling

from .operation import Operation
from .steps import INPUT, OUTPUT, Combine, Copy, RankProgram, Receive, Send, Step, Type


class Move(NamedTuple):
    """At `step`, `source` hands `target` what it has of the shard and `target` lacks."""

    step: int
    source: int
    target: int


class ScheduleError(AssertionError):
    """An algorithm's moves make no sense: a fault of the algorithm, never of its user."""


class _Holding:
    """What one rank has of the shard, and its steps so far."""

    __slots__ = ("nodes", "result", "root", "steps", "types", "wants")

    def __init__(self, wants: bool, leaves: int) -> None:
        self.nodes: dict[Node, int] = {}  # the partial
        self.result: int | None = None  # buffer
        self.wants = wants
        self.root = (0, leaves)
        self.steps: list[Step] = []
        self.types = [Type.LEAF, Type.RESULT]  # INPUT, OUTPUT

    def new(self, kind: Type) -> int:
        if kind is Type.RESULT and self.wants:
            return OUTPUT
        self.types.append(kind)
        return len(self.types) - 1

    def lacks(self, source: _Holding) -> list[Node]:
        """What `source` has and this has not, ascending."""
        mine = self.nodes
        if not mine:
            return sorted(source.nodes)
        return sorted(node for node in source.nodes if node not in mine)

    def add(self, step: int, arrived: dict[Node, int]) -> None:
        """Take in nodes; combine siblings, as far up as it goes."""
        root = self.root
        leaves = root[1]
        nodes = self.nodes
        made: dict[Node, list[tuple[Node, int]]] = {}  # new nodes, and what they are made of
        for node, buffer in arrived.items():
            if node in nodes:
                raise ScheduleError(f"node {node} arrives a second time")
            nodes[node] = buffer
            while node != root:
                other = sibling(node, leaves)
                if other not in nodes:
                    break
                parts = [
                    part
                    for child in sorted((node, other))
                    for part in made.pop(child, None) or [(child, nodes[child])]
                ]
                del nodes[node], nodes[other]
                node = parent(node, leaves)
                made[node] = parts
                nodes[node] = -1
        for node, parts in made.items():
            nodes[node] = self.combine(step, node, parts, finish=node == root)
        if root in nodes and self.result is None:
            buffer = nodes[root]
            # A root that is not made here is the one leaf of a single rank.
            self.result = buffer if root in made else self.combine(step, root, [(root, buffer)])

    def combine(
        self, step: int, node: Node, parts: list[tuple[Node, int]], finish: bool = True
    ) -> int:
        out = self.new(Type.RESULT if finish else Type.NODE)
        self.steps.append(Combine(step, out, node, tuple(parts), finish))
        return out


def lower(
    operation: Operation, shard: int, ranks: int, root: int, moves: Iterable[Move]
) -> dict[int, RankProgram]:
    """The steps of each rank that has any, for one shard.

    Args:
        operation: what is asked of the shard.
        shard: its number.
        ranks: number of ranks.
        root: of the operation, where it has one.
        moves: the algorithm's, in any order.

    Raises:
        ScheduleError: a move carries nothing, or a node twice.
    """
    wanted = set(operation.wants(shard, ranks, root))
    holdings: dict[int, _Holding] = {}

    def holding(rank: int) -> _Holding:
        if rank not in holdings:
            holdings[rank] = _Holding(rank in wanted, ranks)
        return holdings[rank]

    for rank in operation.sources(shard, ranks, root):
        own = holding(rank)
        if operation.reduces:
            own.add(-1, {(rank, rank + 1): INPUT})
            continue
        own.types[INPUT] = Type.RESULT
        own.result = INPUT
        if rank in wanted:
            own.steps.append(Copy(-1, OUTPUT, INPUT))

    for step, together in groupby(sorted(moves), key=lambda move: move.step):
        arrived: dict[int, dict[Node, int]] = {}
        results: dict[int, int] = {}
        parcels = []
        for move in together:
            source, target = holding(move.source), holding(move.target)
            if source.result is not None:
                if target.result is not None or move.target in results:
                    raise ScheduleError(f"{move} brings the result a second time")
                sent: tuple[int, ...] = (source.result,)
                results[move.target] = target.new(Type.RESULT)
                received: tuple[int, ...] = (results[move.target],)
            else:
                nodes = target.lacks(source)
                if not nodes:
                    raise ScheduleError(f"{move} carries nothing")
                sent = tuple(source.nodes[node] for node in nodes)
                received = tuple(target.new(source.types[buffer]) for buffer in sent)
                here = arrived.setdefault(move.target, {})
                if not here.keys().isdisjoint(nodes):
                    raise ScheduleError(f"{move} brings a node a second time")
                here.update(zip(nodes, received, strict=True))
            source.steps.append(Send(step, move.target, sent))
            parcels.append((target, Receive(step, move.source, received)))
        for target, receive in parcels:
            target.steps.append(receive)
        for rank, buffer in results.items():
            holdings[rank].result = buffer
        for rank, nodes_here in arrived.items():
            holdings[rank].add(step, nodes_here)
    return {rank: RankProgram(own.steps, own.types) for rank, own in holdings.items() if own.steps}
