"""One rank's steps, without looking at the others'.

`lower` follows all ranks' partials. One rank's steps need less: of what the rank receives, the
nodes; and these follow from the leaves that the sender has, since it has combined whatever siblings
have met, so its partial is their cover by the largest nodes. So an algorithm says, besides its
moves, those that touch a given rank with the leaves that each carries. Leaves are ranges of ranks,
few of them where hosts hold blocks of ranks.

This must come to what `lower` makes of the moves: `tests/schedule/test_handing.py` compares them
rank by rank and step by step, and the proof in `verify.py` knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pycollective.order import Node, cover

from .lower import Holding, ScheduleError, family_of
from .operation import Operation
from .steps import INPUT, OUTPUT, RankSteps, Receive, Send, Step, Type

Ranges = tuple[tuple[int, int], ...]  # half-open, ascending, no two that touch

_LEAF, _NODE, _RESULT = Type.LEAF, Type.NODE, Type.RESULT


class Handing(NamedTuple):
    """A move, with the leaves that it carries: all that the source has; None for the result."""

    step: int
    source: int
    target: int
    leaves: Ranges | None


def later(handings: Iterable[Handing], steps: int) -> list[Handing]:
    """The same, `steps` steps later."""
    return [Handing(step + steps, a, b, leaves) for step, a, b, leaves in handings]


def backwards(handings: Iterable[Handing], steps: int, after: int = 0) -> list[Handing]:
    """The way back of what takes `steps` steps, `after` steps later: on it the result travels."""
    last = after + steps - 1
    return [Handing(last - step, b, a, None) for step, a, b, _ in handings]


def not_to(holder: int, handings: Iterable[Handing]) -> list[Handing]:
    """Without those to a rank that has had it all along."""
    return [each for each in handings if each.target != holder]


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges that do not overlap, put together where they touch."""
    found: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if found and found[-1][1] == lo:
            lo = found.pop()[0]
        found.append((lo, hi))
    return tuple(found)


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Ranks as ranges."""
    return merged([(rank, rank + 1) for rank in ranks])


def nodes_of(leaves: Ranges, ranks: int) -> list[Node]:
    """The partial of a rank that has these leaves."""
    nodes: list[Node] = []
    for each in leaves:
        if each[1] - each[0] == 1:
            nodes.append(each)
        else:
            nodes += cover(*each, ranks)
    return nodes


def lower_rank(
    operation: Operation,
    shard: int,
    ranks: int,
    root: int,
    rank: int,
    handings: list[Handing],
) -> RankSteps | None:
    """The steps of one rank for one shard: what `lower` makes of the moves; None if it has none.

    Args:
        operation: what is asked of the shard.
        shard: its number.
        ranks: number of ranks.
        root: of the operation, where it has one.
        rank: the rank.
        handings: all that touch it, in any order.

    Raises:
        ScheduleError: they bring a node or the result twice, or carry other leaves than there are.
    """
    wants = rank in operation.wants(shard, ranks, root)
    if len(handings) <= 2:
        simple = _simple(operation, wants, rank, handings)
        if simple is not None:
            return RankSteps(simple, _PLAIN)
    own = Holding(wants)
    if rank in operation.sources(shard, ranks, root):
        own.begin(operation.reduces, rank, ranks)
    held = int(operation.reduces)  # leaves
    steps, types = own.steps, own.types
    handings.sort()
    at, end = 0, len(handings)
    while at < end:
        step = handings[at].step
        receives: list[Receive] = []
        arrived: dict[Node, int] = {}
        result: int | None = None
        taken = 0
        while at < end and handings[at].step == step:
            handing = handings[at]
            _, source, target, leaves = handing
            at += 1
            if source == rank:
                has = None if own.result is not None else held
                if has != (None if leaves is None else _size(leaves)):
                    raise ScheduleError(f"{handing} carries other leaves than rank {rank} has")
                steps.append(Send(step, target, own.all_buffers()))
            elif leaves is None:
                if own.result is not None or result is not None:
                    raise ScheduleError(f"{handing} brings the result a second time")
                result = own.new(_RESULT)
                receives.append(Receive(step, source, (result,)))
            else:
                taken += _size(leaves)
                first = len(types)
                for node in nodes_of(leaves, ranks):
                    if node in arrived or node in own.nodes:
                        raise ScheduleError(f"{handing} brings node {node} a second time")
                    arrived[node] = len(types)
                    types.append(_LEAF if node[1] - node[0] == 1 else _NODE)
                receives.append(Receive(step, source, tuple(range(first, len(types)))))
        steps += receives
        if result is not None:
            own.result = result
        if arrived:
            held += taken
            own.add(step, arrived, family_of(ranks))
    return RankSteps(steps, types) if steps else None


# The types of a rank that has no buffers but its input, a leaf, and its output.
_PLAIN = [_LEAF, _RESULT]


def _simple(
    operation: Operation, wants: bool, rank: int, handings: list[Handing]
) -> list[Step] | None:
    """The steps of a rank that hands on its leaf, or gets the result, or one after the other.

    Nearly all shards are so to nearly all ranks of some algorithms; it is a shortcut, no more.
    """
    if not handings:
        return None
    handings.sort()
    step, source, target, leaves = handings[0]
    if source == rank:
        if not operation.reduces or leaves != ((rank, rank + 1),):
            return None
        steps: list[Step] = [Send(step, target, _INPUT)]
        if len(handings) == 1:
            return steps
        before, (step, source, target, leaves) = step, handings[1]
        if before >= step:
            return None
    elif len(handings) == 1 and not operation.reduces:
        steps = []
    else:
        return None
    if leaves is not None or target != rank or not wants:
        return None
    steps.append(Receive(step, source, _OUTPUT))
    return steps


_INPUT, _OUTPUT = (INPUT,), (OUTPUT,)


def _size(leaves: Ranges) -> int:
    return sum([hi - lo for lo, hi in leaves])
