"""How ranks leave: at the end of the process every communicator says goodbye.

And the one order in which everything of this library that may need the interpreter ends, before
the interpreter does:

1. after an exception of the main thread every communicator is aborted, before Python joins the
   other threads: one of them may be blocked in an operation, and the peers wait for this rank;
2. what was issued and never waited for gets a short time, where a face of the library gives it one;
3. every communicator is closed, those from `split` too, and those that were let go of while
   operations were pending; one that is busy is aborted first;
4. the progress thread ends;
5. the threads of the faces of the library end, with the users' callbacks that run on them.

Where the main thread ends without an exception, the other threads go on until they have done.

Whatever still holds Python objects after that keeps them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from pycollective import _core
from pycollective.bootstrap import mpi as mpi_launch
from pycollective.bootstrap.address import job_secret
from pycollective.bootstrap.store import StoreClient, followed_key
from pycollective.config import ENV_RANK, ENV_STORE, environment_number
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError

# How long a daemon thread that was blocked in an operation has to come back to Python, seconds.
# After that it is stopped where it stands; but frames that are not ours may not bear that.
_COMING_BACK = 0.05


class ProcessEnd:
    """What is done at the end of a process, in the order above, once that is arranged."""

    def __init__(self) -> None:
        self._arranged = False
        self._has_told = False
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []

    def arrange(self) -> None:
        """Have all communicators, of now and later, closed before the process ends."""
        if not self._arranged:
            self._arranged = True
            atexit.register(self._come)
            _before_threads_are_joined(self._tell_of_crash)

    def add(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Add what a face of the library does at exit.

        Args:
            before: waits a short time for what was issued; not called after an exception.
            after: ends its threads; the communicators are closed by then.
        """
        self._before.append(before)
        self._after.append(after)

    def _tell_of_crash(self) -> None:
        crash = _crash()
        if crash is None:
            return
        if not self._has_told and isinstance(crash, CollectiveError) and ENV_STORE in os.environ:
            _tell_launcher_that_others_failed()
        self._has_told = True
        # At exit once more: a thread that was joined meanwhile may have made another.
        _core.abort_all("the process exits with an exception")

    def _come(self) -> None:
        # Each step is taken even if Ctrl-C ends the one before.
        with ExitStack() as steps:
            crash = _crash()
            if crash is not None:
                steps.callback(mpi_launch.end_after_failure)
            for each in self._after:
                steps.callback(each)
            steps.callback(_core.stop_progress)
            steps.callback(leave_all)
            if crash is None:
                for each in self._before:
                    steps.callback(each)
            steps.callback(self._tell_of_crash)


END = ProcessEnd()


def leave_all() -> None:
    """Say goodbye at exit, so that the peers need not find out: the last chance for both sides."""
    if _core.leave_all():
        time.sleep(_COMING_BACK)


def is_abandoned_by_asyncio() -> bool:
    """Whether asyncio joins the calling thread after Ctrl-C or an exit; blocked operations ask.

    Either ends `asyncio.run` only once the threads of `to_thread` have ended; all tasks are
    cancelled by then, and nobody awaits these threads any more. asyncio tells nobody of that: it
    shows in what the main thread is about. (From Python 3.11 on.)
    """
    runner = getattr(sys.modules.get("asyncio.runners"), "Runner", None)
    main = threading.main_thread().ident
    if runner is None or main is None:
        return False
    frame = sys._current_frames().get(main)
    while frame is not None and frame.f_code is not runner.__exit__.__code__:
        frame = frame.f_back
    ended_by = None if frame is None else frame.f_locals.get("exc_type")
    if ended_by is None or not issubclass(ended_by, (KeyboardInterrupt, SystemExit)):
        return False  # a program may handle any other, and go on
    return threading.current_thread().name.startswith("asyncio_")  # those of its own executor


def _before_threads_are_joined(act: Callable[[], None]) -> None:
    """Have `act` called when the main thread has ended, and other threads have not been joined."""
    # Executors join their threads there, too, and who registers last is called first.
    import concurrent.futures.thread  # noqa: F401

    # Private: without it the exit handlers have to do, which come when all threads have ended.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with suppress(RuntimeError):  # the main thread has ended already
            register(act)


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
