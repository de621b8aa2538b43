"""The start line, where the ranks of a group wait for each other before a block of calls.

The benchmark's own barrier, the same for every library: a library's own would leave its ranks
apart by as much as the barrier is slow, which would then count against its collectives.
"""

from __future__ import annotations

import mmap
import os
import time

_LINE = 64  # bytes: each rank's cell lies in its own cache line


class StartLine:
    """One cell a rank in a shared file; a rank writes its own and reads the others'.

    Cells hold how often their rank has arrived, so they only grow, and nothing is ever reset.
    """

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other * _LINE // 8 for other in range(ranks) if other != rank]
        # More ranks than cores: those who wait must not keep those who are late from the cores.
        self._polite = ranks > len(os.sched_getaffinity(0))
        self._arrived = 0
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, self.bytes(ranks))
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._map).cast("Q")

    @staticmethod
    def bytes(ranks: int) -> int:
        """Return the size of the shared file for `ranks` ranks."""
        return ranks * _LINE

    def wait(self, timeout: float = 60.0) -> None:
        """Return once every rank has arrived.

        Raises:
            TimeoutError: not all arrived within `timeout` seconds.
        """
        self._arrived += 1
        cells, arrived = self._cells, self._arrived
        cells[self._rank * _LINE // 8] = arrived
        deadline = time.monotonic() + timeout
        for other in self._others:
            polls = 0
            while cells[other] < arrived:
                polls += 1
                if self._polite or polls > 10_000:
                    os.sched_yield()
                if polls % 1_000 == 0 and time.monotonic() > deadline:
                    raise TimeoutError(f"not every rank arrived within {timeout:g} s")
