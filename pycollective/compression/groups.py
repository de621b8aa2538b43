"""What the exchanges need of a group of ranks: two collectives over bytes, alike for all backends.

Both have a fixed length that all ranks know. Whoever sends fewer bytes agrees on the lengths first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective.communicator import Communicator
from pycollective.errors import CollectiveMismatch

Bytes = NDArray[np.uint8]


class Group(Protocol):
    """Ranks that exchange bytes; each calls the same, in the same order.

    Attributes:
        rank: this one's number, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def all_to_all(self, rows: Bytes) -> Bytes:
        """Row r of (size, n) goes to rank r; row r of the result came from it."""
        ...

    def all_gather(self, row: Bytes) -> Bytes:
        """Every rank's row of n bytes: (size, n)."""
        ...

    def average(self, parts: Sequence[Any]) -> None:
        """Average parts of `Flat`s over the ranks, dense, in place."""
        ...

    def abort(self, reason: str) -> None:
        """Let nobody wait for this rank; the group does no more work."""
        ...

    def close(self) -> None:
        """Leave; collective."""
        ...


class Alone:
    """A group of this rank only: what it sends is what it gets."""

    rank, size = 0, 1

    def all_to_all(self, rows: Bytes) -> Bytes:
        """The rows."""
        return rows

    def all_gather(self, row: Bytes) -> Bytes:
        """The row."""
        return row.reshape(1, -1)

    def average(self, parts: Sequence[Any]) -> None:
        """Nothing to do."""

    def abort(self, reason: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class OfCommunicator:
    """The ranks of a `Communicator`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def all_to_all(self, rows: Bytes) -> Bytes:
        """See `Group`."""
        out = np.empty_like(rows)
        if rows.size:
            self._communicator.all_to_all(out, rows, wire="raw")
        return out

    def all_gather(self, row: Bytes) -> Bytes:
        """See `Group`."""
        out = np.empty((self.size, row.size), np.uint8)
        if row.size:
            self._communicator.all_gather(out, row, wire="raw")
        return out

    def average(self, parts: Sequence[Any]) -> None:
        """See `Group`: parts of one dtype in one call."""
        for same in by_dtype(parts):
            together = same[0] if len(same) == 1 else np.concatenate(same)
            self._communicator.all_reduce(together, "avg")
            at = 0
            for part in same if len(same) > 1 else ():
                part[:] = together[at : at + part.size]
                at += part.size

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._communicator.abort(reason)

    def close(self) -> None:
        """See `Group`."""
        self._communicator.close()


def by_dtype(parts: Sequence[Any]) -> list[list[Any]]:
    """The arrays or tensors of each dtype, in order."""
    found: dict[Any, list[Any]] = {}
    for part in parts:
        found.setdefault(part.dtype, []).append(part)
    return list(found.values())


def _lengths(
    group: Group, rows: Sequence[Bytes], ranks: Sequence[int], most: int
) -> NDArray[np.int64]:
    """How long every rank's rows are, in bytes; checked before as much memory is asked for.

    Raises:
        CollectiveMismatch: a row is longer than `most`.
    """
    mine = np.array([row.size for row in rows], np.int64)
    lengths = group.all_gather(mine.view(np.uint8)).view(np.int64)
    for rank, found in zip(ranks, lengths, strict=True):
        for length in found[(found < 0) | (found > most)]:
            raise CollectiveMismatch(
                f"compressed exchange: rank {rank} tells of a message of {length} bytes, where "
                f"{most} are the most: it sends other parameters, or compresses them in another "
                "way, or what it told was damaged; all ranks must make the same calls in the same "
                "order"
            )
    return lengths


def gather_lengths(group: Group, row: Bytes, ranks: Sequence[int], most: int) -> list[Bytes]:
    """Every rank's row where lengths differ: the lengths first, then all as long as the longest.

    Args:
        group: exchanges them.
        row: this rank's.
        ranks: of the group, by the numbers that an error tells.
        most: bytes that a row may have.

    Raises:
        CollectiveMismatch: a row is longer.
    """
    lengths = _lengths(group, [row], ranks, most)[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: row.size] = row
    return [found[:n] for found, n in zip(group.all_gather(padded), lengths, strict=True)]


def exchange_lengths(
    group: Group, rows: Sequence[Bytes], ranks: Sequence[int], most: int
) -> tuple[list[Bytes], int]:
    """Row r goes to rank r, where lengths differ: the lengths first, then all as the longest.

    Args:
        group: exchanges them.
        rows: this rank's.
        ranks: see `gather_lengths`.
        most: see there.

    Returns:
        What came from each rank; how long the longest row is that any rank sends.

    Raises:
        CollectiveMismatch: a row is longer than `most`.
    """
    lengths = _lengths(group, rows, ranks, most)
    padded = np.zeros((group.size, int(lengths.max())), np.uint8)
    for row, place in zip(rows, padded, strict=True):
        place[: row.size] = row
    came = group.all_to_all(padded)
    to_this = lengths[:, group.rank]
    return [found[:n] for found, n in zip(came, to_this, strict=True)], padded.shape[1]


class InOrder:
    """A group whose members are numbered anew; see `Group`.

    Args:
        group: of ranks that ascend.
        numbers: of each new number, the one in `group`.
    """

    def __init__(self, group: Group, numbers: Sequence[int]) -> None:
        self._group = group
        self._numbers = list(numbers)
        self.rank, self.size = self._numbers.index(group.rank), group.size

    def all_to_all(self, rows: Bytes) -> Bytes:
        """See `Group`."""
        sent = np.empty_like(rows)
        sent[self._numbers] = rows
        return self._group.all_to_all(sent)[self._numbers]

    def all_gather(self, row: Bytes) -> Bytes:
        """See `Group`."""
        return self._group.all_gather(row)[self._numbers]

    def average(self, parts: Sequence[Any]) -> None:
        """See `Group`."""
        self._group.average(parts)

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._group.abort(reason)

    def close(self) -> None:
        """See `Group`."""
        self._group.close()


def in_order(group: Group, ranks: Sequence[int]) -> Group:
    """A group of ranks that ascend, numbered in the order that `ranks` has."""
    if list(ranks) == sorted(ranks):
        return group
    return InOrder(group, [sorted(ranks).index(rank) for rank in ranks])
