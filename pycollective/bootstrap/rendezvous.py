"""The rendezvous: ranks find each other through a store, and tell each other what goes wrong.

Each rank publishes a record. One rank reads all records, decides what follows, and publishes that.
So a rank makes a fixed number of store operations, whatever the number of ranks, and reads only
what concerns it.

With a full store (`add`, `compare_set`, `wait` and `check`, as every `torch.distributed` store has)
all ranks wait for one key in each step. The last rank to take the step sets it, or a rank that
cannot go on. So all ranks hear of a problem at once, and a rank waits once, not once for each peer.
With less than that (`set` and a blocking `get`) place 0 decides, a problem travels in a rank's
record or in the decision, and the store's own timeout is the deadline.

A rendezvous may be of some of a job's ranks, those of a host, say. A rank's *place* is its index
among them, 0 to size - 1. Keys have places; messages name ranks. These are the keys, each after
``pycollective/<prefix>/``; a *step* is ``arrived``, ``alive`` or ``attached``:

- ``rank <place>``: the process that has this place, set by the first that claims it.
- ``size``: the number of ranks, set by the first rank that claims a place.
- ``arrived/<place>``: set by each rank when it comes: its record in `exchange`, empty in
  `all_are_here`. One object never calls both.
- ``alive/<place>``: empty, set by each rank in `all_are_here` once all have arrived.
- ``attached/<place>``: empty, set by each rank once it has attached its peers.
- ``<step>/count``: counts the ranks that have taken the step.
- ``<step>``: what ends the wait of all: a decision, set by the rank that was counted last, or the
  problem of the first rank that cannot go on.
- ``<step>/absent/<phase>/by`` and ``<step>/absent/<phase>``: the place of the one rank that looks
  for absent ranks, before a warning or a timeout, and then what it found, in words.
- ``given up by``: the process that gave up `all_are_here`, set by the first that does or asks.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NoReturn

from pycollective.config import VERSION
from pycollective.errors import (
    CollectiveAborted,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
    named,
)
from pycollective.system_limits import described

_log = logging.getLogger("pycollective")

_WARN_AFTER = 30.0  # seconds until the log names the absent ranks
# Of all ranks together, at torch's store. gloo_link.cpp polls as often: a rank does only one
# of the two. gloo.py polls beside them, so a quarter as often.
_POLLS_IN_A_SECOND = 20_000
_GRACE = 2.0  # seconds for the one rank that looks for absent ranks to name them
_SHOWN = 60  # characters of a wrong value in a message

_PASSED_ON = "report"  # attribute of an exception that another rank has reported
_DECIDED = "decided "  # begins a decision; a report of a problem is JSON
_OFF = "off"  # the decision of a rendezvous that was called off

# The steps of a rendezvous, and what is said of a rank that has not taken one.
_ARRIVED, _ALIVE, _ATTACHED = "arrived", "alive", "attached"
_NOT_YET = {
    _ARRIVED: "did not come",
    _ALIVE: "did not come",
    _ATTACHED: "have come but did not attach",
}
# Why absent ranks are looked for: a log's warning, and the error later.
_WARNING, _TIMEOUT = "warning", "timeout"


@contextmanager
def refusing_unreadable(what: str) -> Iterator[None]:
    """Raise `ConfigurationError` where `what`, read from the store, is not what a rank writes."""
    try:
        yield
    except ConfigurationError:
        raise
    except (
        *(ValueError, TypeError, LookupError, RecursionError),
        *(struct.error, zlib.error),
    ) as error:
        raise ConfigurationError(
            f"{what} in the store is nothing that a rank of pycollective {VERSION} writes "
            f"({str(error)[:_SHOWN]}): something else writes to this store, or a rank of another "
            "version does"
        ) from error


def check_type(name: str, value: object, kind: str) -> None:
    """Raise TypeError unless the value's type is exactly `kind`: in JSON, true is no number."""
    if type(value).__name__ != kind:
        raise TypeError(f"{name} is {repr(value)[:_SHOWN]}")


