"""A `LeafSync`'s transport for parameters on a device, such as a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycollective.agree import Bytes
from pycollective.errors import CollectiveAborted, CollectiveTimeout, ConfigurationError
from pycollective.leaves.deal import Deal
from pycollective.torch.device_side import DeviceSide, nccl
from pycollective.torch.leaves.aborts import Aborts
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.over_group import average_of
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.pieces import Nodes
from pycollective.torch.ordered.work import DeviceWork
from pycollective.torch.serving import backend_of, device_side, store_of, timeout_of
from pycollective.torch.streams import streams_of

_TEXTS = 64  # of the last so many steps a store keeps


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
        call = average_of(bucket, nodes)
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
