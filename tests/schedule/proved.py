"""What all ranks of a schedule send, and the proof that all of it is right."""

from __future__ import annotations

from pycollective.cli.schedule_messages import Counts
from pycollective.schedule import Schedule, Transfer
from pycollective.schedule.proof import check_shard


def transfers_of(schedule: Schedule, shard: int) -> list[Transfer]:
    """What all ranks send of a shard."""
    of_rank = schedule.algorithm.transfers[schedule.operation.name]
    return [
        each
        for rank in range(schedule.topology.ranks)
        for each in of_rank(schedule.topology, shard, schedule.root, rank)
        if each.source == rank
    ]


class Proved:
    """What a right schedule sends: steps, and by rank its messages, and its buffers by kind.

    Raises `Fault` where it is wrong.
    """

    def __init__(self, schedule: Schedule) -> None:
        ranks = schedule.topology.ranks
        counts = Counts(ranks)
        for shard in range(schedule.shards):
            lowered = schedule.lowered(shard)
            check_shard(schedule.operation, shard, ranks, schedule.root, lowered)
            counts.add(lowered)
        self.steps = counts.steps
        self.messages: list[int] = counts.messages().sum(0).tolist()
        self.buffers = counts.buffers().sum(0)  # leaves, nodes, results
        self._shards = schedule.shards

    def bytes_sent(self, element: int, accumulator: int) -> list[float]:
        """By each rank, for each element of the whole buffer."""
        sent: list[float] = (self.buffers @ [element, accumulator, element]).tolist()
        return [each / self._shards for each in sent]
