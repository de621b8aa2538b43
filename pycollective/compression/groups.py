"""What the exchanges need of a group of ranks: two collectives over bytes, alike for all backends.

Both have a fixed length that all ranks know. Whoever sends fewer bytes agrees on the lengths first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective.communicator import Communicator
from pycollective.compression.placing import Places
from pycollective.errors import CollectiveError

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

    def average(self, part: Any) -> None:
        """Average a part of a `Flat` over the ranks, dense, in place."""
        ...

    def abort(self, reason: str) -> None:
        """End the other ranks' waiting, where the backend can."""
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

    def average(self, part: Any) -> None:
        """Nothing to do."""

    def abort(self, reason: str) -> None:
        """Nobody waits."""


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

    def average(self, part: Any) -> None:
        """See `Group`."""
        self._communicator.all_reduce(part, "avg")

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._communicator.abort(reason)

    def close(self) -> None:
        """Leave."""
        self._communicator.close()


def gather_lengths(group: Group, row: Bytes) -> list[Bytes]:
    """Every rank's row where lengths differ: the lengths first, then all as long as the longest."""
    lengths = group.all_gather(np.array([row.size], np.int64).view(np.uint8)).view(np.int64)[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: row.size] = row
    return [found[:n] for found, n in zip(group.all_gather(padded), lengths, strict=True)]


def exchange_lengths(group: Group, rows: Sequence[Bytes]) -> tuple[list[Bytes], int]:
    """Row r goes to rank r, where lengths differ: the lengths first, then all as the longest.

    Returns:
        What came from each rank; how long the longest row is that any rank sends.
    """
    mine = np.array([row.size for row in rows], np.int64)
    lengths = group.all_gather(mine.view(np.uint8)).view(np.int64)
    padded = np.zeros((group.size, int(lengths.max())), np.uint8)
    for row, place in zip(rows, padded, strict=True):
        place[: row.size] = row
    came = group.all_to_all(padded)
    to_this = lengths[:, group.rank]
    return [found[:n] for found, n in zip(came, to_this, strict=True)], padded.shape[1]


@dataclass(frozen=True)
class Ends:
    """The groups that one rank exchanges in.

    Attributes:
        places: the hosts of all ranks.
        all: every rank.
        local: this host's.
        across: those that hold the same share on each host; None where this rank holds none.
    """

    places: Places
    all: Group
    local: Group
    across: Group | None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A rank that fails in an exchange tells those who wait for it in another of the groups.

        Where there is one group, all of it sees what this rank saw.
        """
        try:
            yield
        except CollectiveError as error:
            for group in (self.all, self.local, self.across):
                if group is not None and self.places.ranks > self.places.hosts:
                    group.abort(str(error))
            raise

    @classmethod
    def make(cls, places: Places, whole: Any, part: Callable[[Sequence[int], int], Any]) -> Ends:
        """Collective over all ranks.

        Args:
            places: the hosts of all ranks.
            whole: the group of all.
            part: makes the group of the ranks given, its members; or takes part where others make
                theirs (then the list is empty). The second argument tells groups apart.
        """
        hosts = places.hosts
        one = len(places.local) == 1
        local: Group = Alone()
        if places.ranks > hosts:  # some host has several
            made = part([] if one else places.local, places.host)
            local = local if one else made
        share = places.share
        if hosts == 1:
            return cls(places, whole, local, Alone() if share is not None else None)
        if places.ranks == hosts:
            return cls(places, whole, local, whole)
        made = part([] if share is None else places.across(share), share or 0)
        return cls(places, whole, local, None if share is None else made)


def ends_of_communicator(
    communicator: Communicator, between: str = "hosts", host_of: Sequence[int] | None = None
) -> Ends:
    """The groups of a communicator's ranks; collective. The parts are communicators of their own.

    Args:
        communicator: of the ranks that average.
        between: see `Places.of`.
        host_of: the host of each rank, to play another topology than the one there is.
    """
    places = Places.of(communicator.rank, host_of or communicator.host_of, between)

    def part(ranks: Sequence[int], color: int) -> OfCommunicator | None:
        made = communicator.split(color if ranks else None, communicator.rank)
        return None if made is None else OfCommunicator(made)

    # A communicator of the state's own: its calls do not mix with those of the caller's threads.
    whole = communicator.split(0, communicator.rank)
    assert whole is not None
    return Ends.make(places, OfCommunicator(whole), part)
