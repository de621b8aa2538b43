"""Groups of ranks that exchange bytes, of a communicator; torch has its own kind.

A message has a length that all ranks know. Whoever sends fewer bytes agrees on the lengths first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective.communicator import Communicator
from pycollective.compression.partition import Hosts
from pycollective.errors import CollectiveAborted, CollectiveError, CollectiveMismatch

Bytes = NDArray[np.uint8]

# How a rank that aborts says that it has read what does not fit.
MISMATCH = f"{CollectiveMismatch.__name__}: "
# Bytes of what begins a call between steps: its length tells it from other calls.
_BETWEEN_STEPS = 2


class Group(Protocol):
    """Ranks that exchange bytes; each calls the same, in the same order.

    Bytes are arrays of NumPy; a group of ranks on devices takes those on its device, too, and
    gives the same kind.

    Attributes:
        rank: this one's number, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def all_to_all(self, rows: Any) -> Any:
        """Row r of (size, n) goes to rank r; row r of the result came from it."""
        ...

    def all_gather(self, row: Any) -> Any:
        """Every rank's row of n bytes: (size, n)."""
        ...

    def reordered(self, rows: Any, numbers: Sequence[int]) -> Any:
        """These rows, in this order; a copy."""
        ...

    def average(self, parts: Sequence[Any]) -> None:
        """Average parts of `Flat`s over the ranks, dense, in place."""
        ...

    def abort(self, reason: str) -> None:
        """Make all ranks' calls fail; the group does no more work."""
        ...

    def close(self) -> None:
        """Leave; collective."""
        ...


