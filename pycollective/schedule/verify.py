"""Proves a schedule right without running it, and counts its messages and bytes.

Knows the order and the steps, and nothing of partials, moves or algorithms: what made the steps is
not trusted. For each shard it follows every buffer's value, symbolically, and shows that

1. each rank that must end with the shard does, with the root of all leaves, finished once;
2. each node is computed from its own children, as the order has them;
3. each send meets its receive, at the same step number, buffer for buffer and type for type;
4. a buffer is written once, before it is read, and what is sent was there before that step.

From 3 and 4 follows that no deadlock is possible, even where a send waits for its receive: in each
rank the step numbers ascend, and in each number all sends and receives can be posted together,
since none of them needs another. Consider the ranks at the lowest number. What they await was
posted by ranks at that number or beyond it, so all of them come to its end.

Works through one shard at a time, so its memory does not grow with the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pycollective.order import Node, split

from .operation import Operation
from .schedule import Schedule
from .steps import INPUT, OUTPUT, Combine, Copy, RankProgram, Receive, Send, Type

_DONE = "result"  # the value of a finished shard; other values are nodes
Value = Node | str
_Number = tuple[list[Any], list[Any], list[Any]]


class Fault(AssertionError):
    """A schedule is wrong; the message says where."""


@dataclass
class Traffic:
    """What a schedule sends.

    Attributes:
        ranks: number of ranks.
        shards: number of shards; buffers below are each the size of one.
        steps: step numbers, from the first to the last that sends.
        messages: by rank; all that goes to one rank in one step is one message.
        leaves, nodes, results: buffers sent, by rank.
        adds: additions, by rank, in shards.
    """

    ranks: int
    shards: int
    steps: int = 0
    messages: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    adds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counter in (self.messages, self.leaves, self.nodes, self.results, self.adds):
            counter.extend([0] * self.ranks)

    def bytes_sent(self, rank: int, element: int, accumulator: int) -> float:
        """Bytes that a rank sends for each element of the whole buffer.

        Args:
            rank: the rank.
            element: bytes of an element.
            accumulator: bytes of an element in the accumulator's type.
        """
        moved = (self.leaves[rank] + self.results[rank]) * element + self.nodes[rank] * accumulator
        return moved / self.shards


def verify(schedule: Schedule, shards: Iterable[int] | None = None) -> Traffic:
    """Prove a schedule, all of it or some shards, and count what it sends.

    Raises:
        Fault: it is wrong.
    """
    ranks = schedule.topology.ranks
    traffic = Traffic(ranks, schedule.shards)
    messages: set[int] = set()
    for shard in range(schedule.shards) if shards is None else shards:
        programs = schedule.lowered(shard)
        try:
            check_shard(schedule.operation, shard, ranks, schedule.root, programs)
        except Fault as fault:
            raise Fault(
                f"{schedule.operation.name}, {schedule.algorithm.name}, {schedule.topology}, shard "
                f"{shard}: {fault}"
            ) from None
        _count(traffic, messages, programs)
    for message in messages:
        traffic.messages[message // ranks % ranks] += 1
    return traffic


def check_shard(
    operation: Operation,
    shard: int,
    ranks: int,
    root: int,
    programs: Mapping[int, RankProgram],
) -> None:
    """Prove the steps of one shard.

    Raises:
        Fault: they are wrong.
    """
    states: dict[int, _Buffers] = {}
    for rank, program in programs.items():
        states[rank] = _Buffers(rank, program, ranks)
    for rank in operation.sources(shard, ranks, root):
        if rank in states:
            states[rank].values[INPUT] = (rank, rank + 1) if operation.reduces else _DONE
    for step, (sends, receives, rest) in sorted(_by_number(programs).items()):
        parcels: dict[tuple[int, int], list[tuple[Type, Value]]] = {}
        for rank, send in sends:
            if (rank, send.to) in parcels:
                raise Fault(f"step {step}: rank {rank} sends to {send.to} twice")
            parcels[rank, send.to] = [states[rank].read(buffer, step) for buffer in send.buffers]
        for rank, receive in receives:
            parcel = parcels.pop((receive.source, rank), None)
            if parcel is None:
                raise Fault(f"step {step}: rank {rank} awaits what {receive.source} does not send")
            states[rank].store(receive, parcel)
        for source, target in parcels:
            raise Fault(f"step {step}: rank {target} does not receive what {source} sends")
        for rank, each in rest:
            states[rank].compute(each)
    wanted = operation.wants(shard, ranks, root)
    for rank in range(ranks):
        has = rank in states and states[rank].values[OUTPUT] == _DONE
        if rank not in wanted and has:
            raise Fault(f"rank {rank} gets an output that it must not have")
        if rank in wanted and not has:
            raise Fault(f"rank {rank} never has its output")


def _by_number(programs: Mapping[int, RankProgram]) -> dict[int, _Number]:
    """Each step number's sends, receives and other steps, with their ranks."""
    numbers: dict[int, _Number] = {}
    for rank, program in programs.items():
        last = (-2, 0)
        for step in program.steps:
            kind = 0 if type(step) is Send else 1 if type(step) is Receive else 2
            if (step.step, kind) < last:
                raise Fault(f"rank {rank}: {step} is out of order")
            last = (step.step, kind)
            if step.step not in numbers:
                numbers[step.step] = ([], [], [])
            numbers[step.step][kind].append((rank, step))
    return numbers


