"""Proves a schedule right without running it.

Knows the order and the steps, and nothing of what made them, which is not trusted. For each shard
it follows every buffer's value, symbolically, and shows that

1. each rank that must end with the shard does, with the root of all leaves, finished once;
2. each node is computed from its own children, as the order has them; and of a deal, the inputs are
   the nodes that were dealt, which are all leaves, each once;
3. each send meets its receive, at the same step number, buffer for buffer and type for type;
4. a buffer is written once, before it is read, and what is sent was there before that step.

From 3 and 4 follows that no deadlock is possible, even where a send waits for its receive: in each
rank the step numbers ascend, and in each number all sends and receives can be posted together,
since none of them needs another. Consider the ranks at the lowest number. What they await was
posted by ranks at that number or beyond it, so all of them come to its end.

Works through one shard at a time, so its memory grows with the messages, not with the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from pycollective.leaves.deal import Deal
from pycollective.order import Node, split

from .operation import Operation
from .steps import (
    INPUT,
    OUTPUT,
    Combine,
    Copy,
    RankSteps,
    Receive,
    Send,
    Type,
    input_buffers,
)

_DONE = "result"  # the value of a finished shard; other values are nodes
Value = Node | str
_Number = tuple[list[Any], list[Any], list[Any]]  # steps of each phase, with the rank of each
# By name here, since a member of an enum takes longer to find than the rest of a line.
_LEAF, _NODE, _RESULT = Type.LEAF, Type.NODE, Type.RESULT
_PHASE = {Send: 0, Receive: 1, Combine: 2, Copy: 2}


class Fault(AssertionError):
    """A schedule is wrong; the message says where."""


def check_shard(
    operation: Operation,
    shard: int,
    ranks: int,
    root: int,
    lowered: Mapping[int, RankSteps],
    deal: Deal | None = None,
) -> None:
    """Prove the steps of one shard.

    Args:
        operation: what is asked of the shard.
        shard: its number.
        ranks: number of ranks.
        root: of the operation, where it has one.
        lowered: the steps of each rank that has any.
        deal: which leaves each rank gives; None for one each.

    Raises:
        Fault: they are wrong.
    """
    sources = operation.sources(shard, ranks, root)
    leaves = ranks if deal is None else deal.leaves
    order = _nodes(leaves)
    if deal is not None:
        check_deal(deal, ranks, order)
    holders: list[_Rank] = []
    for rank, steps in lowered.items():
        if not 0 <= rank < ranks:
            raise Fault(f"there is no rank {rank}")
        own = _Rank(rank, steps.types)
        if rank in sources and deal is not None:
            own.begin_with(deal.nodes(rank))
        elif rank in sources:
            own.begin((rank, rank + 1) if operation.reduces else _DONE)
        holders.append(own)

    numbers = _by_number(holders, lowered)
    for number in sorted(numbers):
        sends, receives, rest = numbers[number]
        _deliver(number, sends, receives, ranks)
        for own, step in rest:
            if type(step) is Combine:
                own.combine(step, order, (0, leaves), deal is not None)
            else:
                own.copy(step)

    for own in holders:
        if INPUT in own.values and (
            own.rank not in sources or (deal is not None and not deal.held[own.rank])
        ):
            raise Fault(f"rank {own.rank} writes to its input")
    finished = {own.rank for own in holders if own.values.get(OUTPUT) == _DONE}
    wanted = set(operation.wants(shard, ranks, root))
    for rank in sorted(finished - wanted):
        raise Fault(f"rank {rank} gets an output that it must not have")
    for rank in sorted(wanted - finished):
        raise Fault(f"rank {rank} never has its output")


def check_deal(deal: Deal, ranks: int, order: frozenset[Node]) -> None:
    """Show that the ranks begin with nodes of the order, and give each leaf once.

    Raises:
        Fault: not so.
    """
    if deal.size != ranks:
        raise Fault(f"leaves are dealt to {deal.size} ranks, and there are {ranks}")
    given = sorted(each for rank in range(ranks) for each in deal.nodes(rank))
    at = 0
    if not order.issuperset(given):
        raise Fault("what was dealt are not nodes of the order")
    for lo, hi in given:
        if lo != at:
            raise Fault(f"of the leaves dealt, {min(lo, at)} is not given once")
        at = hi
    if at != deal.leaves:
        raise Fault(f"{at} of {deal.leaves} leaves are dealt")


class _Rank:
    """The values of one rank's buffers."""

    __slots__ = ("rank", "types", "values")

    def __init__(self, rank: int, types: list[Type]) -> None:
        self.rank = rank
        self.types = types
        self.values: dict[int, Value] = {}
        if types[OUTPUT] is not _RESULT:
            raise Fault(f"rank {rank}'s output is a {types[OUTPUT].value}")

    def fail(self, step: int, what: str) -> NoReturn:
        raise Fault(f"step {step}: rank {self.rank} {what}")

    def begin(self, value: Value) -> None:
        """Have an input."""
        kind = _RESULT if value == _DONE else _LEAF
        if self.types[INPUT] is not kind:
            raise Fault(f"rank {self.rank}'s input is a {self.types[INPUT].value}")
        self.values[INPUT] = value

    def begin_with(self, nodes: list[Node]) -> None:
        """Have nodes that were dealt."""
        for buffer, node in zip(input_buffers(len(nodes)), nodes, strict=True):
            if self.types[buffer] is not _NODE:
                raise Fault(f"rank {self.rank}'s input is a {self.types[buffer].value}")
            self.values[buffer] = node

    def check_write(self, step: int, buffer: int, kind: Type) -> None:
        """Show that a buffer of this type is free."""
        if buffer in self.values:
            self.fail(step, f"writes buffer {buffer} a second time")
        if not 0 <= buffer < len(self.types):
            self.fail(step, f"writes buffer {buffer}, and has {len(self.types)}")
        if self.types[buffer] is not kind:
            self.fail(step, f"writes a {kind.value} to a buffer for a {self.types[buffer].value}")

    def combine(self, step: Combine, order: frozenset[Node], root: Node, dealt: bool) -> None:
        number, out, node, operands, finish = step
        if node not in order:
            self.fail(number, f"computes {node}, which is no node of the order")
        values = self.values
        # Nodes that follow each other, from the first leaf to the last, lie under `node`
        # as the order has them: no two nodes of the order overlap but where one contains the other.
        at, end = node
        for operand, buffer in operands:
            if buffer not in values:
                self.fail(number, f"reads buffer {buffer} before it is written")
            if values[buffer] != operand:
                self.fail(number, f"takes {values[buffer]} for {operand}")
            at = operand[1] if operand[0] == at else -1
        if at != end:
            parts = [operand for operand, _ in operands]
            self.fail(number, f"computes {node} from {parts}: not its parts, each once, in order")
        # Of a deal the root may travel as a node: it is finished where all ranks have given.
        if finish != (node == root) and (finish or not dealt):
            self.fail(number, f"{'finishes' if finish else 'does not finish'} {node} of {root}")
        self.check_write(number, out, _RESULT if finish else _NODE)
        values[out] = _DONE if finish else node

    def copy(self, step: Copy) -> None:
        number, out, source = step
        if source not in self.values:
            self.fail(number, f"reads buffer {source} before it is written")
        if self.values[source] != _DONE:
            self.fail(number, f"copies {self.values[source]}, which is no result")
        self.check_write(number, out, _RESULT)
        self.values[out] = _DONE


