"""What a schedule sends: counted from its steps, shard by shard."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What a schedule sends.

    Attributes:
        ranks: number of ranks.
        shards: number of shards; buffers below are each the size of one.
        messages: by rank; all that goes to one rank in one step is one message.
        leaves, nodes, results: buffers sent, by rank.
        adds: additions, by rank, in shards.
    """

    ranks: int
    shards: int
    messages: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    adds: list[int] = field(default_factory=list)
    # The messages of each step: shards share them, and each counts once.
    _seen: dict[int, set[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for counter in (self.messages, self.leaves, self.nodes, self.results, self.adds):
            counter.extend([0] * self.ranks)

    @property
    def steps(self) -> int:
        """Step numbers, from the first to the last that sends."""
        return max(self._seen, default=-1) + 1

    def count_messages(self, step: int, messages: Set[int]) -> None:
        """Count the messages of a step, each as the number ``source * ranks + target``."""
        if not messages:
            return
        seen = self._seen.setdefault(step, set())
        for message in messages - seen:
            self.messages[message // self.ranks] += 1
        seen.update(messages)

    def merge(self, other: Traffic) -> None:
        """Add what other shards of the same schedule send.

        A message that carries shards of both is one message, and counts once.

        Raises:
            ValueError: `other` is of another number of ranks or shards.
        """
        if (self.ranks, self.shards) != (other.ranks, other.shards):
            raise ValueError(
                f"traffic of {self.ranks} ranks and {self.shards} shards, and of {other.ranks} "
                f"ranks and {other.shards} shards, is not of one schedule"
            )
        for step, messages in other._seen.items():
            self.count_messages(step, messages)
        for mine, its in (
            (self.leaves, other.leaves),
            (self.nodes, other.nodes),
            (self.results, other.results),
            (self.adds, other.adds),
        ):
            mine[:] = map(int.__add__, mine, its)

    def bytes_sent(self, rank: int, element: int, accumulator: int) -> float:
        """Bytes that a rank sends for each element of the whole buffer.

        Args:
            rank: the rank.
            element: bytes of an element.
            accumulator: bytes of an element in the accumulator's type.
        """
        moved = (self.leaves[rank] + self.results[rank]) * element + self.nodes[rank] * accumulator
        return moved / self.shards
