"""Errors where the system grants no more threads or open files."""

from __future__ import annotations

import errno
import os
import resource
from threading import Thread

from pycollective.config import MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError

_STRANGERS = 192  # connections of others for which a store has room beside its clients
_OTHER_FILES = 64  # descriptors that the serving process needs for itself


def start_thread(thread: Thread) -> None:
    """Start a thread.

    Raises:
        ConfigurationError: the system grants no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(thread.name, error) from error


def check_for_threads(error: Exception, what: str) -> None:
    """Raise `ConfigurationError` if native code failed for want of a thread."""
    if os.strerror(errno.EAGAIN) in str(error):  # of std::thread
        raise _no_thread(what, error) from error


def _no_thread(what: str, error: Exception) -> ConfigurationError:
    # csrc/torch/gloo_link.cpp has the same words for a thread that it needs later.
    return ConfigurationError(
        f"no thread could be started for {what} ({error}): raise the limit of processes and "
        "threads (ulimit -u, or pids.max of the cgroup)"
    )


def connections_for(clients: int) -> int:
    """Return how many connections a store with so many clients may accept.

    Raises:
        ConfigurationError: this process may not open so many files.
    """
    if clients <= MAX_RANKS_PER_HOST:
        return MAX_RANKS_PER_HOST + _STRANGERS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - len(os.listdir("/proc/self/fd")) - _OTHER_FILES
    if free < clients:
        raise ConfigurationError(
            f"a store for {clients} ranks needs {clients + limit - free} open files, and this "
            f"process may open {limit}: raise its limit (ulimit -n), or give a store that another "
            "process serves, such as torch's"
        )
    return min(clients + _STRANGERS, free)


def described(error: OSError) -> str:
    """Return the error in words; where no more files can be opened, with the limit and the cure."""
    if error.errno != errno.EMFILE:
        return str(error)
    # csrc/bindings/errors_py.cpp has the same words for errors of native code.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: this process may have {limit}, raise its limit (ulimit -n)"
