"""Makes the backend for a process group, and ends it with the process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective import _torch
from pycollective.bootstrap import init as bootstrap
from pycollective.bootstrap.shutdown import SHUTDOWN
from pycollective.communicator import Communicator
from pycollective.errors import ConfigurationError
from pycollective.placement import number_hosts
from pycollective.torch import device_side as sides
from pycollective.torch.device_side import DeviceSide, nccl
from pycollective.torch.serving import backend_of, own_backend

# How long a process that ends without destroy_process_group waits for calls that nobody waited for,
# and for their callbacks: enough for peers that are a little behind, and short for a person.
_EXIT_GRACE = 5.0

_CPU = torch.device("cpu")


def register() -> None:
    """Register the backend with torch.distributed; a second time changes nothing."""
    if "pycollective" in dist.Backend.backend_list:
        return
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend("pycollective", _create, extended_api=True, devices=devices)
    SHUTDOWN.add(_let_operations_end, _end_threads)


def _create(options: Any, pg_options: Any) -> _torch.Backend:
    """Called by torch.distributed; `options`: its _DistributedBackendOptions."""
    ranks = options.global_ranks_in_group
    where = options.store, options.group_rank, options.group_size, options.timeout
    carrier = nccl(pg_options, ranks, options.group_id)
    # The first group is the world; the others' ranks are numbered in it.
    world = dist.get_world_size() if dist.is_initialized() else options.group_size
    hosts = bootstrap.simulated_hosts(world)
    if hosts and ranks:
        hosts = number_hosts([hosts[rank] for rank in ranks])
    return create(*where, hosts, DeviceSide(*where, ranks, carrier))


def create(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    hosts: Sequence[int] = (),
    device_side: DeviceSide | None = None,
) -> _torch.Backend:
    """Join a group of `size` ranks that meet in `store`, and make the backend over it.

    Args:
        store: a c10d store that is the group's own.
        rank: this rank in the group.
        size: ranks in the group.
        timeout: how long joining, and later each operation, may take.
        hosts: the host of each rank; without it, it is found out.
        device_side: the part for tensors on devices; without it, over NCCL.

    Raises:
        ConfigurationError: the ranks cannot make a group; says why.
        CollectiveTimeout: not every rank came; names the absent ranks.
    """
    limit = timeout.total_seconds()
    if device_side is None:
        device_side = DeviceSide(store, rank, size, timeout, (), nccl(None, (), ""))
    communicator = bootstrap.join(store, rank, size, limit, hosts)
    return _torch.Backend(communicator, _torch.CompletionThreads(rank, limit), device_side)


def stats(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Count what this rank has sent to other hosts through a process group.

    Args:
        group: of the backend ``pycollective``; None for the default group.

    Returns:
        ``sent_messages``, ``sent_bytes`` (as they left, with the library's headers) and
        ``sent_raw_bytes`` (what they would have been unpacked), as
        `pycollective.Communicator.stats` counts them. Groups count apart. All are 0 on one host.

    Raises:
        ConfigurationError: this process is in no such group, or another backend serves its CPU.
    """
    return communicator_of(group, "stats").stats()


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Make a tensor in memory that the other ranks of this host read in place.

    `pycollective.Communicator.empty` says which calls gain by it, and whose the memory is. FSDP2
    takes its buffers from there after
    ``model.set_allocate_memory_from_process_group_for_comm(True)``. Any thread may call this.

    Args:
        size: as `torch.empty` takes it.
        dtype: of the tensor; None for torch's default.
        group: of the backend ``pycollective``; None for the default group.

    Returns:
        A contiguous tensor on the CPU whose values are undefined.

    Raises:
        ConfigurationError: the host has not so much memory left, this
            process is in no such group or a fork of the one that made it, the group is destroyed,
            or another backend serves its CPU.
        RuntimeError: `torch.empty` does not take ``size``.
    """
    wanted = torch.get_default_dtype() if dtype is None else dtype
    sizes = torch.empty(*size, device="meta").size()  # type: ignore[arg-type]
    flat: torch.Tensor = _backend_of(group, "empty").allocate_tensor(
        sizes.numel(), dtype=wanted, device=_CPU
    )
    return flat.view(sizes)


def communicator_of(group: dist.ProcessGroup | None, call: str) -> Communicator:
    """The ranks of a process group of the backend; errors name `call`."""
    return _backend_of(group, call).communicator


def _backend_of(group: dist.ProcessGroup | None, call: str) -> _torch.Backend:
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(f"{call}: this process is in no such process group")
    own: _torch.Backend | None = own_backend(group, _CPU)
    if own is None:
        other = backend_of(group, _CPU)
        name = other.name() if other is not None else "none"
        raise ConfigurationError(
            f"{call} needs a process group of the backend pycollective for {_CPU}, and its is "
            f"{name}: give one made by init_process_group('pycollective') or "
            "new_group(backend='pycollective')"
        )
    return own


def _end_threads() -> None:
    sides.end_all()
    _torch.CompletionThreads.end_all()


def _let_operations_end() -> None:
    """At exit, wait a short time for calls that nobody waited for."""
    deadline = time.monotonic() + _EXIT_GRACE
    while _torch.CompletionThreads.any_busy() and time.monotonic() < deadline:
        time.sleep(0.002)