class Alone:
    """A group of this rank only: what it sends is what it gets."""

    rank, size = 0, 1

    def all_to_all(self, rows: Any) -> Any:
        return rows

    def all_gather(self, row: Any) -> Any:
        return row.reshape(1, -1)

    def reordered(self, rows: Any, numbers: Sequence[int]) -> Any:
        return rows

    def average(self, parts: Sequence[Any]) -> None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class CommunicatorGroup:
    """The group of a `Communicator`'s ranks."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def all_to_all(self, rows: Bytes) -> Bytes:
        out = np.empty_like(rows)
        if rows.size:
            self._communicator.all_to_all(out, rows, wire="raw")
        return out

    def all_gather(self, row: Bytes) -> Bytes:
        out = np.empty((self.size, row.size), np.uint8)
        if row.size:
            self._communicator.all_gather(out, row, wire="raw")
        return out

    def reordered(self, rows: Bytes, numbers: Sequence[int]) -> Bytes:
        return rows[list(numbers)]

    def average(self, parts: Sequence[Any]) -> None:
        for same in by_dtype(parts):
            together = same[0] if len(same) == 1 else np.concatenate(same)
            self._communicator.all_reduce(together, "avg")
            at = 0
            for part in same if len(same) > 1 else ():
                part[:] = together[at : at + part.size]
                at += part.size

    def abort(self, reason: str) -> None:
        self._communicator.abort(reason)

    def close(self) -> None:
        self._communicator.close()


def by_dtype(parts: Sequence[Any]) -> list[list[Any]]:
    """The arrays or tensors of each dtype, in order."""
    found: dict[Any, list[Any]] = {}
    for part in parts:
        found.setdefault(part.dtype, []).append(part)
    return list(found.values())


def _lengths(
    group: Group, mine: NDArray[np.int64], ranks: Sequence[int], most: int
) -> NDArray[np.int64]:
    """How long every rank's rows are, in bytes; checked before memory is taken for them.

    Raises:
        CollectiveMismatch: a row is longer than `most`.
    """
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


def gather_lengths(
    group: Group, row: Bytes, ranks: Sequence[int], most: int
) -> tuple[Bytes, NDArray[np.int64]]:
    """All-gather rows of different lengths: first the lengths, then all as long as the longest.

    Args:
        group: of the ranks.
        row: this rank's.
        ranks: of the group, by the numbers that an error tells.
        most: bytes that a row may have.

    Returns:
        (size, longest) bytes; how long each row is.

    Raises:
        CollectiveMismatch: a row is longer than `most`.
    """
    lengths = _lengths(group, np.array([row.size]), ranks, most)[:, 0]
    return group.all_gather(_padded([row], lengths)[0]), lengths


def exchange_lengths(
    group: Group, rows: Sequence[Bytes], ranks: Sequence[int], most: int
) -> tuple[Bytes, NDArray[np.int64]]:
    """Send row r to rank r, as `gather_lengths` does.

    Args:
        group: of the ranks.
        rows: this rank's.
        ranks: of the group, by the numbers that an error tells.
        most: bytes that a row may have.

    Returns:
        (size, longest) bytes, of any rank's rows; how long each row is that came.

    Raises:
        CollectiveMismatch: a row is longer than `most`.
    """
    lengths = _lengths(group, np.array([row.size for row in rows]), ranks, most)
    return group.all_to_all(_padded(rows, lengths)), lengths[:, group.rank]


def _padded(rows: Sequence[Bytes], lengths: NDArray[np.int64]) -> Bytes:
    padded = np.zeros((len(rows), int(lengths.max())), np.uint8)
    for row, place in zip(rows, padded, strict=True):
        place[: row.size] = row
    return padded


class InOrder:
    """A group whose ranks are numbered in another order.

    Args:
        group: of ranks that ascend.
        numbers: of each new number, the one in `group`.

    Attributes:
        group, numbers: as given.
    """

    def __init__(self, group: Group, numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = list(numbers)
        self.rank, self.size = self.numbers.index(group.rank), group.size

    def all_to_all(self, rows: Any) -> Any:
        back = [self.numbers.index(rank) for rank in range(self.size)]
        came = self.group.all_to_all(self.reordered(rows, back))
        return self.reordered(came, self.numbers)

    def all_gather(self, row: Any) -> Any:
        return self.reordered(self.group.all_gather(row), self.numbers)

    def reordered(self, rows: Any, numbers: Sequence[int]) -> Any:
        return self.group.reordered(rows, numbers)

    def average(self, parts: Sequence[Any]) -> None:
        self.group.average(parts)

    def abort(self, reason: str) -> None:
        self.group.abort(reason)

    def close(self) -> None:
        self.group.close()


def in_order(group: Group, ranks: Sequence[int]) -> Group:
    """A group of ranks that ascend, numbered in the order that `ranks` has."""
    if list(ranks) == sorted(ranks):
        return group
    return InOrder(group, [sorted(ranks).index(rank) for rank in ranks])


@dataclass(frozen=True)
class Groups:
    """The groups that one rank exchanges in.

    Attributes:
        hosts: of all ranks.
        all: every rank.
        local: this host's.
        across: those that have the same local shard on each host; None where this rank has none.
        spare: of this rank alone where it has none: all ranks make as many groups.
    """

    hosts: Hosts
    all: Group
    local: Group
    across: Group | None
    spare: Group | None = None

    def where_calls_begin(self) -> Iterator[tuple[Sequence[int], Group]]:
        """This host's ranks, then those with the same local shard; each with their group.

        Once each rank has compared in both, all ranks have the same. Every call of a state begins
        in these two groups, in this order, so that ranks that call differently find out.
        """
        if self.local.size > 1:
            yield self.hosts.local, self.local
        if self.across is not None and self.across.size > 1:
            assert self.hosts.shard is not None
            yield self.hosts.across(self.hosts.shard), self.across

    def meet_between_steps(self) -> None:
        """Begin a call that goes on in the group of all ranks.

        One that has begun something else is found out here, or there if it is the only group.

        Raises:
            CollectiveError: over pycollective, another rank begins something else; all are told.
        """
        if self.hosts.ranks > self.hosts.count:
            with self.telling():
                for _, group in self.where_calls_begin():
                    group.all_gather(np.zeros(_BETWEEN_STEPS, np.uint8))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """If this rank fails, tell the ranks that wait for it, whatever group they are in.

        Raises:
            CollectiveMismatch: also where another rank has read what does not fit.
        """
        try:
            with self.hearing():
                yield
        except BaseException as error:
            self.tell(error)
            raise

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Raise CollectiveMismatch where another rank has told of one."""
        try:
            yield
        except CollectiveAborted as error:
            if MISMATCH in str(error):
                raise CollectiveMismatch(
                    str(error), error.rank, error.op, error.sequence
                ) from error
            raise

    def tell(self, error: BaseException) -> None:
        """Abort the groups, because this rank has failed with `error`.

        If there is only one group, its own errors have reached all ranks, but not what only this
        rank has read.
        """
        own = isinstance(error, CollectiveError) and not isinstance(error, CollectiveMismatch)
        if not own or self.hosts.ranks > self.hosts.count:
            self.abort(f"{type(error).__name__}: {error}")

    @classmethod
    def make(
        cls, hosts: Hosts, whole: Group, part: Callable[[Sequence[Sequence[int]]], Group]
    ) -> Groups:
        """Collective over all ranks, each of which makes as many groups as the others.

        Args:
            hosts: of all ranks.
            whole: the group of all.
            part: given disjoint lists of all ranks, makes the group that this one is in; its ranks
                ascend.
        """
        every = range(hosts.count)
        local: Group = Alone()
        if hosts.ranks > hosts.count:  # some host has several
            local = part([hosts.on(host) for host in every])
        if hosts.count == 1:
            return cls(hosts, whole, local, Alone() if hosts.shard is not None else None)
        if hosts.ranks == hosts.count:
            return cls(hosts, whole, local, whole)
        across = [hosts.across(shard) for shard in range(hosts.shards)]
        spare = [[rank] for host in every for rank in hosts.on(host)[hosts.shards :]]
        made = part([*map(sorted, across), *spare])
        if hosts.shard is None:
            return cls(hosts, whole, local, None, made)
        return cls(hosts, whole, local, in_order(made, across[hosts.shard]))

    def abort(self, reason: str) -> None:
        """Make all ranks' calls fail; no group does any more work."""
        for group in (self.all, self.local, self.across):
            if group is not None:
                group.abort(reason)

    def close(self) -> None:
        """Leave all groups, also where one of them cannot be left in order; collective."""
        with ExitStack() as closing:  # the last comes first
            groups = self.all, self.local, self.across, self.spare
            for group in {id(each): each for each in groups}.values():
                if group is not None:
                    closing.callback(group.close)


