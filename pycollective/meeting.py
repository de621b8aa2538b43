"""The ranks of a group exchange a record each through a store: who they are, and what went wrong.

With a full store (`add`, `compare_set`, `wait` and `check`, as every `torch.distributed` store has)
all wait for one key a step: the rank that is last to take the step sets it, or a rank that cannot
go on. So a problem of one rank is told to all at once, all join or none, and a rank waits once, not
once for each peer. With less than that (`set` and a blocking `get`) a problem travels in the rank's
own record, and the store's own timeout is the deadline.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from time import monotonic
from typing import Any

from pycollective.errors import CollectiveAborted, CollectiveTimeout, ConfigurationError
from pycollective.version import VERSION

_log = logging.getLogger("pycollective")

_WARN_AFTER = 30.0  # seconds until the log names the ranks that are awaited
_COMPLETE = b"complete"

# The steps of a meeting, and how a rank is described that has not taken one.
_COME, _ATTACHED = "come", "attached"
_NOT_YET = {_COME: "did not come", _ATTACHED: "have come but did not attach"}


@dataclass
class Record:
    """What a rank publishes about itself."""

    size: int
    version: str = VERSION
    host: str = ""  # for messages only
    identity: str = ""  # of the host
    wish: str = ""  # what its caller asked for, and all must alike
    token: str = ""  # of its shared memory, hexadecimal
    offset: int = 0  # of its mailbox in there, bytes
    slot_bytes: int = 0
    socket_name: str = ""  # where higher ranks attach
    address: str = ""  # of what it serves to the ranks of other hosts
    problem: str = ""  # why it cannot join


def this_process() -> str:
    """A name for this process, in messages and to tell it from others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_full(store: Any) -> bool:
    """Whether the store has more than `set` and `get`."""
    return all(hasattr(store, name) for name in ("add", "compare_set", "wait", "check"))