class _Buffers:
    """The values of one rank's buffers."""

    __slots__ = ("rank", "ranks", "types", "values")

    def __init__(self, rank: int, program: RankProgram, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.types = program.types
        self.values: list[Value | None] = [None] * len(program.types)

    def read(self, buffer: int, step: int) -> tuple[Type, Value]:
        value = self.values[buffer]
        if value is None:
            raise Fault(f"step {step}: rank {self.rank} reads buffer {buffer} before it is written")
        return self.types[buffer], value

    def write(self, buffer: int, value: Value, step: int) -> None:
        if self.values[buffer] is not None:
            raise Fault(f"step {step}: rank {self.rank} writes buffer {buffer} a second time")
        fits = Type.RESULT if value == _DONE else Type.NODE
        if self.types[buffer] is not fits and not (
            self.types[buffer] is Type.LEAF and value[1] == value[0] + 1  # type: ignore[operator]
        ):
            raise Fault(f"step {step}: rank {self.rank}: {value} is no {self.types[buffer].value}")
        self.values[buffer] = value

    def store(self, receive: Receive, parcel: list[tuple[Type, Value]]) -> None:
        if len(parcel) != len(receive.buffers):
            raise Fault(
                f"step {receive.step}: rank {self.rank} awaits {len(receive.buffers)} buffers from "
                f"{receive.source}, which sends {len(parcel)}"
            )
        for buffer, (kind, value) in zip(receive.buffers, parcel, strict=True):
            if kind is not self.types[buffer]:
                raise Fault(
                    f"step {receive.step}: rank {self.rank} takes a {kind.value} from "
                    f"{receive.source} for a {self.types[buffer].value}"
                )
            self.write(buffer, value, receive.step)

    def compute(self, step: Combine | Copy) -> None:
        if isinstance(step, Copy):
            if self.read(step.source, step.step)[1] != _DONE:
                raise Fault(f"step {step.step}: rank {self.rank} copies what is no result")
            self.write(step.out, _DONE, step.step)
            return
        for node, buffer in step.operands:
            value = self.read(buffer, step.step)[1]
            if value != node:
                raise Fault(f"step {step.step}: rank {self.rank} takes {value} for {node}")
        left = [node for node, _ in reversed(step.operands)]
        _take(step.node, left)
        if left:
            raise Fault(f"step {step.step}: rank {self.rank}: {left} are not in {step.node}")
        if step.finish != (step.node == (0, self.ranks)):
            raise Fault(f"step {step.step}: rank {self.rank} finishes {step.node}, or not the root")
        self.write(step.out, _DONE if step.finish else step.node, step.step)


def _take(node: Node, left: list[Node]) -> None:
    """Use up, from the end of `left`, the operands that `node` is made of, as the order has it."""
    if left and left[-1] == node:
        left.pop()
        return
    lo, hi = node
    if hi - lo == 1:
        raise Fault(f"leaf {lo} is missing; next is {left[-1] if left else 'nothing'}")
    middle = split(lo, hi)
    _take((lo, middle), left)
    _take((middle, hi), left)


def _count(traffic: Traffic, messages: set[int], programs: Mapping[int, RankProgram]) -> None:
    ranks = traffic.ranks
    counters = {
        Type.LEAF: traffic.leaves,
        Type.NODE: traffic.nodes,
        Type.RESULT: traffic.results,
    }
    for rank, program in programs.items():
        for step in program.steps:
            if type(step) is Send:
                messages.add((step.step * ranks + rank) * ranks + step.to)
                traffic.steps = max(traffic.steps, step.step + 1)
                for buffer in step.buffers:
                    counters[program.types[buffer]][rank] += 1
            elif type(step) is Combine:
                traffic.adds[rank] += len(step.operands) - 1
