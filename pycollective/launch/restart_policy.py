"""Which ranks get another process under `pycollective run --elastic`, when, and when the job ends.

Decides alone: it starts nothing and reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 30.0  # seconds


class Fate(Enum):
    """What becomes of a job."""

    GOES_ON = auto()
    DONE = auto()  # those that had joined have ended well, and whoever is still to join is too late
    FAILED = auto()


@dataclass(frozen=True)
class Process:
    """A rank's process, as it is seen now.

    Attributes:
        joined: its `init()` has succeeded.
        code: its exit code, negative for a signal; 0 also while it runs.
    """

    rank: int
    pid: int
    joined: bool
    code: int = 0


class Restarts:
    """Those of one job. A job that is not elastic has none: its first failure ends it.

    Attributes:
        fate: what becomes of the job.
        reason: why it has failed, where that is not plain.
        too_few: it has failed although ranks that have joined are left, fewer than `fewest`.
        failures: the deaths that nobody has made good by joining in that place, in their order.
        planned: for ranks that are to get another process, the time at which.
        started: how many processes each rank got beside its first.

    Args:
        fewest: ranks without which the job does not go on. Those that have ended well count.
        limit: how many processes may be started in the place of others, for all ranks together.
    """

    def __init__(self, fewest: int = 1, limit: int = 0) -> None:
        self.fewest, self.limit = fewest, limit
        self.fate, self.reason, self.too_few = Fate.GOES_ON, "", False
        self.failures: list[Process] = []
        self.planned: dict[int, float] = {}
        self.started: Counter[int] = Counter()
        self._finished = 0
        self._delays: dict[int, float] = {}  # before the next try of ranks whose last has failed

    def settle(self, ended: Sequence[Process], alive: Sequence[Process], now: float) -> None:
        """Plan other processes for those that have died, or decide that the job ends.

        Args:
            ended: since the last call.
            alive: all that run.
            now: what the times in `planned` are compared with.
        """
        deaths = [each for each in ended if each.code]
        if self.fate is not Fate.GOES_ON:
            self.failures += deaths
            return
        joined = {each.rank for each in (*ended, *alive) if each.joined}
        self.failures = [each for each in self.failures if each.rank not in joined] + deaths
        self._finished += len(ended) - len(deaths)
        if any(each.joined for each in alive):
            for each in deaths:
                self.plan(each.rank, each.joined, now)
            left = self._finished + len(alive) + len(self.planned)
            if left < self.fewest:
                self.reason = f"{left} of at least {self.fewest} ranks are left"
                self.too_few = True
                self._end(Fate.FAILED)
        elif any(each.joined or not self.started[each.rank] for each in deaths):
            if joined:
                self.reason = "no rank that has joined is left"
            self._end(Fate.FAILED)
        elif alive and all(self.started[each.rank] for each in alive):
            self._end(Fate.DONE)

    def plan(self, rank: int, joined: bool, now: float) -> None:
        """Plan another process, unless the limit is reached.

        Args:
            rank: whose process has died, or could not be started.
            joined: it had joined: the next one starts at once, or else after an ever longer time.
            now: as in `settle`.
        """
        delay = 0.0 if joined else self._delays.get(rank, _FIRST_DELAY)
        self._delays[rank] = min(2 * delay, _LONGEST_DELAY) or _FIRST_DELAY
        if self.started.total() + len(self.planned) < self.limit:
            self.planned[rank] = now + delay

    def take(self, now: float) -> int | None:
        """Return a rank whose next process is to start now, and count it; None if there is none."""
        for rank, when in self.planned.items():
            if when <= now:
                del self.planned[rank]
                self.started[rank] += 1
                return rank
        return None

    def _end(self, fate: Fate) -> None:
        self.fate = fate
        self.planned.clear()
