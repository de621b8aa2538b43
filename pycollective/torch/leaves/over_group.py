"""A `LeafSync`'s transport over process groups of any backend, for parameters on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycollective.agree import Bytes
from pycollective.errors import CollectiveError, CollectiveMismatch, ConfigurationError
from pycollective.leaves.deal import Deal
from pycollective.order import Node
from pycollective.torch.leaves.aborts import Aborts
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.pieces import Call, Nodes


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
        call = average_of(bucket, nodes)
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


def average_of(bucket: Bucket, nodes: Nodes) -> Call:
    """The call that averages a bucket; where no rank has two leaves, they travel as they are."""
    like = torch.empty(bucket.averages.numel(), dtype=torch.float32, device="meta")
    narrow = bucket.own_dtype if all(map(_at_most_a_leaf, nodes.deal.held)) else None
    return Call("all_reduce", "avg", like, bucket.averages, narrow, "device", nodes=nodes)


def _at_most_a_leaf(runs: Sequence[Node]) -> bool:
    return sum(hi - lo for lo, hi in runs) <= 1
