"""Threads that the system does not grant: a pids cgroup and `ulimit -u` limit them."""

from __future__ import annotations

import errno
import os
from threading import Thread

from pycollective.errors import ConfigurationError


def start(thread: Thread) -> None:
    """Start a thread.

    Raises:
        ConfigurationError: the system grants no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise _refused(thread.name, error) from error


def check(error: Exception, what: str) -> None:
    """Raise `ConfigurationError` if that is why native code has failed to make something."""
    if os.strerror(errno.EAGAIN) in str(error):  # of std::thread
        raise _refused(what, error) from error


def _refused(what: str, error: Exception) -> ConfigurationError:
    # csrc/torch/gloo_link.cpp has the same words for a thread that it needs later.
    return ConfigurationError(
        f"no thread could be started for {what} ({error}): raise the limit of processes and "
        "threads (ulimit -u, or pids.max of the cgroup)"
    )