class Meeting:
    """One meeting of `size` ranks in a store, until a deadline.

    Args:
        store: see the top of this file.
        rank: this rank.
        size: how many meet.
        timeout: seconds until those who have not come are given up.
        prefix: of the keys; each meeting in a store needs its own.
        deadline: its end, where it is not `timeout` from now, by the monotonic clock.
        numbers: what messages call the ranks, where these are some of more.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        prefix: str,
        *,
        deadline: float | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if not (hasattr(store, "set") and hasattr(store, "get")):
            raise ConfigurationError(
                f"store is {store!r}: give tcp://host:port, or an object with set(key, bytes) and "
                "a blocking get(key)"
            )
        self._store, self._full = store, is_full(store)
        self.rank, self.size = rank, size
        self._numbers = list(numbers or range(size))
        self.number = self._numbers[rank]
        self._prefix = f"pycollective/{prefix}/"
        self._timeout = timeout
        self._published = False
        self._told = False  # of another rank's problem
        self.deadline = monotonic() + timeout if deadline is None else deadline

    def claim(self) -> None:
        """Refuse a second process with this rank, and ranks with another idea of the size."""
        if not self._full:
            return  # told apart when the records are there, if at all
        # With a nonce: a second meeting under the same keys is refused as well.
        claimant = f"{this_process()} ({os.urandom(4).hex()})"
        owner = self._claim(f"rank {self.rank}", claimant)
        if owner != claimant:
            raise ConfigurationError(
                f"{owner} and {claimant} both claim rank {self.rank}: each process needs a rank "
                "of its own, and each run or group a store or prefix of its own"
            )
        size = self._claim("size", str(self.size))
        if size != str(self.size):
            raise ConfigurationError(
                f"rank {self.rank} was given size {self.size} and other ranks size {size}"
            )

    def exchange(self, record: Record) -> list[Record]:
        """Publish one's own record; every rank's, in order of rank, once all have come.

        Raises:
            ConfigurationError: what another rank has reported, or records that do not go together.
            CollectiveTimeout: names the ranks that did not come.
        """
        self._publish(record)
        if self._full:
            self._await_all(_COME)
        records = [self._read(rank) for rank in range(self.size)]
        if records[self.rank] != record:
            raise ConfigurationError(f"another process claims rank {self.rank}, too")
        return records

    def confirm(self) -> None:
        """Wait until every rank has attached its peers; raises like `exchange`."""
        if self._full:
            self._store.set(self._key(_ATTACHED, self.rank), b"")
            self._await_all(_ATTACHED)

    @contextmanager
    def sharing_problems(self) -> Iterator[None]:
        """Tell all other ranks of whatever ends the block, so that they need not wait in vain."""
        try:
            yield
        except BaseException as error:
            if not self._told:
                # Where the store itself has failed there is no way, and no need, to say so.
                with suppress(RuntimeError, OSError, ConfigurationError):
                    self._report(error)
            raise

    def raise_problem(self) -> None:
        """Raise what another rank has reported while this one attaches; does not wait."""
        # Complete it cannot be yet: this rank has not confirmed.
        if self._full and self._store.check([self._key(_ATTACHED)]):
            self._raise_reported(self._store.get(self._key(_ATTACHED)))

    def _report(self, error: BaseException) -> None:
        kind = type(error).__name__
        text = json.dumps([kind, f"rank {self.number}: {str(error) or kind}"])
        if self._full:
            for step in (_ATTACHED, _COME):
                self._store.set(self._key(step), text.encode())
        elif not self._published:
            self._publish(Record(self.size, problem=text))

    def _raise_reported(self, report: bytes | str) -> None:
        self._told = True
        kind, text = json.loads(report)
        if kind == CollectiveTimeout.__name__:
            raise CollectiveTimeout(text, self.number, "init")
        if kind == ConfigurationError.__name__:
            raise ConfigurationError(text)
        raise CollectiveAborted(f"init was given up: {text}", self.number, "init")

    def _publish(self, record: Record) -> None:
        self._published = True
        self._store.set(self._key(_COME, self.rank), json.dumps(asdict(record)).encode())

    def _read(self, rank: int) -> Record:
        raw = json.loads(self._store.get(self._key(_COME, rank)))
        # Another version may say more or less.
        record = Record(
            **{each.name: raw[each.name] for each in fields(Record) if each.name in raw}
        )
        if record.problem:
            self._raise_reported(record.problem)
        if record.size != self.size:
            raise ConfigurationError(
                f"rank {self.rank} was given size {self.size} and rank {rank} size {record.size}"
            )
        if record.version != VERSION:
            raise ConfigurationError(
                f"rank {self.rank} runs pycollective {VERSION} and rank {rank} {record.version}"
            )
        return record

    def _await_all(self, step: str) -> None:
        """Count this rank for a step, and wait until all are, or one has reported a problem."""
        if self._store.add(self._key(step, "count"), 1) == self.size:
            # Unless a rank has reported meanwhile that it cannot go on.
            self._store.compare_set(self._key(step), "", _COMPLETE.decode())
        left = self.deadline - monotonic()
        if left > _WARN_AFTER and not self._is_set_within(step, _WARN_AFTER):
            _log.warning(
                "init on rank %d still waits: %s", self.number, self._describe_absent(step)
            )
        if not self._is_set_within(step, self.deadline - monotonic()):
            raise CollectiveTimeout(
                f"init timed out on rank {self.number} after {self._timeout:g} s: "
                f"{self._describe_absent(step)}",
                self.number,
                "init",
            )
        outcome = bytes(self._store.get(self._key(step)))
        if outcome != _COMPLETE:
            self._raise_reported(outcome)

    def _is_set_within(self, step: str, seconds: float) -> bool:
        seconds = max(0.001, seconds)
        end = monotonic() + seconds
        try:
            self._store.wait([self._key(step)], timedelta(seconds=seconds))
        except RuntimeError:  # of which every store raises another kind
            if monotonic() < end - 0.1:  # it was not the time that ran out
                raise
            return False
        return True

    def _describe_absent(self, step: str) -> str:
        ranks = range(self.size)
        absent = [
            str(self._numbers[r]) for r in ranks if not self._store.check([self._key(step, r)])
        ]
        return f"rank(s) {', '.join(absent)} of {self.size} {_NOT_YET[step]}"

    def _claim(self, name: str, value: str) -> str:
        return bytes(self._store.compare_set(self._key(name), "", value)).decode()

    def _key(self, *names: object) -> str:
        return self._prefix + "/".join(map(str, names))
