"""What carries a `LeafSync`'s bytes from rank to rank."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from pycollective._core import Work
from pycollective.agree import Bytes
from pycollective.bootstrap.init import init
from pycollective.communicator import Communicator
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    ConfigurationError,
)
from pycollective.leaves.deal import Deal
from pycollective.order import Node
from pycollective.system_limits import start_thread
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.ordered.calls import checked_group
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.pieces import Call, Nodes, Words
from pycollective.torch.serving import own_backend, store_of


class Transport(Protocol):
    """The ranks of a LeafSync, for its calls alone; all ranks make the same in one order.

    Every wait ends with a `CollectiveError` after the group's timeout at the latest.

    Attributes:
        rank: this one.
        size: of them all.
        bucket_cap_mb: MiB of a bucket, unless the LeafSync is told otherwise.
    """

    rank: int
    size: int
    bucket_cap_mb: float

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

    bucket_cap_mb = 6.0

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


class OverGroup:
    """Over a process group of any backend that `ordered` takes, for parameters on CPUs.

    Over Gloo connections are the LeafSync's own. Reductions run on a thread of its own, in one
    order; the words of `announce` travel with the headers of a step's reductions.

    Args:
        group: of torch's.
        number: of this LeafSync among those of the group, the same on all ranks.
    """

    bucket_cap_mb = 25.0  # where a core computes and sends, each call costs milliseconds

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        name = f"pycollective.torch.leaves/{number}"
        self._group = group  # ordered's own reference is weak
        self._store = store_of(group, f"{name}/aborted", _ASKING)
        self._ordered = OrderedGroup(group, torch.device("cpu"), None, name=name)
        self._averages: list[Future[Any]] = []
        self._words: Sequence[int] = ()
        self._divisor_of: Callable[[Words], int | None] = lambda rows: None
        self._refused: Exception | None = None
        with self._raising_reason():
            self._ordered.prepare()

    def all_gather(self, row: Bytes) -> Bytes:
        rows = torch.empty(self.size, row.size, dtype=torch.uint8)
        with self._raising_reason():
            self._ordered.exchange([torch.from_numpy(row.copy())] * self.size, rows)
        return rows.numpy()

    def broadcast(self, flat: torch.Tensor) -> None:
        with self._raising_reason():
            self._ordered.broadcast(flat.view(torch.uint8))

    def announce(
        self, words: Sequence[int], divisor_of: Callable[[Words], int | None], needed: bool
    ) -> None:
        self._words, self._divisor_of = words, divisor_of

    def average(self, bucket: Bucket, deal: Deal) -> None:
        rows = [torch.from_numpy(each) for each in bucket.accumulator._spend()]
        nodes = Nodes(deal, rows, self._words, self._divisor)
        averages = bucket.averages
        like = torch.empty(averages.numel(), dtype=torch.float32, device="meta")
        narrow = bucket.own_dtype if all(map(_at_most_a_leaf, deal.held)) else None
        call = Call("all_reduce", "avg", like, averages, narrow, nodes=nodes)
        self._averages.append(self._ordered.worker.submit(partial(self._ordered.run, call)))

    def finish(self) -> None:
        averages, self._averages = self._averages, []
        with self._raising_reason():
            for each in averages:
                each.result()

    def abort(self, reason: str) -> None:
        with suppress(RuntimeError):  # its server is gone, and ranks see that connections end
            self._store.set("reason", f"rank {self.rank}: {reason}")
        self._ordered.disconnect()

    def stats(self) -> dict[str, int]:
        return self._ordered.stats()

    def close(self) -> None:
        self._ordered.close()

    def _divisor(self, rows: Words) -> int | None:
        """On the worker, whose errors are the call's; all ranks raise the same."""
        try:
            return self._divisor_of(rows)
        except ConfigurationError as error:
            self._refused = error  # the worker's error is to be the call's
            raise CollectiveMismatch(str(error)) from error

    @contextmanager
    def _raising_reason(self) -> Iterator[None]:
        """Raise what another rank has aborted for, in place of a failure that came of it."""
        try:
            yield
        except CollectiveError as error:
            if self._refused is not None:
                raise self._refused from None
            if isinstance(error, CollectiveMismatch):
                raise
            if reason := self._reason():
                raise CollectiveAborted(f"aborted by {reason}", self.rank) from error
            raise

    def _reason(self) -> str:
        """Why a rank has aborted; "" if none has said so, or the store's server does not answer."""
        found: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self._store.check(["reason"]):
                    found.append(self._store.get("reason").decode())

        # By a thread: a server that was stopped, or whose host is gone, is waited for without end.
        asking = threading.Thread(target=ask, name="pycollective-asking", daemon=True)
        with suppress(ConfigurationError):  # no more threads
            start_thread(asking)
            asking.join(_ASKING.total_seconds())
        return found[0] if found else ""


_ASKING = timedelta(seconds=10)  # at most, of a store
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]
_numbers = weakref.WeakKeyDictionary()


def _at_most_a_leaf(runs: Sequence[Node]) -> bool:
    return sum(hi - lo for lo, hi in runs) <= 1


def transport_of(group: dist.ProcessGroup | Communicator | None) -> Transport:
    """One of a LeafSync's own, over the ranks of `group`: its calls mix with no others."""
    if group is None and not dist.is_initialized():
        group = init()
    if not isinstance(group, Communicator):
        found = checked_group(group)
        if own_backend(found, torch.device("cpu")) is None:
            return OverGroup(found, next(_numbers.setdefault(found, itertools.count())))
        from pycollective.torch.backend import communicator_of  # compiled for the torch at hand

        group = communicator_of(found, "LeafSync")
    comm = group.split(0)
    assert comm is not None  # as it gave a color
    return OverCommunicator(comm)
