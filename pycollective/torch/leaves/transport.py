"""What carries a `LeafSync`'s bytes from rank to rank."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
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
from pycollective.agree import Bytes, all_gather_texts
from pycollective.bootstrap.init import init
from pycollective.communicator import Communicator
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
)
from pycollective.leaves.deal import Deal
from pycollective.order import Node
from pycollective.system_limits import start_thread
from pycollective.torch.device_side import DeviceSide, nccl
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.log import MOST_TEXT_BYTES
from pycollective.torch.leaves.place import OnDevice, Place
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered.calls import checked_group
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.pieces import WORDS, Call, Nodes
from pycollective.torch.ordered.work import DeviceWork
from pycollective.torch.serving import (
    backend_of,
    device_side,
    is_gloo,
    own_backend,
    store_of,
    timeout_of,
)
from pycollective.torch.streams import streams_of


class Transport(Protocol):
    """The ranks of a LeafSync, for its calls alone; all ranks make the same in one order.

    Every wait ends with a `CollectiveError` after the group's timeout at the latest. What the host
    waits for has the bodies here.

    Attributes:
        rank: this one.
        size: of them all.
        bucket_cap_mb: MiB of a bucket, unless the LeafSync is told otherwise.
        waits: whether the host waits for a step, so that what others tell is known at once.
    """

    rank: int
    size: int
    bucket_cap_mb: float
    waits: bool = True

    def all_gather(self, row: Bytes) -> Bytes:
        """Wait for every rank's row of as many bytes: (n,) in, (size, n) out."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0."""

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Send each rank its row of bytes, on CPUs, and have theirs: (size, n). Rows are alike."""

    def announce(self, words: StepWords, needed: bool) -> None:
        """Tell all ranks some words of this one, once a step, before its averages.

        Args:
            words: of this rank. All ranks' are read by the end of `finish`, where the host waits.
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
        """Wait for the averages of this step; raise what any rank's words or calls have raised.

        On a device the current stream waits, and the host does not: it raises what is known.
        """

    def settle(self) -> None:
        """Wait until all ranks' words of all steps are read, and raise what that raises."""
        return

    def tell(self, text: str) -> Callable[[], list[bytes]]:
        """Tell all ranks a text of this one, once a step, behind its averages.

        Returns:
            What returns every rank's text; on a device it waits for them, and not before.
        """
        texts = all_gather_texts(self.all_gather, text, MOST_TEXT_BYTES)
        return lambda: texts

    def abort(self, reason: str) -> None:
        """Let no rank wait for this one: calls there end with `CollectiveAborted`."""

    def stats(self) -> dict[str, int]:
        """Count what was sent from this rank to others."""

    def close(self) -> None:
        """Let go of what was made for the LeafSync."""


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


class OverGroup(Transport):
    """Over a process group of any backend that `ordered` takes, for parameters on CPUs.

    Over Gloo connections are the LeafSync's own. Reductions run on a thread of its own, in one
    order; the words of `announce` travel with the headers of a step's reductions.

    Args:
        group: of torch's.
        name: of this LeafSync in the group's store, the same on all ranks.
    """

    bucket_cap_mb = 25.0  # where a core computes and sends, each call costs milliseconds

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group  # ordered's own reference is weak
        self._aborts = Aborts(group, name)
        self._ordered = OrderedGroup(group, torch.device("cpu"), None, name=name)
        self._averages: list[Future[Any]] = []
        self._words: StepWords | None = None
        self._refused: Exception | None = None
        with self._raising_reason():
            self._ordered.prepare()

    def all_gather(self, row: Bytes) -> Bytes:
        with self._raising_reason():
            return self._ordered.all_gather(row)

    def broadcast(self, flat: torch.Tensor) -> None:
        with self._raising_reason():
            self._ordered.broadcast(flat.view(torch.uint8))

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        with self._raising_reason():
            self._ordered.exchange(rows, out)

    def announce(self, words: StepWords, needed: bool) -> None:
        self._words = words

    def average(self, bucket: Bucket, deal: Deal) -> None:
        rows = [torch.from_numpy(each) for each in bucket.accumulator._spend()]
        assert self._words is not None
        block = torch.from_numpy(self._words.block)
        nodes = Nodes(deal, rows, block, partial(self._divisor, self._words))
        call = _average_of(bucket, nodes)
        self._averages.append(self._ordered.worker.submit(partial(self._ordered.run, call)))

    def finish(self) -> None:
        averages, self._averages = self._averages, []
        with self._raising_reason():
            for each in averages:
                each.result()

    def abort(self, reason: str) -> None:
        self._aborts.say(reason)
        self._ordered.disconnect()

    def stats(self) -> dict[str, int]:
        return self._ordered.stats()

    def close(self) -> None:
        self._ordered.close()

    def _divisor(self, words: StepWords, rows: torch.Tensor) -> int:
        """On the worker, whose errors are the call's; all ranks raise the same."""
        try:
            return words.read(rows.numpy())
        except ConfigurationError as error:
            self._refused = error  # the worker's error is to be the call's
            raise CollectiveMismatch(str(error)) from error

    @contextmanager
    def _raising_reason(self) -> Iterator[None]:
        """Raise what another rank has aborted for, in place of a failure that came of it."""
        try:
            with self._aborts.raising():
                yield
        except CollectiveError:
            if self._refused is not None:
                raise self._refused from None
            raise


