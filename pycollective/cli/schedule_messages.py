"""What a schedule sends, step by step: counted for a table, message by message for a picture."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pycollective.errors import ConfigurationError
from pycollective.order import Node
from pycollective.schedule import Schedule
from pycollective.schedule.steps import INPUT, Combine, RankSteps, Receive, Send, Type

KINDS = (Type.LEAF, Type.NODE, Type.RESULT)
_MOST_COUNTERS = 1 << 28  # 2 GiB
_PENDING = 1 << 20  # keys that are kept before those of the same message are made one


@dataclass(frozen=True)
class Sizes:
    """How large what travels is.

    Attributes:
        total: bytes of a rank's input or output, whichever is larger.
        dtype: type of an element.
        element: bytes of an element.
        accumulator: the type in which nodes travel.
        wide: bytes of an element in that type.
    """

    total: int
    dtype: str
    element: int
    accumulator: str
    wide: int

    def shard(self, schedule: Schedule) -> NDArray[np.float64]:
        """Bytes of a shard as each of `KINDS`; all shards count as equally large."""
        # Where each pair of ranks has a shard, a rank's own buffer holds one for each rank.
        pairs = schedule.operation.pieces == "pairs"
        shards = schedule.topology.ranks if pairs else schedule.shards
        count = self.total / self.element / shards
        return count * np.array([self.element, self.wide, self.element], np.float64)


class Counts:
    """Messages and buffers that each rank sends in each step.

    Attributes:
        ranks: number of ranks.
        steps: number of steps.
        across: buffers that all ranks send to other hosts, by kind as in `KINDS`.
    """

    def __init__(self, ranks: int, host_of: Sequence[int] = ()) -> None:
        """`host_of`: of each rank; empty where all are on one."""
        self.ranks = ranks
        self.steps = 0
        self.across: NDArray[np.int64] = np.zeros(len(KINDS), np.int64)
        self._host_of = host_of
        self._buffers = array("q")
        self._keys: NDArray[np.int64] = np.empty(0, np.int64)  # of messages, each once
        self._pending = array("q")

    def add(self, lowered: Mapping[int, RankSteps]) -> None:
        """Count what is sent of one shard."""
        n, host_of = self.ranks, self._host_of
        for rank, (steps, types) in lowered.items():
            for step in steps:
                if type(step) is not Send:
                    continue
                if step.step >= self.steps:
                    self._make_room(step.step + 1)
                at = step.step * n + rank
                self._pending.append(at * n + step.to)
                across = bool(host_of) and host_of[rank] != host_of[step.to]
                for buffer in step.buffers:
                    made = types[buffer]
                    kind = 0 if made is Type.LEAF else 1 if made is Type.NODE else 2
                    self._buffers[3 * at + kind] += 1
                    if across:
                        self.across[kind] += 1
        if len(self._pending) > max(_PENDING, len(self._keys)):
            self._merge()

    def _make_room(self, steps: int) -> None:
        """For counters of so many steps."""
        more = len(KINDS) * self.ranks * (steps - self.steps)
        if len(self._buffers) + more > _MOST_COUNTERS:
            raise ConfigurationError(
                f"{steps} steps and more of {self.ranks} ranks are too many to count"
            )
        self._buffers.frombytes(bytes(self._buffers.itemsize * more))
        self.steps = steps

    def _merge(self) -> None:
        """All that goes to one rank in one step is one message, of however many shards."""
        self._keys = np.union1d(self._keys, np.array(self._pending, np.int64))
        self._pending = array("q")

    def messages(self) -> NDArray[np.int64]:
        """Number of messages, by step and sender."""
        self._merge()
        n = self.ranks
        return np.bincount(self._keys // n, minlength=self.steps * n).reshape(self.steps, n)

    def buffers(self) -> NDArray[np.int64]:
        """Number of buffers, each the size of a shard, by step, sender and kind as in `KINDS`."""
        counted = np.frombuffer(self._buffers, np.int64) if self.steps else np.empty(0, np.int64)
        return counted.reshape(self.steps, self.ranks, 3)


Key = tuple[int, int, int]  # step, sender, receiver


def messages(schedule: Schedule) -> dict[Key, NDArray[np.int64]]:
    """The buffers in each message, by kind as in `KINDS`."""
    found: dict[Key, NDArray[np.int64]] = {}
    for shard in range(schedule.shards):
        for rank, (steps, types) in schedule.lowered(shard).items():
            for step in steps:
                if isinstance(step, Send):
                    kinds = found.setdefault((step.step, rank, step.to), np.zeros(3, np.int64))
                    for buffer in step.buffers:
                        kinds[KINDS.index(types[buffer])] += 1
    return found


@dataclass(frozen=True)
class Sent:
    """What a message holds of one shard: nodes of the order, or none where it is the result."""

    key: Key
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Made:
    """A node that a rank computes after it has received; `finish`: the root, and so the result."""

    step: int
    rank: int
    node: Node
    finish: bool


def follow(schedule: Schedule, shard: int) -> Iterator[Sent | Made]:
    """The way of one shard: what is sent of it and what is computed, step by step."""
    lowered = schedule.lowered(shard)
    # The node in each rank's buffer; a result has none.
    values: dict[tuple[int, int], Node] = {}
    if schedule.operation.reduces:
        values = {(rank, INPUT): (rank, rank + 1) for rank in lowered}
    parcels: dict[Key, list[Node | None]] = {}
    # What is received in a step was sent in it, by any rank; within a rank, steps are in order.
    steps = sorted(
        (step.step, not isinstance(step, Send), i, rank)
        for rank, own in lowered.items()
        for i, step in enumerate(own.steps)
    )
    for _, _, i, rank in steps:
        step = lowered[rank].steps[i]
        if isinstance(step, Send):
            key = step.step, rank, step.to
            parcels[key] = [values.get((rank, buffer)) for buffer in step.buffers]
            yield Sent(key, tuple(node for node in parcels[key] if node is not None))
        elif isinstance(step, Receive):
            parcel = parcels[step.step, step.source, rank]
            for buffer, node in zip(step.buffers, parcel, strict=True):
                if node is not None:
                    values[rank, buffer] = node
        elif isinstance(step, Combine):
            if not step.finish:
                values[rank, step.out] = step.node
            yield Made(step.step, rank, step.node, step.finish)
