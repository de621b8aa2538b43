"""The backend's calls with tensors on devices: NCCL carries them, reductions have the contract's
bits.

The C++ backend calls NCCL itself for moves, barriers, and sums, products, minima and maxima of
integers, which are exact in any order. All other reductions come here and are ordered calls over
NCCL.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveAborted, ConfigurationError
from pycollective.torch.ordered import calls
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.streams import Streams, streams_of

# Makes a backend of torch's for tensors on devices: of a store, a rank, a size and a timeout.
MakesCarrier = Callable[[dist.Store, int, int, timedelta], Any]


class DeviceSide:
    """The part of one process group of the backend that serves tensors on devices.

    NCCL is asked for nothing before the first such tensor. Thread-safe.

    Attributes:
        takes_cpu: whether CPU tensors come here, too: in tests, which have no other device.

    Args:
        store: in which the carrier's ranks meet.
        rank, size: of the group.
        timeout: of the carrier's calls.
        ranks: the members' numbers in the default group; none for all.
        make: makes the carrier.
    """

    device_type = "cuda"
    backend_type = dist.ProcessGroup.BackendType.NCCL
    takes_cpu = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        make: MakesCarrier,
    ) -> None:
        self._store = dist.PrefixStore("pycollective.torch.device_side", store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._ranks = list(ranks) or list(range(size))
        self._make = make
        self._one_at_a_time = threading.RLock()
        self._group: dist.ProcessGroup | None = None
        self._carrier: Any = None
        self._ordered: dict[torch.device, OrderedGroup] = {}
        self._closed = False
        self._process = 0  # in which the carrier was made

    @functools.cached_property
    def may_come(self) -> bool:
        """Whether this process may have tensors on devices at all; asks CUDA, but not before."""
        return self.takes_cpu or torch.cuda.is_available()

    def carrier(self) -> Any:
        """The backend that carries; made now, if it is not there. Not collective over NCCL.

        Raises:
            ConfigurationError: there is no NCCL, or the process group was destroyed.
        """
        with self._one_at_a_time:
            if self._closed:
                raise ConfigurationError("pycollective: the process group was destroyed")
            if self._carrier is None:
                _carried.add(self)
                self._process = os.getpid()
                carrier = self._make(self._store, self._rank, self._size, self._timeout)
                # Not registered with torch: nobody else sees it or destroys it.
                group = dist.ProcessGroup(self._store, self._rank, self._size)
                device = torch.device(self.device_type)
                group._register_backend(device, self.backend_type, carrier)
                group._set_default_backend(self.backend_type)
                self._group, self._carrier = group, carrier
            return self._carrier

    def made(self) -> Any:
        """The backend that carries; None if it has not been needed."""
        return self._carrier

    def ordered(self, device: torch.device) -> OrderedGroup:
        """The ordered calls on a device; made now, if they are not there.

        Args:
            device: with its number.

        Raises:
            ConfigurationError: as for `carrier`.
        """
        with self._one_at_a_time:
            self.carrier()
            if device not in self._ordered:
                assert self._group is not None
                streams = self._streams(device)
                self._ordered[device] = OrderedGroup(self._group, device, streams, self._ranks)
            return self._ordered[device]

    # Called by the C++ backend; `op` as the contract names it. Each returns None if not async.

    def all_reduce(self, tensors: list[torch.Tensor], op: str, async_op: bool) -> dist.Work | None:
        calls.check(tensors, op)
        return calls.all_reduce_over(self._of(tensors), tensors, op, async_op)

    def reduce(
        self, tensors: list[torch.Tensor], root: int, op: str, async_op: bool
    ) -> dist.Work | None:
        if not 0 <= root < self._size:
            raise ConfigurationError(f"reduce: rank {root} is not one of 0 to {self._size - 1}")
        if self._rank != root:  # whose tensors stay as they are
            tensors = [each.detach().clone() for each in tensors]
        return self.all_reduce(tensors, op, async_op)

    def reduce_scatter(
        self,
        outs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        op: str,
        async_op: bool,
    ) -> dist.Work | None:
        for out, parts in zip(outs, inputs, strict=True):
            shapes = {tuple(each.shape) for each in (out, *parts)}
            if len(shapes) > 1 or len(parts) != self._size:
                raise ConfigurationError(
                    f"reduce_scatter: give {self._size} inputs of the output's shape, a rank's "
                    f"each, not {len(parts)} of {sorted(shapes)}; pad them to equal shapes"
                )
        wholes = [torch.cat([each.detach().reshape(-1) for each in parts]) for parts in inputs]
        return self.reduce_scatter_tensor(outs, wholes, op, async_op)

    def reduce_scatter_tensor(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], op: str, async_op: bool
    ) -> dist.Work | None:
        calls.check([*tensors, *outs], op)
        calls.check_scatter(outs, tensors, self._rank, self._size)
        return calls.reduce_scatter_over(self._of(tensors), outs, tensors, op, async_op)

    all_reduce_coalesced = all_reduce
    reduce_scatter_tensor_coalesced = reduce_scatter_tensor

    def set_timeout(self, seconds: float) -> None:
        with self._one_at_a_time:
            self._timeout = timedelta(seconds=seconds)
            if self._carrier is not None:
                self._carrier.set_timeout(self._timeout)

    def abort(self) -> None:
        """Let what is under way fail."""
        for each in list(self._ordered.values()):
            each.give_up(CollectiveAborted("the process group was aborted"))
        if self._carrier is not None:
            self._carrier.abort()

    def close(self) -> None:
        """End the carrier. No calls follow."""
        with self._one_at_a_time:
            self._closed = True
            if self._carrier is not None:
                self._carrier.shutdown()
            self._ordered.clear()  # whose memory the carrier may have used until now
            self._group = self._carrier = None

    def end_with_process(self) -> None:
        """Abort the carrier, as torch does where a group is not destroyed."""
        if self._carrier is not None and self._process == os.getpid():  # a fork has no CUDA
            self._carrier.abort()

    def _of(self, tensors: Sequence[torch.Tensor]) -> OrderedGroup:
        return self._ordered.get(tensors[0].device) or self.ordered(tensors[0].device)

    def _streams(self, device: torch.device) -> Streams | None:
        return streams_of(device, "pycollective")


# Those with a carrier.
_carried: weakref.WeakSet[DeviceSide] = weakref.WeakSet()


def end_all() -> None:
    """At the end of the process: abort what nobody has ended, so that NCCL's threads end."""
    for each in list(_carried):
        each.end_with_process()