@dataclass
class Record:
    """What a rank publishes about itself."""

    size: int
    version: str = field(default_factory=lambda: VERSION)
    host: str = ""  # for messages only
    identity: str = ""  # of the host
    options: str = ""  # the options of `init` that must be the same on all ranks
    token: str = ""  # of its shared memory, hexadecimal
    offset: int = 0  # of its mailbox in there, bytes
    data_bytes: int = 0  # of the data area there
    socket_name: str = ""  # where higher ranks attach
    address: str = ""  # of what it serves to the ranks of other hosts
    problem: str = ""  # why it cannot join

    def as_text(self) -> str:
        """Return the record as it lies in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes, rank: int) -> Record:
        """Read the record of rank `rank`.

        Raises:
            ConfigurationError: no rank of this library has written it.
        """
        with refusing_unreadable(f"the record of rank {rank}"):
            raw = json.loads(text)
            # Another version may say more or less.
            known = {each.name: raw[each.name] for each in fields(cls) if each.name in raw}
            for each in fields(cls):
                if each.name in known:
                    check_type(each.name, known[each.name], str(each.type))
            return cls(**known)


def this_process() -> str:
    """Return a name for this process, for messages and to tell it from others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def report_of(error: BaseException, rank: int) -> str:
    """Return what the others are told of the error that ends `init` on rank `rank`.

    What another rank has reported is passed on as it is.
    """
    if _PASSED_ON in vars(error):
        return str(vars(error)[_PASSED_ON])
    kind = type(error).__name__
    text = str(error) or kind
    message = text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}"
    return json.dumps([kind, message])


def raise_reported(report: bytes | str, rank: int) -> NoReturn:
    """Raise on this rank, `rank`, what another rank has reported."""
    with refusing_unreadable("what another rank has reported"):
        kind, text = map(str, json.loads(report))
    error: Exception
    if kind == CollectiveTimeout.__name__:
        error = CollectiveTimeout(text, rank, "init")
    elif kind == PeerFailure.__name__:
        error = PeerFailure(f"{text}; its own output tells why", rank, "init")
    elif kind == ConfigurationError.__name__:
        error = ConfigurationError(text)
    else:
        error = CollectiveAborted(f"init was given up: {text}", rank, "init")
    vars(error)[_PASSED_ON] = report.decode() if isinstance(report, bytes) else report
    raise error


def is_full(store: Any) -> bool:
    """Return whether the store has more than `set` and `get`."""
    return all(hasattr(store, name) for name in ("add", "compare_set", "wait", "check"))


def _waits_in_torch(store: Any) -> bool:
    """Return whether a wait in this store ignores signals, such as Ctrl-C's, as torch's do."""
    store_class = getattr(sys.modules.get("torch.distributed"), "Store", None)
    return store_class is not None and isinstance(store, store_class)


def leave_will(store: Any, prefix: str, rank: int) -> None:
    """Have the others told in their rendezvous if this rank dies, where the store can."""
    if hasattr(store, "last_will"):
        died = f"rank {rank} ({this_process()}) died before all had joined"
        keys = [f"{prefix}{step}" for step in (_ARRIVED, _ATTACHED)]
        store.last_will(keys, json.dumps([PeerFailure.__name__, died]).encode())


