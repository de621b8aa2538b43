"""How ranks leave: at the end of the process every communicator says goodbye.

And the one order in which everything of this library that may need the interpreter ends, before
the interpreter does:

1. what was issued and never waited for gets a short time, where a face of the library gives it one;
2. every communicator is closed, those from `split` too, and those that were let go of while
   operations were pending; one that is busy, or all after an exception, is aborted first;
3. the progress thread ends;
4. the threads of the faces of the library end, with the users' callbacks that run on them.

Whatever still holds Python objects after that keeps them.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from pycollective import _core
from pycollective.environment import (
    ENV_RANK,
    ENV_STORE,
    environment_number,
    followed_key,
)
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError
from pycollective.join import mpi_launch
from pycollective.join.address import job_secret
from pycollective.join.store import StoreClient

# How long a daemon thread that was blocked in an operation has to come back to Python, seconds.
# After that it is stopped where it stands; but frames that are not ours may not bear that.
_COMING_BACK = 0.05


class ProcessEnd:
    """What is done at the end of a process, in the order above, once that is arranged."""

    def __init__(self) -> None:
        self._arranged = False
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []

    def arrange(self) -> None:
        """Have all communicators, of now and later, closed before the process ends."""
        if not self._arranged:
            self._arranged = True
            atexit.register(self._come)

    def add(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Add what a face of the library does at exit.

        Args:
            before: waits a short time for what was issued; not called after an exception.
            after: ends its threads; the communicators are closed by then.
        """
        self._before.append(before)
        self._after.append(after)

    def _come(self) -> None:
        crash = _crash()
        if isinstance(crash, CollectiveError) and ENV_STORE in os.environ:
            _tell_launcher_that_others_failed()
        # Each step is taken even if Ctrl-C ends the one before.
        with ExitStack() as steps:
            if crash is not None:
                steps.callback(mpi_launch.end_after_failure)
            for each in self._after:
                steps.callback(each)
            steps.callback(_core.stop_progress)
            steps.callback(leave_all)
            if crash is None:
                for each in self._before:
                    steps.callback(each)


END = ProcessEnd()


def leave_all() -> None:
    """Say goodbye at exit, so that the peers need not find out: the last chance for both sides."""
    if _core.leave_all(_crash() is not None):
        time.sleep(_COMING_BACK)


def _crash() -> BaseException | None:
    """The exception that ends this process, if any."""
    return getattr(sys, "last_exc", getattr(sys, "last_value", None))


def _tell_launcher_that_others_failed() -> None:
    try:
        client = StoreClient(os.environ[ENV_STORE], job_secret(), timeout=1.0)
        client.set(followed_key(environment_number(ENV_RANK)), b"")
        client.close()
    except (CollectiveTimeout, ConfigurationError):
        return  # the launcher has gone; it only makes its report more exact
