"""Runs a schedule's steps on arrays, in plain NumPy: what the steps mean, said a second time.

All ranks run at once, each as a coroutine, and all shards of a rank together, in the order of their
step numbers. There is no buffering at all: a send ends when its receiver takes it. So a run that
comes to its end shows besides that nobody waits for ever.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pycollective import reference
from pycollective.order import Node, split
from pycollective.schedule import Schedule
from pycollective.schedule.steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Step, Type

# The reference's: this says a second time what steps mean, not what floats are.
ACCUMULATOR = {name: np.dtype(wide) for name, wide in reference._ACCUMULATOR.items()}
QUIET_NAN = reference._NAN

# (step, source, target, shard) -> what is being sent
Wire = dict[tuple[int, int, int, int], list[np.ndarray]]


class Stuck(AssertionError):
    """Every rank waits for another."""


def execute(
    schedule: Schedule, inputs: Sequence[np.ndarray], op: str = "sum", seed: int = 0
) -> list[np.ndarray | None]:
    """What each rank ends with, None where that is nothing.

    Args:
        schedule: of any operation.
        inputs: a flat array a rank; of a rank that has no input, only the dtype matters.
        op: of a reduction: sum, avg or prod.
        seed: of the order in which the ranks take turns.
    """
    ranks = [_Rank(rank, schedule, inputs[rank], op) for rank in range(schedule.topology.ranks)]
    for shard in range(schedule.shards):
        for rank, (steps, types) in schedule.lowered(shard).items():
            ranks[rank].add(shard, steps, types)
    wire: Wire = {}
    turns = random.Random(seed)
    waiting = [rank.run(wire) for rank in ranks]
    while waiting:
        turns.shuffle(waiting)
        moved = False
        for each in list(waiting):
            try:
                moved |= next(each)
            except StopIteration:
                waiting.remove(each)
                moved = True
        if not moved:
            raise Stuck(f"{len(waiting)} ranks wait; {sorted(wire)} are sent and not received")
    return [rank.output() for rank in ranks]


class _Rank:
    def __init__(self, rank: int, schedule: Schedule, own: np.ndarray, op: str) -> None:
        self.rank = rank
        self.schedule = schedule
        self.input = own
        self.op = op
        self.accumulator = ACCUMULATOR.get(own.dtype.name, own.dtype)
        self.steps: dict[int, list[tuple[int, Step]]] = defaultdict(list)
        self.types: dict[int, list[Type]] = {}
        self.buffers: dict[tuple[int, int], np.ndarray] = {}  # (shard, buffer)

    def add(self, shard: int, steps: Sequence[Step], types: list[Type]) -> None:
        """The steps of one more shard, of which the input is cut as the operation says."""
        for step in steps:
            self.steps[step.step].append((shard, step))
        self.types[shard] = types
        operation = self.schedule.operation
        if self.rank in operation.sources(shard, self.ranks, self.schedule.root):
            if operation.name in ("all_gather", "gather"):
                own = self.input
            elif operation.pieces == "pairs":
                own = np.array_split(self.input, self.ranks)[shard % self.ranks]
            else:
                own = np.array_split(self.input, self.schedule.shards)[shard]
            self.buffers[shard, INPUT] = own

    @property
    def ranks(self) -> int:
        return self.schedule.topology.ranks

    def run(self, wire: Wire) -> Iterator[bool]:
        """Do all steps; at each pause, whether anything has moved since the one before."""
        for number in sorted(self.steps):
            here = self.steps[number]
            sends = [
                (number, self.rank, step.to, shard) for shard, step in here if type(step) is Send
            ]
            for shard, step in here:
                if type(step) is Send:
                    parcel = [self.buffers[shard, buffer] for buffer in step.buffers]
                    wire[number, self.rank, step.to, shard] = parcel
            receives = [(shard, step) for shard, step in here if type(step) is Receive]
            moved = bool(sends)
            while receives or any(message in wire for message in sends):
                for shard, step in list(receives):
                    parcel = wire.pop((number, step.source, self.rank, shard), None)
                    if parcel is not None:
                        receives.remove((shard, step))
                        for buffer, array in zip(step.buffers, parcel, strict=True):
                            self.write(shard, buffer, array)
                        moved = True
                yield moved
                moved = False
            for shard, step in here:
                if type(step) is Combine:
                    self.combine(shard, step)
                elif type(step) is Copy:
                    self.write(shard, step.out, self.buffers[shard, step.source])

    def write(self, shard: int, buffer: int, array: np.ndarray) -> None:
        """Keep a copy, in a buffer that is free and of its type."""
        node = self.types[shard][buffer] is Type.NODE
        assert array.dtype == (self.accumulator if node else self.input.dtype)
        assert (shard, buffer) not in self.buffers
        self.buffers[shard, buffer] = array.copy()

    def combine(self, shard: int, step: Combine) -> None:
        operands = {node: self.buffers[shard, buffer] for node, buffer in step.operands}
        result = self.value(step.node, operands)
        self.write(shard, step.out, self.finished(result) if step.finish else result)

    def value(self, node: Node, operands: dict[Node, np.ndarray]) -> np.ndarray:
        if node in operands:
            return operands[node].astype(self.accumulator)
        lo, hi = node
        middle = split(lo, hi)
        left, right = self.value((lo, middle), operands), self.value((middle, hi), operands)
        with np.errstate(all="ignore"):
            return left * right if self.op == "prod" else left + right

    def finished(self, root: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            if self.op == "avg" and root.dtype.kind in "iu":
                quotient = np.abs(root.astype(object)) // self.ranks
                root = np.where(root < 0, -quotient, quotient)
            elif self.op == "avg":
                root = root / root.dtype.type(self.ranks)
            result = root.astype(self.input.dtype)
        if result.dtype.name in QUIET_NAN:
            words = result.view(f"u{result.dtype.itemsize}")
            words[np.isnan(result)] = QUIET_NAN[result.dtype.name]
        return result

    def output(self) -> np.ndarray | None:
        pieces = [
            self.buffers[shard, OUTPUT]
            for shard in range(self.schedule.shards)
            if (shard, OUTPUT) in self.buffers
        ]
        return np.concatenate(pieces) if pieces else None