@lru_cache(maxsize=4)
def _nodes(leaves: int) -> frozenset[Node]:
    """Every node of the order."""
    found = []
    below = [(0, leaves)]
    while below:
        lo, hi = below.pop()
        found.append((lo, hi))
        if hi - lo > 1:
            middle = split(lo, hi)
            below += (lo, middle), (middle, hi)
    return frozenset(found)


def _by_number(holders: list[_Rank], lowered: Mapping[int, RankSteps]) -> dict[int, _Number]:
    """The steps of all ranks, by number, once each rank's are shown to be in order."""
    numbers: dict[int, _Number] = {}
    for own, (steps, _) in zip(holders, lowered.values(), strict=True):
        now, phase = -2, 0
        for step in steps:
            number, kind = step[0], _PHASE[type(step)]
            if number != now:
                if number < now:
                    own.fail(number, f"comes back to this step from step {now}")
                now = number
                if number not in numbers:
                    numbers[number] = ([], [], [])
            elif kind < phase:
                own.fail(number, "does not first send, then receive, then compute")
            phase = kind
            numbers[number][kind].append((own, step))
    return numbers


def _deliver(
    number: int,
    sends: list[tuple[_Rank, Send]],
    receives: list[tuple[_Rank, Receive]],
    ranks: int,
) -> None:
    """Carry out the sends and receives of one number, all of them together."""
    parcels: dict[int, tuple[_Rank, tuple[int, ...]]] = {}
    for own, (_, to, buffers) in sends:
        message = own.rank * ranks + to
        if not 0 <= to < ranks or to == own.rank:
            own.fail(number, f"sends to {to}, which is no other rank")
        if message in parcels:
            own.fail(number, f"sends to {to} twice")
        for buffer in buffers:
            if buffer not in own.values:
                own.fail(number, f"reads buffer {buffer} before it is written")
        parcels[message] = own, buffers
    for own, (_, source, buffers) in receives:
        parcel = parcels.pop(source * ranks + own.rank, None)
        if parcel is None:
            own.fail(number, f"awaits what {source} does not send")
        sender, sent = parcel
        if len(buffers) != len(sent):
            own.fail(number, f"awaits {len(buffers)} buffers of {source}, which sends {len(sent)}")
        types, values = own.types, own.values
        for buffer, theirs in zip(buffers, sent, strict=True):
            kind = sender.types[theirs]
            if buffer in values or not 0 <= buffer < len(types) or types[buffer] is not kind:
                own.check_write(number, buffer, kind)
            values[buffer] = sender.values[theirs]
    for message, (sender, _) in parcels.items():
        sender.fail(number, f"sends to {message % ranks}, which does not receive it")
