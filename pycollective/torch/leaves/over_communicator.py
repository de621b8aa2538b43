"""A `LeafSync`'s transport by a `Communicator`, for parameters on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycollective._core import Work
from pycollective.agree import Bytes
from pycollective.communicator import Communicator
from pycollective.leaves.deal import Deal
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered.pieces import WORDS


class OverCommunicator(Transport):
    """By a communicator of the LeafSync's own."""

    bucket_cap_mb = 6.0

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._averages: list[Work[Any]] = []
        self._words: StepWords | None = None
        self._rows = np.zeros((self.size, WORDS), np.int64)  # of all ranks
        self._coming: Work[Any] | None = None
        self._needed = False

    def all_gather(self, row: Bytes) -> Bytes:
        rows = np.empty((self.size, row.size), np.uint8)
        self._comm.all_gather(rows, row)
        return rows

    def broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat)

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._comm.all_to_all(out, torch.stack([*rows]))

    def announce(self, words: StepWords, needed: bool) -> None:
        self._words, self._needed = words, needed
        self._coming = self._comm.all_gather(self._rows, words.block, async_op=True)

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

    def abort(self, reason: str) -> None:
        self._comm.abort(reason)

    def stats(self) -> dict[str, int]:
        return self._comm.stats()

    def close(self) -> None:
        self._comm.close()

    def _divisor(self) -> int:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        assert self._words is not None
        return self._words.read(self._rows)
