"""How steps go: densely at the start, where that is wanted; then compressed, where that pays.

Whether it pays is measured once, and agreed: steps go compressed and dense in turn. Each call of
them waits for all ranks first, so that what is timed is not how late a rank comes. Then the ranks
tell each other their best times of either way; the slowest rank's count, and all go on by these. So
no rank decides by its own clock, and two runs may decide differently: their weights then differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import numpy as np

from pycollective.compression.groups import Group

TRIES = 3  # steps of each way
_MILLISECONDS = 1e3


class Choice:
    """How a state's steps go: "compressed" or "dense".

    Args:
        when: "always" or "auto".
        hosts: that average; with one all is dense.
        group: of all ranks.
        dense_steps: so many go dense before anything else.

    Attributes:
        steps: that have counted; the state's.
        clock: in seconds.
    """

    def __init__(self, when: str, hosts: int, group: Group, dense_steps: int) -> None:
        self.steps = 0
        self.clock: Callable[[], float] = time.perf_counter
        self._dense_steps = dense_steps if hosts > 1 else 0
        self._group = group
        self._times: dict[str, list[float]] = {"compressed": [], "dense": []}
        self._step = 0.0
        self._names: frozenset[str] | None = None
        self._trying = when == "auto" and hosts > 1
        self._way, self._why = "compressed", "asked for"
        if hosts == 1:
            self._way, self._why = "dense", "all ranks are on one host"
        elif self._trying:
            self._why = "being measured, compressed and dense in turn"

    @property
    def starting(self) -> bool:
        """Whether the step under way, or the next, is one of the dense ones at the start."""
        return self.steps < self._dense_steps

    @property
    def steps_since_start(self) -> int:
        """How many have counted since then."""
        return max(0, self.steps - self._dense_steps)

    @property
    def way(self) -> str:
        """Of the step under way, or of the next."""
        return "dense" if self.starting else self._way

    @property
    def why(self) -> str:
        """In words."""
        return f"the first {self._dense_steps} steps are dense" if self.starting else self._why

    @property
    def settled(self) -> str | None:
        """The way of all steps from here on; None while there is more to come."""
        return None if self._trying or self.starting else self._way

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One call of the step under way."""
        if not self._trying or self.starting:
            yield
            return
        self._group.all_gather(np.zeros(1, np.uint8))
        start = self.clock()
        yield
        self._step += self.clock() - start

    def end_step(self, counts: bool, names: Collection[str]) -> bool:
        """Note a step; collective. Whether the ranks have just agreed to go on dense.

        Args:
            counts: whether something was to be compressed, nothing was given up, and later steps
                are like it.
            names: what went in the step: only steps of the same parameters are compared.
        """
        taken, self._step = self._step, 0.0
        if not self._trying or not counts:
            return False
        if self._names is None:
            self._names = frozenset(names)
        if self._names != frozenset(names):
            return False
        self._times[self._way].append(taken)
        done = {way: len(times) for way, times in self._times.items()}
        if min(done.values()) < TRIES:
            self._way = "dense" if done["compressed"] > done["dense"] else "compressed"
            return False
        self._trying = False
        best = np.array([min(self._times["compressed"]), min(self._times["dense"])])
        slowest = self._group.all_gather(best.view(np.uint8)).view(np.float64).max(0)
        self._way = "compressed" if slowest[0] <= slowest[1] else "dense"
        compressed, dense = (f"{_MILLISECONDS * each:.2f} ms" for each in slowest)
        self._why = f"a step's exchange took {compressed} compressed and {dense} dense"
        return self._way == "dense"
