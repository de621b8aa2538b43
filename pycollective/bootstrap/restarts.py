"""Which attempt of a launch this is, where torchrun starts all ranks anew after a failure.

All attempts meet in the store of torchrun's agent, where what the dead have left stays. How often
torchrun has started them it tells each host by a count of that host's own, so the ranks find out by
themselves, knowing one thing: it starts nobody before all processes of the attempt before have
ended.

Each process goes from attempt to attempt until one has its rank free, and calls off those on the
way: that another process had its rank there says that they are over. Those who wait in one go on
to the next. In the last attempt that any of them comes to, no rank was taken by the dead, so there
all meet. Whoever gives one up says so there, and why: who hears it of the living gives up as well,
who hears it of the dead goes on.

A process finds its attempt once, with all ranks of the launch, and all that it joins later is part
of it. That costs a rank nine operations of the store. Groups that come before any of all ranks find
theirs by themselves.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from pycollective.bootstrap.rendezvous import Meeting, is_full, this_process
from pycollective.errors import CollectiveTimeout, ConfigurationError

_MOST = 1000  # attempts

_log = logging.getLogger(__name__)


def process_identity() -> str:
    """A name that no other process has, later ones with this process's number included."""
    return f"{this_process()} (started at tick {_stat('self')[19]})"


def _stat(process: str) -> list[str]:
    """What Linux says of a process, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def is_alive(identity: str) -> bool:
    """Whether a process of this host has this identity; False for those of others."""
    named = re.fullmatch(r"process (\d+) on (.*) \(started at tick (\d+)\)", identity)
    if named is None or named[2] != socket.gethostname():
        return False
    with suppress(OSError, IndexError):
        stat = _stat(named[1])
        return stat[0] not in "ZX" and stat[19] == named[3]
    return False


def find_attempt(
    store: Any, rank: int, size: int, timeout: float, tried: set[int] | None = None
) -> int:
    """The number of this attempt, the same on all its ranks.

    Args:
        store: that all attempts have, with `add` and so on.
        rank: this rank.
        size: how many there are.
        timeout: seconds until those who have not come are given up.
        tried: those that this process has given up; one that it gives up now is added.

    Raises:
        CollectiveTimeout: not every rank came; names the absentees.
        ConfigurationError: several processes that live have this rank.
    """
    deadline = monotonic() + timeout
    me = process_identity()
    given_up = ""  # of the last one on the way that somebody gave up
    tried = set() if tried is None else tried
    for number in range(_MOST):
        if number in tried:
            continue
        attempt = Meeting(store, rank, size, timeout, _keys(number, size), deadline=deadline)
        if (owner := attempt.owner(me)) != me:
            if is_alive(owner):
                raise ConfigurationError(
                    f"{owner} and {me} both claim rank {rank}: each process needs a rank of its own"
                )
            attempt.call_off()
            if monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"init timed out on rank {rank} after {timeout:g} s, on its way through "
                    f"{number} attempts that had been there before",
                    rank,
                    "init",
                )
            continue
        try:
            if attempt.all_are_here():
                return number
        except BaseException as error:
            tried.add(number)
            if not attempt.told:
                if given_up:
                    _log.warning("before, another rank had given up: %s", given_up)
                attempt.give_up(error, me)
                raise
            by = attempt.given_up_by()
            # Those of other hosts, too, have their end at about the same time.
            if by != me and (is_alive(by) or deadline - monotonic() < timeout / 10):
                raise
            given_up = str(error)
    raise ConfigurationError(f"rank {rank} was claimed {_MOST} times: by several processes at once")


def _keys(number: int, size: int) -> str:
    return f"attempt{number}of{size}"  # the next one may have other hosts


class Attempt:
    """The attempt that this process is part of: found once, and known from then on."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._prefix = ""
        self._tried: set[int] = set()

    def prefix(self, store: Any, rank: int, size: int, timeout: float) -> str:
        """A prefix for the keys of this attempt; empty if there is only one.

        Raises:
            CollectiveTimeout, ConfigurationError: as `find_attempt`.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_full(store):
            return ""
        if self._pid != os.getpid():
            self._begin()  # of the parent's, whose threads may have had the lock
        with self._lock:
            if self._prefix:
                return self._prefix
            launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
            if (str(rank), str(size)) != launched:
                return f"{_keys(find_attempt(store, rank, size, timeout), size)}/"
            # Those that are begun in another way than in the attempt before look there, too.
            while (inner := getattr(store, "underlying_store", None)) is not None:
                store = inner
            number = find_attempt(store, rank, size, timeout, self._tried)
            self._prefix = f"{_keys(number, size)}/"
            return self._prefix


ATTEMPT = Attempt()