class Rendezvous:
    """One rendezvous of `size` ranks in a store, until a deadline.

    Args:
        store: see the top of this file.
        place: of this rank among the ranks that meet, 0 to size - 1.
        size: the number of ranks.
        timeout: seconds after which absent ranks are given up.
        prefix: of the keys; each rendezvous in a store needs its own.
        deadline: where it is not `timeout` from now; by the monotonic clock.
        ranks: those that meet, by place; None for all of a job, whose places are their ranks.
        check_elsewhere: called while this rank attaches; raises a problem that it learned of in
            another way than through the store.

    Attributes:
        rank: this rank, by which messages call it.
        told: whether this rank knows of another rank's problem.
    """

    def __init__(
        self,
        store: Any,
        place: int,
        size: int,
        timeout: float,
        prefix: str,
        *,
        deadline: float | None = None,
        ranks: Sequence[int] | None = None,
        check_elsewhere: Callable[[], None] | None = None,
    ) -> None:
        if not (hasattr(store, "set") and hasattr(store, "get")):
            raise ConfigurationError(
                f"store is {store!r}: give tcp://host:port, or an object with set(key, bytes) and "
                "a blocking get(key)"
            )
        self._store, self._full = store, is_full(store)
        self._polls = self._full and _waits_in_torch(store)  # in place of a wait
        self.place, self.size = place, size
        self.ranks = list(ranks or range(size))
        self.rank = self.ranks[place]
        self._check_elsewhere = check_elsewhere
        self._prefix = f"pycollective/{prefix}/"
        self._timeout = timeout
        self._published = False
        self._published_for_all = False  # where place 0 decides
        self.told = False
        self.deadline = monotonic() + timeout if deadline is None else deadline

    def claim_rank(self) -> None:
        """Claim this rank; refuse a second process that does, and ranks with another size."""
        if not self._full:
            return  # found out when the records are read, if at all
        # With a nonce: a second rendezvous under the same keys is refused as well.
        claimant = f"{this_process()} ({os.urandom(4).hex()})"
        owner = self.claim_rank_for(claimant)
        if owner != claimant:
            raise ConfigurationError(
                f"{owner} and {claimant} both claim rank {self.rank}: each process needs a rank "
                "of its own, and each run or group a store or prefix of its own"
            )
        size = self._set_if_unset("size", str(self.size))
        if size != str(self.size):
            raise ConfigurationError(
                f"rank {self.rank} was given size {self.size} and other ranks size {size}"
            )

    def claim_rank_for(self, claimant: str) -> str:
        """Claim this rank for a process if it is free; return the process that has it."""
        return self._set_if_unset(f"rank {self.place}", claimant)

    def all_are_here(self) -> bool:
        """Wait until every rank has come and lives; return False if this was called off.

        Ranks count twice: the first count may include the dead, who do not come to the second.
        """
        for step in (_ARRIVED, _ALIVE):
            self._store.set(self._key(step, self.place), b"")
            if self._await_all(step, str) == _OFF:
                return False
        return True

    def call_off(self) -> None:
        """End the wait of those in `all_are_here`, unless it is over."""
        for step in (_ARRIVED, _ALIVE):
            self._set_if_unset(step, _DECIDED + _OFF)

    def give_up(self, error: BaseException, claimant: str) -> None:
        """Tell those in `all_are_here`, now or later, what ends the rendezvous here."""
        with suppress(RuntimeError, OSError):
            self._set_if_unset("given up by", claimant)
        self.report(error)

    def given_up_by(self) -> str:
        """Return the first `claimant` of `give_up`, or "nobody"."""
        return self._set_if_unset("given up by", "nobody")

    def exchange(self, record: Record, decide: Callable[[list[Record]], str]) -> str:
        """Publish this rank's record; once all have, return what one rank decided from them.

        Args:
            record: this rank's.
            decide: returns, from all records by place, what all ranks are to know. Only one
                rank calls it. It raises `ConfigurationError` where the records do not go together.

        Raises:
            ConfigurationError: what another rank has reported, or records that do not go together.
            CollectiveTimeout: names the ranks that did not come.
        """
        leave_will(self._store, self._prefix, self.rank)
        self._publish(record)
        if self._full:
            return self._await_all(_ARRIVED, lambda: decide(self._read_all()))
        if self.place == 0:
            decided = decide(self._read_all())
            self._store.set(self._key(_ARRIVED), (_DECIDED + decided).encode())
            self._published_for_all = True
        outcome = self._outcome(self._text(_ARRIVED))
        if self._read(self.place) != record:
            raise ConfigurationError(f"another process claims rank {self.rank}, too")
        return outcome

    def decided(self) -> str | None:
        """Return what `exchange` would, where that is known already; does not wait."""
        if not self._full or not self._store.check([self._key(_ARRIVED)]):
            return None
        text = self._text(_ARRIVED)
        return text[len(_DECIDED) :] if text.startswith(_DECIDED) else None

    def confirm(self) -> None:
        """Wait until every rank has attached its peers; raises like `exchange`."""
        if self._full:
            self._store.set(self._key(_ATTACHED, self.place), b"")
            self._await_all(_ATTACHED, str)

    @contextmanager
    def sharing_problems(self) -> Iterator[None]:
        """Tell all other ranks what ends the block, so that they do not wait in vain.

        An OSError becomes a `ConfigurationError`, here too.
        """
        try:
            yield
        except OSError as error:  # too many open files, say
            refused = ConfigurationError(f"rank {self.rank} cannot join: {described(error)}")
            self.report(refused)
            raise refused from error
        except BaseException as error:
            self.report(error)
            raise

    def raise_problem(self) -> None:
        """Raise what another rank has reported while this one attaches; does not wait."""
        if self._check_elsewhere is not None:
            self._check_elsewhere()
        # All cannot have attached yet: this rank has not confirmed.
        if self._full and self._store.check([self._key(_ATTACHED)]):
            self._outcome(self._text(_ATTACHED))

    def report(self, error: BaseException) -> None:
        """Tell the others what ends `init` here, unless one of them has said it."""
        if self.told:
            return
        text = report_of(error, self.rank)
        # Where the store itself has failed there is no way, and no need, to say so.
        with suppress(RuntimeError, OSError, ConfigurationError):
            if self._full:
                for step in (_ATTACHED, _ARRIVED, _ALIVE):
                    self._set_if_unset(step, text)  # what all were told already stays
            elif self.place == 0 and not self._published_for_all:
                self._store.set(self._key(_ARRIVED), text.encode())
            elif not self._published:
                self._publish(Record(self.size, problem=text))

    def _outcome(self, text: str) -> str:
        """Return what was decided, or raise what was reported instead."""
        if text.startswith(_DECIDED):
            return text[len(_DECIDED) :]
        self.told = True
        if not text.startswith("["):
            raise ConfigurationError(
                f"rank {self.rank} runs pycollective {VERSION} and another rank another version"
            )
        raise_reported(text, self.rank)

    def _publish(self, record: Record) -> None:
        self._published = True
        self._store.set(self._key(_ARRIVED, self.place), record.as_text().encode())

    def _read_all(self) -> list[Record]:
        """Return every rank's record; raises where they do not go together."""
        records = []
        for place, rank in enumerate(self.ranks):
            each = self._read(place)
            if each.problem:
                self._store.set(self._key(_ARRIVED), each.problem.encode())
                self.told = True
                raise_reported(each.problem, self.rank)
            if each.size != self.size:
                raise ConfigurationError(
                    f"rank {self.rank} was given size {self.size} and rank {rank} size {each.size}"
                )
            records.append(each)
            first = records[0]
            if each.version != first.version:
                raise ConfigurationError(
                    f"rank {rank} runs pycollective {each.version} and rank "
                    f"{self.ranks[0]} {first.version}"
                )
        return records

    def _read(self, place: int) -> Record:
        return Record.from_text(self._text(_ARRIVED, place), self.ranks[place])

    def _await_all(self, step: str, decide: Callable[[], str]) -> str:
        """Count this rank for a step; wait until all are counted, or one reports a problem.

        The last rank to be counted decides what all are told.
        """
        if self._store.add(self._key(step, "count"), 1) == self.size:
            # The claim fails if a rank has reported meanwhile that it cannot go on.
            return self._outcome(self._set_if_unset(step, _DECIDED + decide()))
        left = self.deadline - monotonic()
        if left > _WARN_AFTER and not self._is_set_within(self._key(step), _WARN_AFTER):
            _log.warning("init on rank %d still waits: %s", self.rank, self._absent(step, _WARNING))
        if not self._is_set_within(self._key(step), self.deadline - monotonic()):
            raise CollectiveTimeout(
                f"init timed out on rank {self.rank} after {self._timeout:g} s: "
                f"{self._absent(step, _TIMEOUT)}",
                self.rank,
                "init",
            )
        return self._outcome(self._text(step))

    def _is_set_within(self, key: str, seconds: float) -> bool:
        seconds = max(0.001, seconds)
        end = monotonic() + seconds
        if self._polls:
            return self._poll_until(key, end)
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # each store raises a kind of its own
            if monotonic() < end - 0.1:  # it was not the time that ran out
                raise
            return False
        return True

    def _poll_until(self, key: str, end: float) -> bool:
        pause, longest = 0.001, max(0.02, self.size / _POLLS_IN_A_SECOND)
        while not self._store.check([key]):
            if monotonic() >= end:
                return False
            sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _absent(self, step: str, phase: str) -> str:
        """Return which ranks have not taken a step, in words.

        One rank looks and tells: thousands of ranks would each ask for thousands of keys.
        """
        key = self._key(step, "absent", phase)
        if self._set_if_unset(f"{step}/absent/{phase}/by", str(self.place)) != str(self.place):
            if self._is_set_within(key, _GRACE):
                return self._text(step, "absent", phase)
            return f"not all of {self.size} {_NOT_YET[step]}"
        absent = [
            rank
            for place, rank in enumerate(self.ranks)
            if not self._store.check([self._key(step, place)])
        ]
        text = f"{named(absent)} of {self.size} {_NOT_YET[step]}"
        if not absent:
            text = "all have come, and one has ended before it could say so"
        self._store.set(key, text.encode())
        return text

    def _set_if_unset(self, name: str, value: str) -> str:
        """Set a key unless it is set; return its value."""
        return bytes(self._store.compare_set(self._key(name), "", value)).decode(errors="replace")

    def _text(self, *names: object) -> str:
        raw = self._store.get(self._key(*names))
        return raw if isinstance(raw, str) else bytes(raw).decode(errors="replace")

    def _key(self, *names: object) -> str:
        return self._prefix + "/".join(map(str, names))
