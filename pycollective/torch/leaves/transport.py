"""What carries a `LeafSync`'s bytes from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from pycollective._core import Work
from pycollective.bootstrap.init import init
from pycollective.communicator import Communicator
from pycollective.leaves.deal import Deal
from pycollective.torch.backend import communicator_of
from pycollective.torch.leaves.buckets import Bucket

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Transport(Protocol):
    """The ranks of a LeafSync, for its calls alone; all ranks make the same in one order.

    Every wait ends with a `CollectiveError` after the group's timeout at the latest.

    Attributes:
        rank: this one.
        size: of them all.
    """

    rank: int
    size: int

    def all_gather(self, row: Bytes) -> Bytes:
        """Wait for every rank's row of as many bytes: (n,) in, (size, n) out."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0."""

    def announce(
        self, words: Sequence[int], divisor_of: Callable[[Words], int | None], needed: bool
    ) -> None:
        """Tell all ranks some numbers of this one, once a step, before its averages.

        Args:
            words: as many on all ranks.
            divisor_of: what all ranks' words make, (size, words): the divisor of the averages, None
                for the number of leaves; or it raises, the same on all ranks.
            needed: whether the divisor may be another than the number of leaves. If not, averages
                begin before others' words have come.
        """

    def average(self, bucket: Bucket, deal: Deal) -> None:
        """Begin to average what ranks have added to a bucket; its averages are there at `finish`.

        Args:
            bucket: whose accumulator holds what `deal` gives this rank.
            deal: the same on all ranks.
        """

    def finish(self) -> None:
        """Wait for the averages of this step; raise what any rank's words or calls have raised."""

    def abort(self, reason: str) -> None:
        """Let no rank wait for this one: calls there end with `CollectiveAborted`."""

    def stats(self) -> dict[str, int]:
        """Count what was sent from this rank to others."""

    def close(self) -> None:
        """Let go of what was made for the LeafSync."""


class OverCommunicator:
    """By a communicator of the LeafSync's own."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._averages: list[Work[Any]] = []
        self._words: Work[Any] | None = None
        self._rows = np.zeros((0, 0), np.int64)
        self._divisor_of: Callable[[Words], int | None] = lambda rows: None
        self._needed = False
        self.stats, self.close, self.abort = comm.stats, comm.close, comm.abort

    def all_gather(self, row: Bytes) -> Bytes:
        rows = np.empty((self.size, row.size), np.uint8)
        self._comm.all_gather(rows, row)
        return rows

    def broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat)

    def announce(
        self, words: Sequence[int], divisor_of: Callable[[Words], int | None], needed: bool
    ) -> None:
        self._divisor_of, self._needed = divisor_of, needed
        self._rows = np.zeros((self.size, len(words)), np.int64)
        self._words = self._comm.all_gather(self._rows, np.array(words, np.int64), async_op=True)

    def average(self, bucket: Bucket, deal: Deal) -> None:
        self._averages.append(
            self._comm.all_reduce(
                bucket.accumulator,
                op="avg",
                out=bucket.averages,
                divisor=self._divisor() if self._needed else None,
                deal=deal,
                async_op=True,
            )
        )

    def finish(self) -> None:
        self._divisor()  # for its errors
        for work in self._averages:
            work.wait()
        self._averages.clear()

    def _divisor(self) -> int | None:
        if self._words is not None:
            self._words.wait()
            self._words = None
        return self._divisor_of(self._rows)


def transport_of(group: dist.ProcessGroup | Communicator | None) -> Transport:
    """One of a LeafSync's own, over the ranks of `group`: its calls mix with no others."""
    if group is None and not dist.is_initialized():
        return OverCommunicator(init())
    ranks = group if isinstance(group, Communicator) else communicator_of(group, "LeafSync")
    comm = ranks.split(0)
    assert comm is not None  # as it gave a color
    return OverCommunicator(comm)
