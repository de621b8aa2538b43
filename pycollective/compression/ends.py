"""The groups that a state's rank exchanges in: how they are made, met in, and told of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective.communicator import Communicator
from pycollective.compression.groups import Alone, Bytes, Group, OfCommunicator, in_order
from pycollective.compression.placing import Places
from pycollective.errors import CollectiveAborted, CollectiveError, CollectiveMismatch

# How a rank that aborts says that it has read what does not fit.
_MISMATCH = f"{CollectiveMismatch.__name__}: "


# Bytes of what begins a call between steps: its length tells it from other calls.
_BETWEEN_STEPS = 2


@dataclass(frozen=True)
class Ends:
    """The groups that one rank exchanges in.

    Attributes:
        places: the hosts of all ranks.
        all: every rank.
        local: this host's.
        across: those that hold the same share on each host; None where this rank holds none.
        spare: of this rank alone where it holds none: all ranks make as many groups.
    """

    places: Places
    all: Group
    local: Group
    across: Group | None
    spare: Group | None = None

    def gather(self, row: Bytes) -> Iterator[tuple[list[int], Bytes]]:
        """Rows of this host's ranks, then of those that hold the same share: by rank, and theirs.

        Once each has compared both, all ranks have the same. Every call of a state begins in these
        two, in this order, so that ranks that call differently meet, and none waits elsewhere.
        """
        if self.local.size > 1:
            yield self.places.local, self.local.all_gather(row)
        if self.across is not None and self.across.size > 1:
            assert self.places.share is not None
            yield self.places.across(self.places.share), self.across.all_gather(row)

    def meet_between_steps(self) -> None:
        """Begin a call that goes on in the group of all ranks.

        Where that is the only group they meet there.

        Raises:
            CollectiveError: over pycollective, another rank begins something else; all are told.
        """
        if self.places.ranks > self.places.hosts:
            with self.telling():
                for _ in self.gather(np.zeros(_BETWEEN_STEPS, np.uint8)):
                    pass

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A rank that fails in an exchange tells those who wait for it, whatever group they are in.

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
        """What another rank has read, and told, that does not fit is a mismatch here, too."""
        try:
            yield
        except CollectiveAborted as error:
            if _MISMATCH in str(error):
                raise CollectiveMismatch(
                    str(error), error.rank, error.op, error.sequence
                ) from error
            raise

    def tell(self, error: BaseException) -> None:
        """Let nobody wait for this rank, which has failed with `error`.

        Where there is one group, its own errors have reached all of it. Not so what only this rank
        has read.
        """
        own = isinstance(error, CollectiveError) and not isinstance(error, CollectiveMismatch)
        if not own or self.places.ranks > self.places.hosts:
            self.abort(f"{type(error).__name__}: {error}")

    @classmethod
    def make(
        cls, places: Places, whole: Group, part: Callable[[Sequence[Sequence[int]]], Group]
    ) -> Ends:
        """Collective over all ranks, each of which makes as many groups as the others.

        Args:
            places: the hosts of all ranks.
            whole: the group of all.
            part: given a partition of the ranks, makes the group that this one is in; its ranks
                ascend.
        """
        hosts = places.hosts
        local: Group = Alone()
        if places.ranks > hosts:  # some host has several
            local = part([places.on(host) for host in range(hosts)])
        if hosts == 1:
            return cls(places, whole, local, Alone() if places.share is not None else None)
        if places.ranks == hosts:
            return cls(places, whole, local, whole)
        across = [places.across(share) for share in range(places.shares)]
        spare = [[rank] for host in range(hosts) for rank in places.on(host)[places.shares :]]
        made = part([*map(sorted, across), *spare])
        if places.share is None:
            return cls(places, whole, local, None, made)
        return cls(places, whole, local, in_order(made, across[places.share]))

    def abort(self, reason: str) -> None:
        """Let nobody wait for this rank; no group does any more work."""
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

    def part(partition: Sequence[Sequence[int]]) -> Group:
        color = next(i for i, ranks in enumerate(partition) if communicator.rank in ranks)
        made = communicator.split(color, communicator.rank)
        assert made is not None
        return OfCommunicator(made)

    # A communicator of the state's own: its calls do not mix with those of the caller's threads.
    return Ends.make(places, part([range(communicator.size)]), part)


@dataclass(frozen=True)
class Among:
    """The ranks that a state is made among, before it has groups of its own.

    Attributes:
        group: the caller's: in it ranks compare what they were given.
        told: what else they must have alike, as JSON can say; looked up by this rank alone, and
            raises `ConfigurationError` where it cannot be.
        ends: makes the groups; collective, so only when all ranks will. Given `between`.
    """

    group: Group
    told: Callable[[], Any]
    ends: Callable[[str], Ends]

    @classmethod
    def of(cls, ranks: Communicator | Ends | Among) -> Among:
        """Those of a communicator, or of groups that there are."""
        if isinstance(ranks, Among):
            return ranks
        if isinstance(ranks, Ends):
            return cls(ranks.all, lambda: None, lambda _: ranks)
        return cls(
            OfCommunicator(ranks),
            lambda: None,
            lambda between: ends_of_communicator(ranks, between),
        )
