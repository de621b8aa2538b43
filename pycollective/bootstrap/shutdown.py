"""Shutdown: what ends at the end of the process, and in which order.

Everything of this library that may need the interpreter ends before the interpreter does:

1. After an exception of the main thread every communicator is aborted, before Python joins the
   other threads: one of them may be blocked in an operation, and the peers wait for this rank.
2. The torch backend gives what was issued and never waited for a short time.
3. Every communicator is closed: those from `split` too, and those that were dropped while
   operations were pending. One that is busy is aborted first.
4. The progress thread ends.
5. The torch backend's threads end, with the users' callbacks that run on them.

Where the main thread ends without an exception, the other threads go on until they are done.
Whatever still holds Python objects after that keeps them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType

from pycollective import _core
from pycollective.bootstrap.store import StoreClient, followed_key, job_secret
from pycollective.config import ENV_STORE, MPI_RANK_VARIABLES
from pycollective.errors import (
    CollectiveError,
    CollectiveTimeout,
    ConfigurationError,
    in_words,
)

# Seconds for daemon threads that were blocked in an operation to come back to Python. After that
# they are stopped where they stand, which frames of other libraries may not bear.
_COMING_BACK = 0.05
_MPI_GRACE = 1.0  # seconds for other ranks to say what they saw, before MPI ends them


class Shutdown:
    """Carries out the order above at the end of the process, once that is arranged."""

    def __init__(self) -> None:
        self._arranged = False
        self._has_told = False
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []

    def arrange(self) -> None:
        """Close all communicators, of now and later, before the process ends."""
        if not self._arranged:
            self._arranged = True
            atexit.register(self._come)
            _before_threads_are_joined(self._tell_of_crash)

    def add(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Add what a part of the library does at exit.

        Args:
            before: waits a short time for what was issued; not called after an exception.
            after: ends its threads; called when the communicators are closed.
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
        _core.abort_all(f"the process exits with {in_words(crash)}")

    def _come(self) -> None:
        # Each step is taken even if Ctrl-C ends the one before.
        with ExitStack() as steps:
            crash = _crash()
            if crash is not None:
                steps.callback(_abort_mpi)
            for each in self._after:
                steps.callback(each)
            steps.callback(_core.stop_progress)
            steps.callback(leave_all)
            if crash is None:
                for each in self._before:
                    steps.callback(each)
            steps.callback(self._tell_of_crash)


SHUTDOWN = Shutdown()
_listing_frames = threading.Lock()


def leave_all() -> None:
    """Close all communicators at exit, so that the peers need not find out by themselves."""
    if _core.close_all():
        time.sleep(_COMING_BACK)


def is_abandoned_by_asyncio() -> bool:
    """Return whether asyncio joins the calling thread after Ctrl-C or an exit.

    Blocked operations ask. After either, `asyncio.run` ends only once the threads of `to_thread`
    have ended. By then all tasks are cancelled and nobody awaits these threads. asyncio tells
    nobody, so this looks at the main thread's frames. (From Python 3.11 on.)
    """
    runner = getattr(sys.modules.get("asyncio.runners"), "Runner", None)
    main = threading.main_thread().ident
    if runner is None or main is None or not _is_of_asyncio(threading.get_ident()):
        return False
    frame = _frame_of(main)
    while frame is not None and frame.f_code is not runner.__exit__.__code__:
        frame = frame.f_back
    ended_by = None if frame is None else frame.f_locals.get("exc_type")
    # A program may handle any other, and go on.
    return ended_by is not None and issubclass(ended_by, (KeyboardInterrupt, SystemExit))


def _is_of_asyncio(ident: int) -> bool:
    """Return whether that thread belongs to asyncio's own executor."""
    # `current_thread` would keep an object for ever for a thread that Python has not started.
    thread = getattr(threading, "_active", {}).get(ident)
    return thread is not None and thread.name.startswith("asyncio_")


def _frame_of(ident: int) -> FrameType | None:
    """Return what that thread runs; None also if another thread asks."""
    # Python 3.11 holds a lock of the interpreter while it lists frames. A collection in the middle
    # of it deadlocks if what is freed lets another thread run that begins or ends one. (A program
    # that turns collections on or off in this moment has it undone.)
    if not _listing_frames.acquire(blocking=False):
        return None
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()
        _listing_frames.release()


def _before_threads_are_joined(act: Callable[[], None]) -> None:
    """Call `act` when the main thread has ended, before Python joins the other threads."""
    # Executors join their threads there, too, and who registers last is called first.
    import concurrent.futures.thread  # noqa: F401

    # Private: without it the exit handlers have to do, which come when all threads have ended.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with suppress(RuntimeError):  # the main thread has ended already
            register(act)


def _crash() -> BaseException | None:
    """Return the exception that ends this process, if any."""
    return getattr(sys, "last_exc", getattr(sys, "last_value", None))


def _tell_launcher_that_others_failed() -> None:
    try:
        client = StoreClient(os.environ[ENV_STORE], job_secret(), timeout=1.0)
        client.set(followed_key(os.getpgrp()), b"")
        client.close()
    except (CollectiveTimeout, ConfigurationError):
        return  # the launcher has gone; it only makes its report more exact


def _abort_mpi() -> None:
    """End the job where an exception ends a rank that mpiexec started: MPI_Finalize would hang.

    It waits for all ranks, of which some may be dead or may wait in turn. The others get a moment
    first, to say what they saw.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    launched = any(name in os.environ for name in MPI_RANK_VARIABLES)
    if not launched or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_MPI_GRACE)
    mpi.COMM_WORLD.Abort(1)
