"""`Schedule`: one collective by one algorithm on one topology, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from pycollective.errors import ConfigurationError
from pycollective.leaves.deal import Deal

from .algorithms import ALGORITHMS, Algorithm
from .lower import lower
from .operation import Operation, find_operation
from .steps import RankSteps
from .topology import Topology


@dataclass(frozen=True)
class Schedule:
    """What every rank sends, receives and combines, shard by shard.

    Attributes:
        operation: the collective.
        algorithm: how.
        topology: which ranks share a host.
        root: of the operation, where it has one.
        shards: number of shards.
        deal: of a reduction, which leaves each rank gives; None for one each.
    """

    operation: Operation
    algorithm: Algorithm
    topology: Topology
    root: int
    shards: int
    deal: Deal | None = None

    def lowered(self, shard: int) -> dict[int, RankSteps]:
        """The steps of each rank that has any, for a shard."""
        return {
            rank: steps
            for rank in range(self.topology.ranks)
            if (steps := self.steps_of(shard, rank)) is not None
        }

    def steps_of(self, shard: int, rank: int) -> RankSteps | None:
        """The steps of a rank for a shard, without looking at the others; None if it has none."""
        n, root = self.topology.ranks, self.root
        own = self.algorithm.transfers[self.operation.name](self.topology, shard, root, rank)
        return lower(self.operation, shard, n, root, rank, own, self.deal)

    def inputs_of(self, rank: int) -> int:
        """How many inputs a rank has: with a deal, the nodes that make up its leaves."""
        return 1 if self.deal is None else len(self.deal.nodes(rank))

    def lowered_for(self, rank: int) -> Iterator[tuple[int, RankSteps]]:
        """Each shard of which a rank has steps, and these."""
        n = self.topology.ranks
        shards: Iterable[int] = range(self.shards)
        if self.operation.pieces == "pairs":  # its row and its column
            shards = sorted({*range(rank * n, rank * n + n), *range(rank, n * n, n)})
        for shard in shards:
            steps = self.steps_of(shard, rank)
            if steps is not None:
                yield shard, steps


@cache
def algorithms_for(operation: str) -> tuple[str, ...]:
    """The algorithms that can do an operation."""
    return tuple(name for name, each in ALGORITHMS.items() if operation in each.transfers)


def make_schedule(
    operation: str,
    algorithm: str,
    topology: Topology,
    root: int = 0,
    deal: Deal | None = None,
) -> Schedule:
    """The schedule of a collective.

    Raises:
        ConfigurationError: there is no such operation or algorithm, or the algorithm cannot do the
            operation; the message names those that can. Or the deal is among other ranks.
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
    if deal is not None and (not what.reduces or deal.size != n):
        raise ConfigurationError(
            f"{operation} on {n} ranks cannot have a deal of leaves to {deal.size} ranks"
        )
    how = ALGORITHMS[algorithm]
    shards = {"cut": how.cuts(topology), "ranks": n, "pairs": n * n}[what.pieces]
    if what.rooted and not what.reduces and what.pieces == "cut":
        shards = 1  # a broadcast's root has all of it
    return Schedule(what, how, topology, root, shards, deal)
