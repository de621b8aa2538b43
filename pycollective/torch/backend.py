"""Makes the backend for a process group, and leaves its group when the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from pycollective import bootstrap
from pycollective.communicator import Communicator
from pycollective.errors import CollectiveError
from pycollective.torch import _backend

_log = logging.getLogger("pycollective")

# How long a process that ends without destroy_process_group waits for what it issued and never
# waited for. Long enough for peers that are a little behind, short enough for a person.
_EXIT_GRACE = 5.0

# The threads that run the futures' callbacks, for each communicator of a backend that still lives.
_threads: weakref.WeakKeyDictionary[Communicator, _backend.CompletionThreads] = (
    weakref.WeakKeyDictionary()
)


def register() -> None:
    """Register the backend with torch.distributed; a second time changes nothing."""
    if "pycollective" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("pycollective", create, devices=["cpu"])
    atexit.register(leave_groups)
    os.register_at_fork(after_in_child=_threads.clear)


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _backend.Backend:
    """Join a group of `size` ranks that meet in `store`, and make the backend over it.

    Args:
        store: a c10d store that is the group's own.
        rank: this rank in the group.
        size: ranks in the group.
        timeout: how long an operation may take, the joining too.

    Raises:
        ConfigurationError: the ranks cannot make a group; says why.
        CollectiveTimeout: not all ranks came.
    """
    communicator = bootstrap.connect(store, rank, size, timeout.total_seconds())
    threads = _backend.CompletionThreads()
    _threads[communicator] = threads
    return _backend.Backend(communicator, threads)


def leave_groups() -> None:
    """Leave every group that was not destroyed, at the end of the process.

    What was issued asynchronously gets a short time to end; then the groups where it has not are
    aborted, which tells the peers that this rank left. No callback runs any more afterwards: the
    interpreter is about to go.
    """
    deadline = time.monotonic() + _EXIT_GRACE
    for communicator, threads in list(_threads.items()):
        while communicator.pending and time.monotonic() < deadline:
            time.sleep(0.005)
        if communicator.pending:
            communicator.abort("it exited with operations under way")
        try:
            communicator.close()
        except CollectiveError as error:
            _log.debug("leaving a group at exit: %s", error)
        threads.close(max(0.0, deadline - time.monotonic()))
