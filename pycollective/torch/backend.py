"""Makes the backend for a process group, and ends it with the process."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycollective import _torch, bootstrap
from pycollective.communicator import Communicator

# How long a process that ends without destroy_process_group waits for what it issued and never
# waited for. Long enough for peers that are a little behind, short enough for a person.
_EXIT_GRACE = 5.0

# The threads that run the futures' callbacks, for each communicator of a backend that still lives.
_threads: weakref.WeakKeyDictionary[Communicator, _torch.CompletionThreads] = (
    weakref.WeakKeyDictionary()
)


def register() -> None:
    """Register the backend with torch.distributed; a second time changes nothing."""
    if "pycollective" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("pycollective", _create, extended_api=True, devices=["cpu"])
    os.register_at_fork(after_in_child=_threads.clear)
    atexit.register(_end_callbacks)


def _create(options: Any, _: object) -> _torch.Backend:
    """What torch.distributed calls; `options`: its _DistributedBackendOptions."""
    ranks = options.global_ranks_in_group
    # The first group is the world, and the others' ranks are numbered in it.
    world = dist.get_world_size() if dist.is_initialized() else options.group_size
    played = bootstrap.played_hosts(world)
    if played and ranks:
        numbers: dict[int, int] = {}
        played = tuple(numbers.setdefault(played[rank], len(numbers)) for rank in ranks)
    return create(options.store, options.group_rank, options.group_size, options.timeout, played)


def create(
    store: dist.Store, rank: int, size: int, timeout: timedelta, played: Sequence[int] = ()
) -> _torch.Backend:
    """Join a group of `size` ranks that meet in `store`, and make the backend over it.

    Args:
        store: a c10d store that is the group's own.
        rank: this rank in the group.
        size: ranks in the group.
        timeout: how long joining, and later each operation, may take.
        played: the host of each rank, where it is not to be found out.

    Raises:
        ConfigurationError: the ranks cannot make a group; says why.
        CollectiveTimeout: not every rank came; names the absentees.
    """
    communicator = bootstrap.join(store, rank, size, timeout.total_seconds(), played)
    threads = _threads[communicator] = _torch.CompletionThreads()
    # Each time anew, so as to run before the communicators leave, whose own exit comes at once.
    atexit.unregister(_let_operations_end)
    atexit.register(_let_operations_end)
    return _torch.Backend(communicator, threads)


def _let_operations_end() -> None:
    """Give what was issued asynchronously and never waited for a short time at exit.

    Not after an exception: then the peers had better learn of it at once.
    """
    if getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None:
        return
    deadline = time.monotonic() + _EXIT_GRACE
    while any(each.pending for each in list(_threads)) and time.monotonic() < deadline:
        time.sleep(0.002)


def _end_callbacks() -> None:
    """Let the futures' callbacks end: once the interpreter goes, none may run."""
    deadline = time.monotonic() + _EXIT_GRACE
    for threads in list(_threads.values()):
        threads.close(max(0.0, deadline - time.monotonic()))