def groups_of_communicator(
    communicator: Communicator, between: str = "hosts", host_of: Sequence[int] | None = None
) -> Groups:
    """The groups of a communicator's ranks; collective. The parts are communicators of their own.

    Args:
        communicator: of the ranks that average.
        between: see `Hosts.of`.
        host_of: the host of each rank, to simulate another topology than the one there is.
    """
    hosts = Hosts.of(communicator.rank, host_of or communicator.host_of, between)

    def part(disjoint: Sequence[Sequence[int]]) -> Group:
        color = next(i for i, ranks in enumerate(disjoint) if communicator.rank in ranks)
        made = communicator.split(color, communicator.rank)
        assert made is not None
        return CommunicatorGroup(made)

    # A communicator of the state's own: its calls do not mix with those of the caller's threads.
    return Groups.make(hosts, part([range(communicator.size)]), part)


@dataclass(frozen=True)
class GroupMaker:
    """Ranks that can make groups, once they have agreed on what for.

    Attributes:
        group: the caller's: in it ranks compare what they were given.
        told: what else they must have alike, as JSON can say; looked up by this rank alone, and
            raises `ConfigurationError` where it cannot be.
        make: makes the groups; collective, so only when all ranks will. Given `between`.
    """

    group: Group
    told: Callable[[], Any]
    make: Callable[[str], Groups]

    @classmethod
    def of(cls, ranks: Communicator | Groups | GroupMaker) -> GroupMaker:
        """That of a communicator, or of groups that there are."""
        if isinstance(ranks, GroupMaker):
            return ranks
        if isinstance(ranks, Groups):
            return cls(ranks.all, lambda: None, lambda _: ranks)
        return cls(
            CommunicatorGroup(ranks),
            lambda: None,
            lambda between: groups_of_communicator(ranks, between),
        )