class OverDevices(Transport):
    """Over a process group whose backend carries a device's tensors, such as NCCL.

    Over NCCL the communicator is the LeafSync's own, so that its calls mix with no others', and an
    error ends its calls alone; over another backend calls are the group's. All is issued on a
    stream of its own; the host waits for nothing within a step. So an error of another rank's words
    is raised in a later step, and the averages are NaN until then; and what leaves log is told by
    the group's store, and read when somebody asks for it.

    Args:
        group: of torch's; its store and its ranks are used, and its backend where it is not NCCL.
        name: of this LeafSync in the group's store, the same on all ranks.
        ranks: of the group, in the default group; None to ask torch.
        device: of the parameters.
    """

    bucket_cap_mb = 25.0
    waits = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device = group, device  # ordered's own reference is weak
        self._store = store_of(group, f"{name}/texts", timedelta(seconds=timeout_of(group, device)))
        self._aborts = Aborts(group, name)
        self._side = own_side(group, device, name) if self.size > 1 else None
        if self._side is not None:
            self._ordered = self._side.ordered(device)
        else:
            self._ordered = OrderedGroup(group, device, streams_of(device, "LeafSync"), ranks)
        self._averages: list[DeviceWork] = []
        self._words: StepWords | None = None
        self._block = torch.empty(0)
        self._divisor: torch.Tensor | None = None  # of this step
        # What ranks have told, on its way to the host.
        self._coming: deque[tuple[StepWords, torch.Tensor, Any]] = deque()
        self._told = 0  # texts
        with self._aborts.raising():
            self._ordered.learn_hosts()

    def all_gather(self, row: Bytes) -> Bytes:
        with self._aborts.raising():
            return self._ordered.all_gather(row)

    def broadcast(self, flat: torch.Tensor) -> None:
        sent = flat.view(torch.uint8).to(self._device)
        with self._aborts.raising():
            self._ordered.broadcast(sent)
        if sent.device != flat.device:
            flat.view(torch.uint8).copy_(sent)

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        raise NotImplementedError  # of sharded models, which are on CPUs

    def announce(self, words: StepWords, needed: bool) -> None:
        with self._aborts.raising():
            self._read()
        self._words, self._divisor = words, None
        # Of some bytes of pageable memory the driver makes a copy at once.
        self._block = torch.from_numpy(words.block).to(self._device, non_blocking=True)

    def average(self, bucket: Bucket, deal: Deal) -> None:
        rows = bucket.accumulator._spend()
        assert self._words is not None
        divisor_of = partial(self._divisor_of, self._words)
        compiles = deal == Deal.contiguous(self.size, deal.leaves)  # each step has that one
        nodes = Nodes(deal, rows, self._block, divisor_of, compiles)
        call = _average_of(bucket, nodes)
        if bucket.averages.dtype != bucket.own_dtype:  # torch would let other gradients through
            call.narrow = None
        with self._aborts.raising():
            tensors = [bucket.averages, self._block, *rows]
            self._averages.append(self._ordered.issue([call], bucket.averages, tensors))

    def finish(self) -> None:
        averages, self._averages = self._averages, []
        with self._aborts.raising():
            for each in averages:
                each.wait()

    def settle(self) -> None:
        with self._aborts.raising():
            self._ordered.settle()
            self._read()

    def tell(self, text: str) -> Callable[[], list[bytes]]:
        number = self._told = self._told + 1
        # A store may be gone, of which who reads hears, or be one that cannot forget.
        with suppress(RuntimeError):
            self._store.set(f"{number}/{self.rank}", text)
            if number > 2 * _TEXTS:  # a rank may be behind
                self._store.delete_key(f"{number - 2 * _TEXTS}/{self.rank}")
        return partial(self._texts, number)

    def abort(self, reason: str) -> None:
        self._aborts.say(reason)
        if self.size > 1:
            self._ordered.abandon(CollectiveAborted(reason, self.rank))

    def stats(self) -> dict[str, int]:
        return self._ordered.stats()

    def close(self) -> None:
        self._ordered.close()
        if self._side is not None:
            if self._ordered.failure is not None:  # what is under way does not end by itself
                self._side.abort()
            self._side.close()

    def _divisor_of(self, words: StepWords, rows: torch.Tensor) -> torch.Tensor:
        """On the stream of the calls, of a step's first call; later ones have the same."""
        if self._divisor is None:
            self._divisor = words.divisor_on_device(rows)
            there = rows.to("cpu", non_blocking=True, copy=True)
            streams = self._ordered.streams
            assert streams is not None
            self._coming.append((words, there, streams.event()))
        return self._divisor

    def _read(self) -> None:
        """Read the words that have come to the host."""
        while self._coming:
            words, rows, event = self._coming[0]
            has_ended = event.query()
            if self._ordered.failure is not None:  # by which a device may have come to the event
                raise self._ordered.failure
            if not has_ended:
                return
            self._coming.popleft()
            words.read(rows.numpy())

    def _texts(self, number: int) -> list[bytes]:
        if number <= self._told - _TEXTS:
            raise ConfigurationError(
                f"what was logged {self._told - number} steps ago is no more there: read `logged` "
                f"within {_TEXTS} steps"
            )
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys)
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:
            late = CollectiveTimeout(f"what ranks have logged has not come: {error}", self.rank)
            with self._aborts.raising():
                raise late from error


