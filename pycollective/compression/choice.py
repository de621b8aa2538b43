"""How steps go: densely at the start, where that is wanted; then compressed, where that pays.

Whether it pays is measured once, and agreed: steps go compressed and dense in turn. Each call of
them waits for all ranks first, so that what is timed is not how late a rank comes. Of a dense call
what it will cost for good is timed: in DDP's hooks the average alone, elsewhere with it that ranks
compare what they call, and look whether the average is finite. Then the ranks tell each other their
best times of either way; the slowest rank's count, and all go on by these. So no rank decides by
its own clock, and two runs may decide differently: their weights then differ.

Only steps of the same parameters are compared. Those that most steps are of decide, after `MOST`
steps at the latest, by what was seen of them; if that is one way alone, the state compresses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import numpy as np

from pycollective.compression.groups import Group

TRIES = 3  # steps of each way
MOST = 64  # steps, where hardly two are of the same parameters
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
        # Of each set of parameters, in the order in which they first went, the times of each way.
        self._times: dict[frozenset[str], dict[str, list[float]]] = {}
        self._step = 0.0
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
    def measures(self) -> bool:
        """Whether calls of the step under way, or of the next, are timed."""
        return self._trying and not self.starting

    @property
    def final(self) -> str | None:
        """The way of all steps from here on; None while there is more to come."""
        return None if self._trying or self.starting else self._way

    @property
    def dense_for_good(self) -> bool:
        """Whether all steps after the start, too, are dense."""
        return self._way == "dense" and not self._trying

    def begin_step(self) -> None:
        """Begin a step: what an unfinished one took does not count."""
        self._step = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One call of the step under way."""
        if not self.measures:
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
        of = self._times.setdefault(frozenset(names), {"compressed": [], "dense": []})
        of[self._way].append(taken)
        steps = [sum(map(len, times.values())) for times in self._times.values()]
        # What most steps are of decides; of as many, what went first.
        compressed, dense = list(self._times.values())[int(np.argmax(steps))].values()
        if min(len(compressed), len(dense)) < TRIES and sum(steps) < MOST:
            self._way = "dense" if len(compressed) > len(dense) else "compressed"
            return False
        self._trying = False
        if not (compressed and dense):
            self._way = "compressed"
            self._why = f"not measured: {MOST} steps, and hardly two were of the same parameters"
            return False
        best = np.array([min(compressed), min(dense)])
        slowest = self._group.all_gather(best.view(np.uint8)).view(np.float64).max(0)
        self._way = "compressed" if slowest[0] <= slowest[1] else "dense"
        took = [f"{_MILLISECONDS * each:.2f} ms" for each in slowest]
        self._why = f"a step's exchange took {took[0]} compressed and {took[1]} dense"
        return self._way == "dense"
