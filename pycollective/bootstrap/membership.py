"""Membership: the ranks of a communicator become fewer, or more, without a new launch.

All of it goes through the store at which the ranks first met. The ranks between two changes are an
*epoch*; a change may take several attempts:

1. Each rank says that it has come, and whether it stays. Whoever sees that all have come or are
   gone decides who the ranks are from now on: those that have come and stay, in their order, and
   behind them the newcomers, if all ranks are ready for some. The store keeps the first decision,
   and all ranks read that one.
2. Those ranks join as in `init`, under keys of their epoch. If that fails, as another one has died,
   there is another attempt.

A rank is gone when its process has ended, or it has closed the communicator. One that is stopped or
busy is waited for. A rank that others took for dead finds that it is not in the decision.

These are the keys, each after ``pycollective/``:

- ``<prefix>/<epoch>/<attempt>/came/<rank>``: that this rank has come, and why it does not stay.
- ``<prefix>/<epoch>/<attempt>/decision``: the ranks of the next epoch.
- ``newcomers/<number>``: a process that wants to join, numbered from 1 in the order of coming.
- ``newcomers/<number>/invited``: where it is to join, and as which rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from time import monotonic, sleep
from typing import Any

import numpy as np

from pycollective.bootstrap.attach import NODE
from pycollective.bootstrap.joining import connect
from pycollective.bootstrap.options import InitOptions
from pycollective.bootstrap.rendezvous import leave_will, refusing_unreadable
from pycollective.bootstrap.restarts import is_alive, process_identity
from pycollective.communicator import Communicator
from pycollective.errors import (
    CollectiveError,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
    named,
)
from pycollective.placement import number_hosts

_LONGEST_PAUSE = 0.02  # seconds between looks into the store
# Seconds that joining may take before another epoch begins: a rank may have been stopped, or have
# died where the store does not tell of it.
_JOIN_WITHIN = 10.0


@dataclass(frozen=True)
class Decision:
    """Who the ranks of an epoch are.

    Attributes:
        members: those that stay, by their numbers before.
        newcomers: the numbers of those that join.
        seen: the last newcomer's number that was looked at.
        left: ranks that came and do not stay, and why.
    """

    members: list[int]
    newcomers: list[int]
    seen: int
    left: dict[int, str]

    def as_text(self) -> str:
        """Return it as it lies in the store."""
        return json.dumps([self.members, self.newcomers, self.seen, [*self.left.items()]])

    @classmethod
    def from_text(cls, text: bytes) -> Decision:
        """Read what `as_text` gave."""
        with refusing_unreadable("which ranks go on"):
            members, newcomers, seen, left = json.loads(text)
            return cls(
                [int(each) for each in members],
                [int(each) for each in newcomers],
                int(seen),
                {int(rank): str(why) for rank, why in left},
            )


@dataclass(frozen=True)
class Membership:
    """How the ranks of one communicator become others.

    Attributes:
        open_store: opens the store at which they met, with `set`, `get`, `check`, `compare_set`.
        prefix: of their keys there.
        options: as `init` was given them; the same on all ranks.
        hosts: the host of each rank where hosts are simulated; else empty.
        epoch: a name that no other has in this store, but what `init` has made.
        seen: the number of the last newcomer that was looked at.
        left: ranks, by their numbers before, that have left by themselves in the last change, and
            why.
    """

    open_store: Callable[[], AbstractContextManager[Any]]
    prefix: str
    options: InitOptions
    hosts: tuple[int, ...] = ()
    epoch: str = ""
    seen: int = 0
    left: dict[int, str] = field(default_factory=dict)

    def shrink(self, comm: Communicator, stays: bool, why: str) -> Communicator | None:
        """`Communicator.shrink`; `why` a rank leaves that does not stay."""
        _refuse("shrink", comm)
        if comm.failure is None:
            comm.abort("its ranks form another one, as shrink() was called")
        return self._change(comm, stays, why, admits=False)

    def grow(self, comm: Communicator) -> Communicator:
        """`Communicator.grow`."""
        _refuse("grow", comm)
        waiting = np.zeros(1, np.int64)
        if comm.rank == 0:
            with self.open_store() as store:
                waiting[0] = self.has_newcomers(store)
        comm.broadcast(waiting)
        if not waiting[0]:
            return comm
        return self.admit(comm)

    def admit(self, comm: Communicator) -> Communicator:
        """Let newcomers in that wait; all ranks know that some may."""
        made = self._change(comm, stays=True, why="", admits=True)
        assert made is not None
        return made

    def has_newcomers(self, store: Any) -> bool:
        """Return whether a process waits to join; does not wait."""
        return bool(store.check([_newcomer(self.seen + 1)]))

    def _change(
        self, comm: Communicator, stays: bool, why: str, admits: bool
    ) -> Communicator | None:
        deadline = monotonic() + comm.timeout
        came = json.dumps([stays, why, admits])
        ranks = list(range(comm.size))
        last: Decision | None = None
        with self.open_store() as store:
            if not stays:  # nor waits for the others
                self._come(store, f"{self.epoch}/1", comm.rank, came)
                _close(comm)
                return None
            for attempt in count(1):
                change = f"{self.epoch}/{attempt}"
                decision = self._decide(store, change, comm, ranks, came, deadline)
                if comm.rank not in decision.members:
                    _close(comm)
                    raise PeerFailure(
                        f"rank {comm.rank} was taken for dead by the other ranks, which go on "
                        "without it",
                        comm.rank,
                        "shrink",
                    )
                try:
                    return self._join(store, change, comm, decision)
                except (CollectiveError, ConfigurationError) as error:
                    # Another may have died. If it was not that, it will not be better next time.
                    again = isinstance(error, CollectiveTimeout) or decision != last
                    if not again or monotonic() > deadline:
                        raise
                last, ranks = decision, decision.members
                came = json.dumps([stays, why, False])
        raise AssertionError("unreachable")

    def _decide(
        self,
        store: Any,
        change: str,
        comm: Communicator,
        ranks: Sequence[int],
        came: str,
        deadline: float,
    ) -> Decision:
        """Say that this rank has come, and return who goes on once that is decided."""
        for part in ("", "host/"):  # of how it will join
            leave_will(store, f"pycollective/{self.prefix}/{_epoch_of(change)}/{part}", comm.rank)
        place = self._come(store, change, comm.rank, came)
        said: dict[int, Any] = {comm.rank: json.loads(came)}
        pauses = _pauses()
        while not store.check([f"{place}/decision"]):
            for rank in ranks:
                if rank not in said and store.check([f"{place}/came/{rank}"]):
                    with refusing_unreadable(f"what rank {rank} says of itself"):
                        stays, why, admits = json.loads(store.get(f"{place}/came/{rank}"))
                        said[rank] = bool(stays), str(why), bool(admits)
            gone = {*comm._gone()}
            absent = [rank for rank in ranks if rank not in said and rank not in gone]
            if not absent:
                text = self._decided(store, said, gone).as_text()
                return Decision.from_text(store.compare_set(f"{place}/decision", "", text))
            if monotonic() > deadline:
                raise CollectiveTimeout(
                    f"shrink timed out on rank {comm.rank} after {comm.timeout:g} s: "
                    f"{named(absent)} have not called it, and live",
                    comm.rank,
                    "shrink",
                )
            sleep(next(pauses))
        return Decision.from_text(store.get(f"{place}/decision"))

    def _come(self, store: Any, change: str, rank: int, came: str) -> str:
        """Say that this rank has come; return where the keys of this attempt are."""
        place = f"pycollective/{self.prefix}/{change}"
        store.set(f"{place}/came/{rank}", came.encode())
        return place

    def _decided(self, store: Any, said: dict[int, Any], gone: set[int]) -> Decision:
        members = [rank for rank in sorted(said) if said[rank][0] and rank not in gone]
        left = {rank: why for rank, (stays, why, _) in sorted(said.items()) if not stays}
        newcomers, seen = [], self.seen
        if all(said[rank][2] for rank in members):
            while store.check([_newcomer(seen + 1)]):
                seen += 1
                if store.check([f"{_newcomer(seen)}/invited"]):
                    continue  # in vain, as another rank died: it has another number now
                if is_alive(store.get(_newcomer(seen)).decode(errors="replace")):
                    newcomers.append(seen)
        return Decision(members, newcomers, seen, left)

    def _join(
        self, store: Any, change: str, comm: Communicator, decision: Decision
    ) -> Communicator:
        """Make the communicator of those who go on, and let go of the one before."""
        members = decision.members
        epoch = _epoch_of(change)
        hosts = number_hosts([self.hosts[rank] for rank in members]) if self.hosts else ()
        here = Place(
            self.prefix, epoch, members.index(comm.rank), len(members) + len(decision.newcomers)
        )
        newcomers: list[str] = []
        for place, number in enumerate(decision.newcomers, len(members)):
            newcomers.append(store.get(_newcomer(number)).decode(errors="replace"))
            invited = replace(here, rank=place, seen=decision.seen)
            store.set(f"{_newcomer(number)}/invited", invited.as_text().encode())

        def refuse_dead() -> None:
            if not all(map(is_alive, newcomers)):
                raise PeerFailure("a process that was to join has died", comm.rank, "grow")

        after = replace(self, hosts=hosts, epoch=epoch, seen=decision.seen, left=decision.left)
        if newcomers:  # through a StoreClient
            store.poll = refuse_dead
        try:
            made = after.join(store, here, comm.timeout)
        finally:
            if newcomers:
                store.poll = None
        _close(comm)
        return after.settled(made)

    def join(self, store: Any, place: Place, timeout: float) -> Communicator:
        """Join the ranks of an epoch."""
        options = self.options
        made = connect(
            store,
            place.rank,
            place.size,
            min(timeout, _JOIN_WITHIN),
            f"{place.prefix}/{place.epoch}",
            self.hosts,
            options.transport,
            options.tuning,
            options.more,
        )
        made.timeout = timeout
        made._membership = self
        return options.apply(made)

    def settled(self, made: Communicator) -> Communicator:
        """Return a communicator whose ranks have all let go of the one before, with its memory."""
        try:
            made.barrier()
        except CollectiveError:  # another rank has died
            again = self.shrink(made, stays=True, why="")
            assert again is not None
            return again
        NODE.get().reclaim()
        return made


@dataclass(frozen=True)
class Place:
    """Where a process joins: which rank of how many, under which keys."""

    prefix: str
    epoch: str
    rank: int
    size: int
    seen: int = 0

    def as_text(self) -> str:
        """Return it as it lies in the store."""
        return json.dumps([self.prefix, self.epoch, self.rank, self.size, self.seen])

    @classmethod
    def from_text(cls, text: bytes) -> Place:
        """Read what `as_text` gave."""
        with refusing_unreadable("where this process is to join"):
            prefix, epoch, *numbers = json.loads(text)
            return cls(str(prefix), str(epoch), *map(int, numbers))


def enter(
    open_store: Callable[[], AbstractContextManager[Any]], options: InitOptions
) -> Communicator:
    """Join ranks that are under way, once they let newcomers in: `Communicator.grow`.

    Raises:
        CollectiveTimeout: they did not within the timeout.
        ConfigurationError: this process's options are not theirs.
    """
    deadline = monotonic() + options.timeout
    with open_store() as store:
        while True:
            number = _come(store)
            pauses = _pauses()
            while not store.check([f"{_newcomer(number)}/invited"]):
                if monotonic() > deadline:
                    raise CollectiveTimeout(
                        f"init timed out after {options.timeout:g} s: this process takes the place "
                        "of another, and the ranks that are under way did not let it in (they do "
                        "in grow(), and LeafSync(elastic=True) before a step)",
                        op="init",
                    )
                sleep(next(pauses))
            place = Place.from_text(store.get(f"{_newcomer(number)}/invited"))
            ranks = Membership(
                open_store, place.prefix, options, epoch=place.epoch, seen=place.seen
            )
            try:
                made = ranks.join(store, place, options.timeout)
            except CollectiveError:  # another rank has died; the others try without this one
                continue
            made = ranks.settled(made)
            made._joined_late = True
            return made


def _come(store: Any) -> int:
    """Say that this process waits to join; return its number, which nobody had before."""
    me = process_identity()
    for number in count(1):
        key = _newcomer(number)
        if not store.check([key]) and bytes(store.compare_set(key, "", me)).decode() == me:
            return number
    raise AssertionError("unreachable")


def _epoch_of(change: str) -> str:
    return blake2b(change.encode(), digest_size=8).hexdigest()


def _newcomer(number: int) -> str:
    return f"pycollective/newcomers/{number}"


def _pauses() -> Iterator[float]:
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refuse(call: str, comm: Communicator) -> None:
    if comm.closed:
        raise ConfigurationError(f"{call}: this communicator is closed")
    if comm.device is not None:
        raise ConfigurationError(
            f"{call}: this communicator is for GPU {comm.device}, and {call} is for the host's "
            "arrays: make it without device="
        )


def _close(comm: Communicator) -> None:
    with suppress(CollectiveError):  # it has failed, as all know
        comm.close()