class Aborts:
    """Why a rank has given up, as it tells the others by the group's store.

    Args:
        group: of torch's.
        name: of the part of the store.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank = group.rank()
        self._store = store_of(group, f"{name}/aborted", _ASKING)

    def say(self, reason: str) -> None:
        """Tell the others."""
        # Its server may be gone. Ranks see that connections end, or that a call is late.
        with suppress(RuntimeError):
            self._store.set("reason", f"rank {self._rank}: {reason}")

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise what another rank has aborted for, in place of a failure that came of it."""
        try:
            yield
        except CollectiveMismatch:
            raise
        except CollectiveError as error:
            if reason := self._reason():
                raise CollectiveAborted(f"aborted by {reason}", self._rank) from error
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
_TEXTS = 64  # of the last so many steps a store keeps
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]
_numbers = weakref.WeakKeyDictionary()


def _average_of(bucket: Bucket, nodes: Nodes) -> Call:
    """The call that averages a bucket; where no rank has two leaves, they travel as they are."""
    like = torch.empty(bucket.averages.numel(), dtype=torch.float32, device="meta")
    narrow = bucket.own_dtype if all(map(_at_most_a_leaf, nodes.deal.held)) else None
    return Call("all_reduce", "avg", like, bucket.averages, narrow, "device", nodes=nodes)


def _at_most_a_leaf(runs: Sequence[Node]) -> bool:
    return sum(hi - lo for lo, hi in runs) <= 1


def transport_of(group: dist.ProcessGroup | Communicator | None, place: Place) -> Transport:
    """One of a LeafSync's own, over the ranks of `group`: its calls mix with no others.

    Raises:
        ConfigurationError: the group does not carry tensors of that place.
    """
    if group is None and not dist.is_initialized():
        group = init()
    if isinstance(place, OnDevice):
        return _over_devices(group, place.device)
    if not isinstance(group, Communicator):
        found = checked_group(group)
        if own_backend(found, torch.device("cpu")) is None:
            return OverGroup(found, _next_name(found))
        from pycollective.torch.backend import communicator_of  # compiled for the torch at hand

        group = communicator_of(found, "LeafSync")
    comm = group.split(0)
    assert comm is not None  # as it gave a color
    return OverCommunicator(comm)


def _over_devices(
    group: dist.ProcessGroup | Communicator | None, device: torch.device
) -> Transport:
    if isinstance(group, Communicator):
        if group.size > 1:
            raise ConfigurationError(
                f"LeafSync: parameters on {device} need a process group of torch's, and "
                f"{group.size} ranks have none: torch.distributed.init_process_group('nccl') "
                "before, or group="
            )
        return OverDevices(dist.ProcessGroup(dist.HashStore(), 0, 1), "", device, [0])
    found = checked_group(group)
    gloo = device.type != "cpu" and is_gloo(found, device)  # on CPUs tests let it carry
    if gloo or backend_of(found, device) is None:
        raise ConfigurationError(
            f"LeafSync: parameters are on {device}, and LeafSync does not work there over a "
            f"process group of {dist.get_backend(found)}: make one of nccl"
        )
    return OverDevices(found, _next_name(found), device)


def _next_name(group: dist.ProcessGroup) -> str:
    number = next(_numbers.setdefault(group, itertools.count()))
    return f"pycollective.torch.leaves/{number}"


def own_side(group: dist.ProcessGroup, device: torch.device, name: str) -> DeviceSide | None:
    """An NCCL communicator of a LeafSync's own over a group's ranks; None where something else than
    NCCL carries the group's tensors, which cannot be made anew."""
    own = device_side(group, device)
    if own is None and not (
        dist.is_nccl_available() and isinstance(backend_of(group, device), dist.ProcessGroupNCCL)
    ):
        return None
    ranks = dist.get_process_group_ranks(group)
    limit = timedelta(seconds=timeout_of(group, device))
    where = store_of(group, f"{name}/nccl"), group.rank(), group.size(), limit
    return DeviceSide(*where, ranks, nccl(None, ranks, name))
