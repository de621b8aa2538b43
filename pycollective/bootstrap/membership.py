"""Membership: the ranks of a communicator become fewer, or more, without a new launch.

All of it goes through the store at which the ranks first met. The ranks between two changes are an
*epoch*; a change may take several attempts:

1. Each rank says that it has come, and whether it stays. Whoever sees that all have come or are
   gone decides who the ranks are from now on: those that have come and stay, in their order, and
   behind them the newcomers, if all ranks are ready for some. The store keeps the first decision,
   and all ranks read that one.
2. Those ranks join as in `init`, under keys of their epoch. The first of them that has joined, or
   has failed, says so for all. If it has failed, as another one has died, there is another attempt.

A rank is gone when its process has ended, or it has closed the communicator. One that is stopped or
busy is waited for. A rank that others took for dead finds that it is not in the decision.

These are the keys, each after ``pycollective/``:

- ``<prefix>/<epoch>/<attempt>/came/<rank>``: this rank has come: whether it admits newcomers, or,
  in words, why it leaves.
- ``<prefix>/<epoch>/<attempt>/decision``: the ranks of the next epoch.
- ``<prefix>/<epoch>/joined``: whether the ranks of this epoch have joined, or why not.
- ``newcomers/<number>``: a process that wants to join, numbered from 1 in the order of coming.
- ``newcomers/<number>/invited``: where it is to join, and as which rank; empty if it has given up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from time import monotonic, sleep
from typing import Any

import numpy as np

from pycollective.bootstrap.joining import connect
from pycollective.bootstrap.options import InitOptions
from pycollective.bootstrap.rendezvous import (
    check_type,
    raise_reported,
    refusing_unreadable,
    report_of,
)
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
_JOINED = "joined"
_MOST_WHY = 1000  # characters of why a rank leaves


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
    def from_text(cls, text: bytes, size: int) -> Decision:
        """Read what `as_text` gave, of some of `size` ranks."""
        with refusing_unreadable("which ranks go on"):
            members, newcomers, seen, left = json.loads(text)
            for each in (*members, *newcomers, seen):
                check_type("a number", each, "int")
            if members != sorted({*members} & {*range(size)}):
                raise ValueError(f"ranks {members} of {size}")
            return cls(members, newcomers, seen, {rank: str(why) for rank, why in left})


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

    @property
    def next_newcomer(self) -> str:
        """The key in the store that is set once a process waits to join these ranks."""
        return _newcomer(self.seen + 1)

    def shrink(self, comm: Communicator) -> Communicator:
        """`Communicator.shrink`."""
        begin_shrink(comm)
        return self._change(comm, admits=False)

    def leave(self, comm: Communicator, why: str) -> None:
        """`Communicator.leave`."""
        begin_shrink(comm)
        try:
            with self._meeting() as store:
                self._arrive(store, f"{self.epoch}/1", comm.rank, why[:_MOST_WHY])
        finally:
            close_failed(comm)

    def grow(self, comm: Communicator) -> Communicator:
        """`Communicator.grow`."""
        _refuse("grow", comm)
        waiting = np.zeros(1, np.int64)
        if comm.rank == 0:
            with self._meeting() as store:
                waiting[0] = store.check([self.next_newcomer])
        comm.broadcast(waiting)
        return self._change(comm, admits=True) if waiting[0] else comm

    @contextmanager
    def _meeting(self) -> Iterator[Any]:
        """Open the store; where it has gone, that is a PeerFailure."""
        try:
            with self.open_store() as store:
                yield store
        except CollectiveError:
            raise
        except Exception as error:
            if self._store_answers():
                raise
            raise PeerFailure(
                "the store has gone at which the ranks meet, with the process that served it: "
                f"{error}"
            ) from error

    def _store_answers(self) -> bool:
        try:
            with self.open_store() as store:
                store.check([self.next_newcomer])
        except (RuntimeError, OSError, ConfigurationError):
            return False
        return True

    def _change(self, comm: Communicator, admits: bool) -> Communicator:
        deadline = monotonic() + comm.timeout
        last = Decision([*range(comm.size)], [], self.seen, {})
        attempt = 0
        with self._meeting() as store:
            while True:
                attempt += 1
                change = f"{self.epoch}/{attempt}"
                decision = self._decide(store, change, comm, last, admits, deadline)
                made = None
                if comm.rank in decision.members:
                    try:
                        made = self._join(store, change, comm, decision)
                    except (CollectiveError, ConfigurationError) as error:
                        # If it was not that another has died, it will not be better next time.
                        again = isinstance(error, (CollectiveTimeout, PeerFailure))
                        again = again or attempt == 1 or decision != last
                        if not again or monotonic() > deadline:
                            raise
                        last, admits = decision, False
                        continue
                close_failed(comm)
                if made is not None:
                    return _settled(made, comm)
                raise PeerFailure(
                    f"rank {comm.rank} was taken for dead by the other ranks, which go on "
                    "without it",
                    comm.rank,
                    "shrink",
                )

    def _decide(
        self,
        store: Any,
        change: str,
        comm: Communicator,
        last: Decision,
        admits: bool,
        deadline: float,
    ) -> Decision:
        """Say that this rank has come, and return who goes on once that is decided."""
        keys = self._arrive(store, change, comm.rank, admits)
        said: dict[int, bool | str] = {comm.rank: admits}
        pauses = _pauses()
        while not store.check([f"{keys}/decision"]):
            gone = {*comm._gone()}  # first: who leaves says so before
            for rank in last.members:
                if rank not in said and store.check([f"{keys}/came/{rank}"]):
                    with refusing_unreadable(f"what rank {rank} says of itself"):
                        said[rank] = json.loads(store.get(f"{keys}/came/{rank}"))
                        if not isinstance(said[rank], bool | str):
                            raise ValueError(f"{said[rank]!r}"[:60])
            absent = [rank for rank in last.members if rank not in said and rank not in gone]
            if not absent:
                text = _decided(store, last, said, gone).as_text()
                first = store.compare_set(f"{keys}/decision", "", text)
                return Decision.from_text(first, comm.size)
            if monotonic() > deadline:
                raise CollectiveTimeout(
                    f"shrink timed out on rank {comm.rank} after {comm.timeout:g} s: "
                    f"{named(absent)} have not called it, and live",
                    comm.rank,
                    "shrink",
                )
            sleep(next(pauses))
        return Decision.from_text(store.get(f"{keys}/decision"), comm.size)

    def _arrive(self, store: Any, change: str, rank: int, said: bool | str) -> str:
        """Say that this rank has come: whether it admits newcomers, or why it leaves.

        Returns:
            Where the keys of this attempt are.
        """
        keys = f"pycollective/{self.prefix}/{change}"
        store.set(f"{keys}/came/{rank}", json.dumps(said).encode())
        return keys

    def _join(
        self, store: Any, change: str, comm: Communicator, decision: Decision
    ) -> Communicator | None:
        """Make the communicator of those who go on, and let go of the one before."""
        members = decision.members
        epoch = blake2b(change.encode(), digest_size=8).hexdigest()
        hosts = number_hosts([self.hosts[rank] for rank in members]) if self.hosts else ()
        here = Invitation(
            self.prefix, epoch, members.index(comm.rank), len(members) + len(decision.newcomers)
        )
        for place, number in enumerate(decision.newcomers, len(members)):
            invited = replace(here, rank=place, seen=decision.seen)
            store.set(f"{_newcomer(number)}/invited", invited.as_text().encode())
        after = replace(self, hosts=hosts, epoch=epoch, seen=decision.seen, left=decision.left)

        def check_alive() -> None:
            gone = sorted({*members} & {*comm._gone()})
            dead = [each for each in decision.newcomers if not _waits(store, each)]
            if gone or dead:
                who = named(gone) if gone else "a process that was to join"
                raise PeerFailure(f"{who} died before all had joined", comm.rank, "shrink")

        return after.join(store, here, comm.timeout, check_alive)

    def join(
        self,
        store: Any,
        place: Invitation,
        timeout: float,
        check_alive: Callable[[], None] | None = None,
    ) -> Communicator | None:
        """Join the ranks of an epoch: all of them do, or all raise the same.

        Args:
            store: where they meet.
            place: of this rank.
            timeout: seconds that an operation may take.
            check_alive: raises PeerFailure if one of the ranks has died.

        Returns:
            None where the others have joined and this rank has failed to: they go on without it.
        """
        options = self.options
        made, outcome = None, _JOINED
        keys = f"{place.prefix}/{place.epoch}"
        try:
            made = connect(
                store,
                place.rank,
                place.size,
                min(timeout, _JOIN_WITHIN),
                keys,
                self.hosts,
                options.transport,
                options.tuning,
                options.more,
                check_alive,
            )
        except BaseException as error:
            outcome = report_of(error, place.rank)
            if not isinstance(error, (CollectiveError, ConfigurationError)):
                store.compare_set(f"pycollective/{keys}/joined", "", outcome)
                raise
        first = bytes(store.compare_set(f"pycollective/{keys}/joined", "", outcome))
        agreed = first.decode(errors="replace")
        if agreed != _JOINED:
            if made is not None:
                close_failed(made)
            raise_reported(agreed, place.rank)
        if made is None:
            return None
        made.timeout = timeout
        made._membership = self
        return options.apply(made)


@dataclass(frozen=True)
class Invitation:
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
    def from_text(cls, text: bytes) -> Invitation:
        """Read what `as_text` gave."""
        with refusing_unreadable("where this process is to join"):
            prefix, epoch, *numbers = json.loads(text)
            for each in numbers:
                check_type("a number", each, "int")
            return cls(str(prefix), str(epoch), *numbers)


def enter(
    open_store: Callable[[], AbstractContextManager[Any]], options: InitOptions
) -> Communicator:
    """Join ranks that are under way, once they let newcomers in: `Communicator.grow`.

    Raises:
        CollectiveTimeout: they did not within the timeout.
        ConfigurationError: this process's options are not theirs.
    """
    if options.topology:
        raise ConfigurationError(
            f"this process takes the place of another, and topology {options.topology!r} simulates "
            "hosts of ranks that start together: unset PYCOLLECTIVE_TOPOLOGY"
        )
    deadline = monotonic() + options.timeout
    with open_store() as store:
        while True:
            number = _enqueue(store)
            pauses = _pauses()
            while not store.check([f"{_newcomer(number)}/invited"]):
                if monotonic() > deadline:
                    store.set(f"{_newcomer(number)}/invited", b"")
                    raise CollectiveTimeout(
                        f"init timed out after {options.timeout:g} s: this process takes the place "
                        "of another, and the ranks that are under way did not let it in (they do "
                        "in grow(), and LeafSync(elastic=True) before a step)",
                        op="init",
                    )
                sleep(next(pauses))
            place = Invitation.from_text(store.get(f"{_newcomer(number)}/invited"))
            ranks = Membership(
                open_store, place.prefix, options, epoch=place.epoch, seen=place.seen
            )
            try:
                made = ranks.join(store, place, options.timeout)
            except CollectiveError:  # another rank has died; the others try without this one
                continue
            if made is None:
                raise PeerFailure(
                    "the other ranks have joined without this process, which came too late",
                    op="init",
                )
            made = _settled(made)
            made._joined_late = True
            return made


def _enqueue(store: Any) -> int:
    """Say that this process waits to join; return its number, another one each time."""
    me = f"{process_identity()} {os.urandom(4).hex()}"
    number = 1
    while bytes(store.compare_set(_newcomer(number), "", me)).decode(errors="replace") != me:
        number += 1
    return number


def _settled(made: Communicator, before: Communicator | None = None) -> Communicator:
    """Return a communicator whose ranks have all let go of the one before, with its memory."""
    try:
        made.barrier()
    except CollectiveError:  # another rank has died
        again = made.shrink()
        ranks = made._membership, again._membership
        left = {rank: why for each in ranks if each for rank, why in each.left.items()}
        again._membership = replace(again._membership, left=left)  # type: ignore[type-var]
        return again
    for each in (before, made):  # whose nodes differ if an attempt has failed
        if each is not None:
            each._node.reclaim()
    return made


def _decided(store: Any, last: Decision, said: dict[int, bool | str], gone: set[int]) -> Decision:
    """Return who goes on, by what this rank knows once all have come or are gone."""
    left = {rank: why for rank, why in sorted(said.items()) if isinstance(why, str)}
    members = [rank for rank in sorted(said) if rank not in left and rank not in gone]
    newcomers, seen = [], last.seen
    if all(said[rank] for rank in members):
        while store.check([_newcomer(seen + 1)]):
            seen += 1
            if not store.check([f"{_newcomer(seen)}/invited"]) and _waits(store, seen):
                newcomers.append(seen)
    return Decision(members, newcomers, seen, {**last.left, **left})


def _waits(store: Any, number: int) -> bool:
    """Return whether the process of a newcomer lives."""
    claimant = bytes(store.get(_newcomer(number))).decode(errors="replace")
    return is_alive(claimant.rpartition(" ")[0])


def _newcomer(number: int) -> str:
    return f"pycollective/newcomers/{number}"


def _pauses() -> Iterator[float]:
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def begin_shrink(comm: Communicator) -> None:
    """Have the ranks come that wait in a call of this communicator, and refuse a wrong one."""
    _refuse("shrink", comm)
    if comm.failure is None:
        comm.abort("its ranks form another one, as shrink() or leave() was called")


def _refuse(call: str, comm: Communicator) -> None:
    if comm.closed:
        raise ConfigurationError(f"{call}: this communicator is closed")
    if comm.device is not None:
        raise ConfigurationError(
            f"{call}: this communicator is for GPU {comm.device}, and {call} is for the host's "
            "arrays: make it without device="
        )


def close_failed(comm: Communicator) -> None:
    """Close a communicator that may have failed."""
    with suppress(CollectiveError):  # it has failed, as all know
        comm.close()
