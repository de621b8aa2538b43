"""`Schedule`: one collective by one algorithm on one topology, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from pycollective.errors import ConfigurationError
from pycollective.schedule.algorithms.base import Algorithm, Room
from pycollective.schedule.algorithms.direct import DIRECT
from pycollective.schedule.algorithms.halving_doubling import HALVING_DOUBLING
from pycollective.schedule.algorithms.hierarchical import HIERARCHICAL
from pycollective.schedule.algorithms.recursive_doubling import RECURSIVE_DOUBLING
from pycollective.schedule.algorithms.ring import RING
from pycollective.schedule.algorithms.tree import TREE

from .handing import lower_rank
from .lower import Move, lower
from .operation import Operation, find_operation
from .steps import RankSteps
from .topology import Topology

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (DIRECT, RING, TREE, HALVING_DOUBLING, RECURSIVE_DOUBLING, HIERARCHICAL)
}


@dataclass(frozen=True)
class Schedule:
    """What every rank sends, receives and combines, shard by shard.

    Attributes:
        operation: the collective.
        algorithm: how.
        topology: which ranks share a host.
        root: of the operation, where it has one.
        shards: number of shards.
    """

    operation: Operation
    algorithm: Algorithm
    topology: Topology
    root: int
    shards: int

    def moves(self, shard: int) -> list[Move]:
        """The algorithm's moves of a shard."""
        return self.algorithm.moves[self.operation.name](self.topology, shard, self.root)

    def lowered(self, shard: int) -> dict[int, RankSteps]:
        """The steps of each rank that has any, for a shard."""
        return lower(self.operation, shard, self.topology.ranks, self.root, self.moves(shard))

    def lowered_for(self, rank: int) -> Iterator[tuple[int, RankSteps]]:
        """Each shard of which a rank has steps, and these; without lowering the other ranks'."""
        n, root = self.topology.ranks, self.root
        handings = self.algorithm.handings[self.operation.name]
        shards: Iterable[int] = range(self.shards)
        if self.operation.pieces == "pairs":  # its row and its column
            shards = sorted({*range(rank * n, rank * n + n), *range(rank, n * n, n)})
        for shard in shards:
            touching = handings(self.topology, shard, root, rank)
            steps = lower_rank(self.operation, shard, n, root, rank, touching)
            if steps is not None:
                yield shard, steps

    def room(self) -> Room | None:
        """The places and steps of all ranks, where there is a formula for them."""
        if self.topology.ranks == 1:
            return Room(0, 0, 0)
        formula = self.algorithm.room.get(self.operation.name)
        return formula(self.topology, self.root) if formula else None


@cache
def algorithms_for(operation: str) -> tuple[str, ...]:
    """The algorithms that can do an operation."""
    return tuple(name for name, each in ALGORITHMS.items() if operation in each.moves)


def make_schedule(operation: str, algorithm: str, topology: Topology, root: int = 0) -> Schedule:
    """The schedule of a collective.

    Raises:
        ConfigurationError: there is no such operation or algorithm, or the algorithm cannot do the
            operation; the message names those that can.
    """
    what = find_operation(operation)
    possible = algorithms_for(operation)
    if algorithm not in possible:
        unknown = "unknown algorithm" if algorithm not in ALGORITHMS else "cannot be done by"
        raise ConfigurationError(
            f"{operation}: {unknown} {algorithm!r}; there are {', '.join(possible)}"
        )
    if not 0 <= root < topology.ranks:
        raise ConfigurationError(f"root {root} is not one of 0 to {topology.ranks - 1}")
    n = topology.ranks
    how = ALGORITHMS[algorithm]
    shards = {"cut": how.cuts(topology), "ranks": n, "pairs": n * n}[what.pieces]
    if what.rooted and not what.reduces and what.pieces == "cut":
        shards = 1  # a broadcast's root has all of it
    return Schedule(what, how, topology, root, shards)
