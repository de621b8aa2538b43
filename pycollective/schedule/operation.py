"""What each collective asks of a shard: who has it, or a leaf of it, and who must end with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycollective.errors import ConfigurationError

Ranks = Callable[[int, int, int], range]  # (shard, ranks, root) -> ranks


def _all(_shard: int, ranks: int, _root: int) -> range:
    return range(ranks)


def _owner(shard: int, _ranks: int, _root: int) -> range:
    return range(shard, shard + 1)


def _root(_shard: int, _ranks: int, root: int) -> range:
    return range(root, root + 1)


def _from_block(shard: int, ranks: int, _root: int) -> range:
    return range(shard // ranks, shard // ranks + 1)


def _to_block(shard: int, ranks: int, _root: int) -> range:
    return range(shard % ranks, shard % ranks + 1)


@dataclass(frozen=True)
class Operation:
    """A collective, shard by shard.

    Attributes:
        name: as in `Communicator`.
        reduces: each source has a leaf of the shard, and what is wanted is the reduction; otherwise
            the one source has the shard itself.
        sources: the ranks that have an input of a shard.
        wants: the ranks that must end with it in their output.
        rooted: has a root.
        pieces: how many shards there are for n ranks: ``cut`` if the buffer is one vector that an
            algorithm may cut as it likes, ``ranks`` if each rank owns a shard, ``pairs`` if each
            pair of ranks has one (number ``source * n + target``).
    """

    name: str
    reduces: bool
    sources: Ranks
    wants: Ranks
    rooted: bool = False
    pieces: str = "cut"


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", True, _all, _all),
        Operation("reduce_scatter", True, _all, _owner, pieces="ranks"),
        Operation("all_gather", False, _owner, _all, pieces="ranks"),
        Operation("reduce", True, _all, _root, rooted=True),
        Operation("broadcast", False, _root, _all, rooted=True),
        Operation("gather", False, _owner, _root, rooted=True, pieces="ranks"),
        Operation("scatter", False, _root, _owner, rooted=True, pieces="ranks"),
        Operation("all_to_all", False, _from_block, _to_block, pieces="pairs"),
    )
}


def find_operation(name: str) -> Operation:
    """The collective called `name`.

    Raises:
        ConfigurationError: there is none; names those there are.
    """
    if name not in OPERATIONS:
        raise ConfigurationError(f"no schedules for {name!r}; there are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
