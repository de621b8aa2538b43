"""Finds which start of a launch this is, where torchrun restarts all ranks after a failure.

All starts meet in the store of torchrun's agent, and what dead ranks have left there stays.
torchrun counts restarts for each host by itself, so the ranks find their start themselves. They
rely on one fact: torchrun starts nobody before all processes of the start before have ended.

Each process goes from start to start until it finds its rank free, and calls off those on the way:
if another process had its rank there, that start is over. Processes that wait in one go on to the
next. In the last start that any of them comes to, no dead rank is left, so there all meet.

A process that gives up says so in that start, and why. If the process that gave up is alive, the
others fail too; if it is dead, they try the next start.

A process finds its start once, with all ranks of the launch; it costs nine store operations. All
that it joins later is part of it. Groups that are made before the group of all ranks find theirs
by themselves.
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

from pycollective.bootstrap.rendezvous import Rendezvous, is_full, this_process
from pycollective.errors import CollectiveTimeout, ConfigurationError

_MOST = 1000  # starts

_log = logging.getLogger(__name__)


def process_identity() -> str:
    """Return a name that no other process has, later ones with this process's number included."""
    return f"{this_process()} (started at tick {_stat('self')[19]})"


def _stat(process: str) -> list[str]:
    """Return what Linux says of a process, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def is_alive(identity: str) -> bool:
    """Return whether a process of this host has this identity; False for those of others."""
    named = re.fullmatch(r"process (\d+) on (.*) \(started at tick (\d+)\)", identity)
    if named is None or named[2] != socket.gethostname():
        return False
    with suppress(OSError, IndexError):
        stat = _stat(named[1])
        return stat[0] not in "ZX" and stat[19] == named[3]
    return False


def find_start(
    store: Any, rank: int, size: int, timeout: float, tried: set[int] | None = None
) -> int:
    """Return the number of this start, the same on all its ranks.

    Args:
        store: what all starts share, with `add` and so on.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds after which absent ranks are given up.
        tried: starts that this process has given up; one that it gives up now is added.

    Raises:
        CollectiveTimeout: not every rank came; names the absentees.
        ConfigurationError: several living processes have this rank.
    """
    deadline = monotonic() + timeout
    me = process_identity()
    given_up = ""  # why another rank gave up the last start on the way
    tried = set() if tried is None else tried
    for number in range(_MOST):
        if number in tried:
            continue
        start = Rendezvous(store, rank, size, timeout, _keys(number, size), deadline=deadline)
        if (owner := start.claim_rank_for(me)) != me:
            if is_alive(owner):
                raise ConfigurationError(
                    f"{owner} and {me} both claim rank {rank}: each process needs a rank of its own"
                )
            start.call_off()
            if monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"init timed out on rank {rank} after {timeout:g} s, on its way through "
                    f"{number} attempts that had been there before",
                    rank,
                    "init",
                )
            continue
        try:
            if start.all_are_here():
                return number
        except BaseException as error:
            tried.add(number)
            if not start.told:
                if given_up:
                    _log.warning("before, another rank had given up: %s", given_up)
                start.give_up(error, me)
                raise
            by = start.given_up_by()
            # Processes of other hosts, too, reach their deadline at about the same time.
            if by != me and (is_alive(by) or deadline - monotonic() < timeout / 10):
                raise
            given_up = str(error)
    raise ConfigurationError(f"rank {rank} was claimed {_MOST} times: by several processes at once")


def _keys(number: int, size: int) -> str:
    return f"attempt{number}of{size}"  # a restart may have another size


class Restarts:
    """The start that this process belongs to: found once, and known from then on."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._prefix = ""
        self._tried: set[int] = set()

    def prefix(self, store: Any, rank: int, size: int, timeout: float) -> str:
        """Return the prefix of this start's keys; empty where there are no restarts.

        Raises:
            CollectiveTimeout, ConfigurationError: as `find_start`.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_full(store):
            return ""
        if self._pid != os.getpid():
            self._begin()  # in a fork, where a thread of the parent may have held the lock
        with self._lock:
            if self._prefix:
                return self._prefix
            launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
            if (str(rank), str(size)) != launched:
                return f"{_keys(find_start(store, rank, size, timeout), size)}/"
            # Starts whose process groups were made in another way must look in the same place.
            while (inner := getattr(store, "underlying_store", None)) is not None:
                store = inner
            number = find_start(store, rank, size, timeout, self._tried)
            self._prefix = f"{_keys(number, size)}/"
            return self._prefix


RESTARTS = Restarts()
