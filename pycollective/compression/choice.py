"""Whether compressing pays, measured once, and agreed.

The first steps go compressed and dense in turn. Each call of them waits for all ranks first, so
that what is timed is not how late a rank comes. Then the ranks tell each other their best times of
either way; the slowest rank's count, and all go on by these. So no rank decides by its own clock,
and two runs may decide differently: their weights then differ.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np

from pycollective.compression.groups import Group
from pycollective.errors import ConfigurationError

TRIES = 3  # steps of each way
_MILLISECONDS = 1e3


class Choice:
    """How a state's steps go: "compressed" or "dense".

    Attributes:
        way: of the step under way, or of the next.
        why: in words.
    """

    def __init__(self, when: str, hosts: int, group: Group) -> None:
        if when not in ("always", "auto"):
            raise ConfigurationError(f"when={when!r} is neither 'always' nor 'auto'")
        self._group = group
        self._times: dict[str, list[float]] = {"compressed": [], "dense": []}
        self._step = 0.0
        self._names: frozenset[str] | None = None
        self._trying = when == "auto" and hosts > 1
        self.way, self.why = "compressed", "asked for"
        if hosts == 1:
            self.way, self.why = "dense", "all ranks are on one host"
        elif self._trying:
            self.why = "being measured, compressed and dense in turn"

    @property
    def settled(self) -> str | None:
        """The way of all steps from here on; None while it is being measured."""
        return None if self._trying else self.way

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One call of the step under way."""
        if not self._trying:
            yield
            return
        self._group.all_gather(np.zeros(1, np.uint8))
        start = time.perf_counter()
        yield
        self._step += time.perf_counter() - start

    def end_step(self, counts: bool, names: Collection[str]) -> bool:
        """Note a step; collective. Whether the ranks have just agreed to go on dense.

        Args:
            counts: whether something was to be compressed, and nothing was given up.
            names: what went in the step: only steps of the same parameters are compared.
        """
        taken, self._step = self._step, 0.0
        if not self._trying or not counts:
            return False
        if self._names is None:
            self._names = frozenset(names)
        if self._names != frozenset(names):
            return False
        self._times[self.way].append(taken)
        done = {way: len(times) for way, times in self._times.items()}
        if min(done.values()) < TRIES:
            self.way = "dense" if done["compressed"] > done["dense"] else "compressed"
            return False
        self._trying = False
        best = np.array([min(self._times["compressed"]), min(self._times["dense"])])
        slowest = self._group.all_gather(best.view(np.uint8)).view(np.float64).max(0)
        self.way = "compressed" if slowest[0] <= slowest[1] else "dense"
        compressed, dense = (f"{_MILLISECONDS * each:.2f} ms" for each in slowest)
        self.why = f"a step's exchange took {compressed} compressed and {dense} dense"
        return self.way == "dense"