def nccl(options: Any, ranks: Sequence[int], name: Any) -> MakesCarrier:
    """Makes NCCL's backends.

    Args:
        options: None, or the user's `dist.ProcessGroupNCCL.Options`, whose timeout the group's
            replaces, as torch does it.
        ranks: as `DeviceSide` has them.
        name: of the process group, in NCCL's logs.

    Raises:
        ConfigurationError: the options are not NCCL's.
    """
    there = dist.is_nccl_available()
    if options is not None and not (there and isinstance(options, dist.ProcessGroupNCCL.Options)):
        raise ConfigurationError(
            f"pg_options of the backend pycollective are those of NCCL for tensors on CUDA "
            f"devices, dist.ProcessGroupNCCL.Options, not {type(options).__name__}"
            + ("" if there else "; and this torch was built without NCCL")
        )

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        if not there:
            others = [each for each in ("gloo", "mpi") if getattr(dist, f"is_{each}_available")()]
            raise ConfigurationError(
                "the backend pycollective needs NCCL for tensors on CUDA devices, and this torch "
                f"({torch.__version__}) has only {' and '.join(others) or 'no backend'}; install "
                "a torch built with NCCL, or move tensors to the CPU"
            )
        chosen = options if options is not None else dist.ProcessGroupNCCL.Options()
        chosen._timeout = timeout
        chosen.global_ranks_in_group = list(ranks)
        chosen.group_name = name
        return dist.ProcessGroupNCCL(store, rank, size, chosen)

    return make
