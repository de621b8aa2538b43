"""From transfers to steps over buffers (`steps.py`): follows what ranks hold of one shard.

A rank holds finished nodes of the order, each in a buffer: its **partial**. A transfer sends what
the target lacks of the source's partial. Where the target then holds two siblings, they are
combined, and so on upwards; so a rank that has the inputs of all ranks holds the root, and finishes
it. With a deal an input is nodes, none or several, which say nothing of the rank's number: the
leaves of a set of ranks are the union of theirs, and so may be the root before all ranks have
given. It is finished, and becomes the result, only where all have.

`lower` follows one rank, without looking at the others: which nodes it receives follows from the
ranks whose inputs a transfer carries, since the sender has combined whatever siblings have met, so
its partial is their cover by the largest nodes. Whether the steps of all ranks fit together the
proof finds out, which knows nothing of this.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from pycollective.leaves.deal import Deal
from pycollective.order import Node, cover, split

from .operation import Operation
from .steps import (
    INPUT,
    OUTPUT,
    Combine,
    Copy,
    RankSteps,
    Receive,
    Send,
    Step,
    Type,
    input_buffers,
)
from .transfer import Ranges, Transfer, merged


class ScheduleError(AssertionError):
    """An algorithm's transfers make no sense: a fault of the algorithm, never of its user."""


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

    def begin(self, reduces: bool, rank: int, ranks: int, deal: Deal | None) -> None:
        """Have an input: a leaf, or the nodes that were dealt, or what is only moved."""
        if not reduces:
            self.types[INPUT] = _RESULT
            self.result = INPUT
            if self.wants:
                self.steps.append(Copy(-1, OUTPUT, INPUT))
            return
        nodes = [(rank, rank + 1)]
        if deal is not None:
            nodes = deal.nodes(rank)
            self.types[INPUT] = _NODE
            self.types += [_NODE] * (len(nodes) - 1)
        self.nodes = dict(zip(nodes, input_buffers(len(nodes)), strict=True))
        if ranks == 1:
            root = 0, nodes[-1][1]
            self.combine(-1, root, list(self.nodes.items()), finish=True)

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

    def add(self, step: int, arrived: dict[Node, int], family: Family, complete: bool) -> None:
        """Take in nodes; combine siblings, as far up as it goes.

        `complete`: the inputs of all ranks are there now.
        """
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
            self.combine(step, node, operands[:end], complete and family[node][0] is None)
            del operands[:end]
        if complete and self.result is None:  # the root was there before the last had given
            (root,) = nodes.items()
            self.combine(step, root[0], [root], finish=True)

    def combine(
        self, step: int, node: Node, operands: list[tuple[Node, int]], finish: bool
    ) -> None:
        """Compute a node; the root is the result as well."""
        out = self.nodes[node] = self.new(_RESULT if finish else _NODE)
        self.steps.append(Combine(step, out, node, tuple(operands), finish))
        if finish:
            self.result = out


def nodes_of(ranges: Ranges, leaves: int) -> list[Node]:
    """The partial of a rank that has these leaves."""
    nodes: list[Node] = []
    for each in ranges:
        if each[1] - each[0] == 1:
            nodes.append(each)
        else:
            nodes += cover(*each, leaves)
    return nodes


@lru_cache(maxsize=1 << 13)
def dealt_nodes(ranks: Ranges, deal: Deal) -> list[Node]:
    """The partial of a rank that has the inputs of these ranks."""
    leaves = merged(each for lo, hi in ranks for held in deal.held[lo:hi] for each in held)
    return nodes_of(leaves, deal.leaves)


def lower(
    operation: Operation,
    shard: int,
    ranks: int,
    root: int,
    rank: int,
    transfers: list[Transfer],
    deal: Deal | None = None,
) -> RankSteps | None:
    """The steps of one rank for one shard; None if it has none.

    Args:
        operation: what is asked of the shard.
        shard: its number.
        ranks: number of ranks.
        root: of the operation, where it has one.
        rank: the rank.
        transfers: what it sends and receives, in any order.
        deal: which leaves each rank gives; None for one each.

    Raises:
        ScheduleError: they bring a node or the result twice, or carry other leaves than there are.
    """
    wants = rank in operation.wants(shard, ranks, root)
    if len(transfers) <= 2 and deal is None:
        simple = _simple(operation, wants, rank, transfers)
        if simple is not None:
            return RankSteps(simple, _PLAIN)
    own = Holding(wants)
    if rank in operation.sources(shard, ranks, root):
        own.begin(operation.reduces, rank, ranks, deal)
    held = int(operation.reduces)  # how many ranks' inputs
    steps, types = own.steps, own.types
    transfers.sort()
    at, end = 0, len(transfers)
    while at < end:
        step = transfers[at].step
        receives: list[Receive] = []
        arrived: dict[Node, int] = {}
        result: int | None = None
        taken = 0
        while at < end and transfers[at].step == step:
            transfer = transfers[at]
            _, source, target, leaves = transfer
            at += 1
            if source == rank:
                has = None if own.result is not None else held
                if has != (None if leaves is None else _size(leaves)):
                    raise ScheduleError(f"{transfer} carries other leaves than rank {rank} has")
                steps.append(Send(step, target, own.all_buffers()))
            elif leaves is None:
                if own.result is not None or result is not None:
                    raise ScheduleError(f"{transfer} brings the result a second time")
                result = own.new(_RESULT)
                receives.append(Receive(step, source, (result,)))
            else:
                taken += _size(leaves)
                first = len(types)
                for node in dealt_nodes(leaves, deal) if deal else nodes_of(leaves, ranks):
                    if node in arrived or node in own.nodes:
                        raise ScheduleError(f"{transfer} brings node {node} a second time")
                    arrived[node] = len(types)
                    types.append(_NODE if deal or node[1] - node[0] > 1 else _LEAF)
                receives.append(Receive(step, source, tuple(range(first, len(types)))))
        steps += receives
        if result is not None:
            own.result = result
        if taken:
            held += taken
            family = family_of(ranks if deal is None else deal.leaves)
            own.add(step, arrived, family, held == ranks)
    return RankSteps(steps, types) if steps else None


# The types of a rank that has no buffers but its input, a leaf, and its output.
_PLAIN = [_LEAF, _RESULT]


def _simple(
    operation: Operation, wants: bool, rank: int, transfers: list[Transfer]
) -> list[Step] | None:
    """The steps of a rank that sends its leaf, or receives the result, or one after the other.

    A shortcut: of some algorithms nearly all shards are so to nearly all ranks.
    """
    if not transfers:
        return None
    transfers.sort()
    step, source, target, leaves = transfers[0]
    if source == rank:
        if not operation.reduces or leaves != ((rank, rank + 1),):
            return None
        steps: list[Step] = [Send(step, target, _INPUT)]
        if len(transfers) == 1:
            return steps
        before, (step, source, target, leaves) = step, transfers[1]
        if before >= step:
            return None
    elif len(transfers) == 1 and not operation.reduces:
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
