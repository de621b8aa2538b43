"""A thread that makes calls in the order in which they were issued, and ends with the process."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pycollective.bootstrap.shutdown import SHUTDOWN
from pycollective.errors import ConfigurationError
from pycollective.system_limits import start_thread

_T = TypeVar("_T")

# How long a process that ends waits for exchanges that were issued, and, once their groups were
# aborted, for their threads, together, to see it.
_GRACE, _ABORTED_GRACE = 5.0, 2.0


class Workers:
    """The workers of a process and their threads, which must end before it does.

    A thread may outlive its worker: with its last call it may free the state, the worker and then
    groups, whose destructors release the interpreter's lock and take it again. A process that ended
    meanwhile would crash (`pycollective.bootstrap.shutdown`).

    Attributes:
        ending: whether the process ends: no call is taken any more.
    """

    def __init__(self) -> None:
        self.ending = False
        self._live: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._registered = False

    def add(self, worker: Worker) -> None:
        """Let a worker end with the process."""
        if not self._registered:
            self._registered = True
            SHUTDOWN.arrange()  # there may be no communicator, over another backend
            SHUTDOWN.add(self.let_end, self.end_all)
        if not self.ending:  # whose calls would be refused: end_all may be going through them
            self._live.add(worker)

    def let_end(self) -> None:
        """Take no more calls, and give those that were issued a short time."""
        self.ending = True
        deadline = time.monotonic() + _GRACE
        while any(each.issued for each in self._threads()) and time.monotonic() < deadline:
            time.sleep(0.002)

    def end_all(self) -> None:
        """End their threads."""
        self.ending = True
        for each in list(self._live):
            each.stop("the process ends")
        deadline = time.monotonic() + _ABORTED_GRACE
        for thread in self._threads():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _threads(self) -> list[_Thread]:
        # Not the one that runs this, as in a fork of its; nor one whose start Ctrl-C has ended.
        return [
            each
            for each in threading.enumerate()
            if isinstance(each, _Thread) and each.those is self and each.can_be_joined
        ]


_OF_THIS_PROCESS = Workers()


class Worker:
    """Runs calls one after another, on a thread that is started with the first.

    Args:
        what: makes the calls, in errors.
        abort: makes a call that is under way fail; used at the end of the process.
        those: all workers of the process.
    """

    def __init__(
        self, what: str, abort: Callable[[str], None], those: Workers = _OF_THIS_PROCESS
    ) -> None:
        self._what = what
        self._abort = abort
        self._those = those
        self._process = os.getpid()
        self._ended = False
        self._thread = _Thread(those)
        # The thread holds no more than its calls: who lets go of a state ends it by that.
        weakref.finalize(self, self._thread.calls.put, None).atexit = False
        those.add(self)

    def post(self, call: Callable[[], None]) -> None:
        """Run it behind those issued before. It handles its own errors.

        Raises:
            ConfigurationError: the worker has ended, this process ends, or it is a fork of the one
                that made the worker; or it may have no more threads.
        """
        self.refuse_in_a_fork()
        if self._those.ending:
            raise ConfigurationError(f"{self._what}: the process ends")
        thread = self._thread
        with thread.lock:
            # Under the lock: behind what ends the thread a call would wait for ever.
            if self._ended:
                raise ConfigurationError(f"{self._what} was closed")
            if thread.ident is None:
                start_thread(thread)
            thread.issued += 1
            thread.calls.put(call)

    def call(self, call: Callable[[], _T]) -> _T:
        """Run it behind those issued before; what it returns or raises.

        Raises:
            ConfigurationError: also on the thread itself, where it would wait for its own end.
        """
        self.refuse_here()
        return self.submit(call).result()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run it behind those issued before; the future of what it returns or raises."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def drain(self) -> None:
        """Wait until all calls that were issued have been made; raises as `call`."""
        self.call(lambda: None)

    def refuse_in_a_fork(self) -> None:
        """Raise in a fork of the process that made the worker."""
        if os.getpid() != self._process:
            raise ConfigurationError(f"{self._what} does not work in a forked process")

    def refuse_here(self) -> None:
        """Raise on the thread itself, where a call would wait for its own end."""
        if threading.current_thread() is self._thread:
            raise ConfigurationError(
                f"{self._what} cannot be called from a callback of its own exchanges' futures, "
                "for which the call would wait; wait for the future first"
            )

    @property
    def busy(self) -> bool:
        """Whether a call is under way or waits, in this process."""
        return self._thread.issued > 0 and os.getpid() == self._process

    @property
    def ended(self) -> bool:
        """Whether no call is taken any more."""
        return self._ended

    def end(self) -> None:
        """Take no more calls, and end the thread once those that were issued have been made.

        Waits for that a short time; may be called again.
        """
        self.stop()
        if self._thread.can_be_joined:
            self._thread.join(_ABORTED_GRACE)

    def stop(self, reason: str = "") -> None:
        """Take no more calls, without a wait; with a reason, calls are made to fail first."""
        if os.getpid() != self._process:
            return
        with self._thread.lock:
            first, self._ended = not self._ended, True
        if reason and self.busy:
            with contextlib.suppress(Exception):  # closed by now, or failed
                self._abort(reason)
        if first:
            self._thread.calls.put(None)


class _Thread(threading.Thread):
    """The thread, which runs once there is a first call.

    Attributes:
        those: all workers of the process.
        calls: in their order; None ends it.
        lock: for ``issued``, and so that no call comes behind None.
        issued: calls that have not ended, with all that they held.
    """

    def __init__(self, those: Workers) -> None:
        super().__init__(name="pycollective-worker", daemon=True)
        self.those = those
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.issued = 0

    @property
    def can_be_joined(self) -> bool:
        """Whether the thread runs in this process, and is not the one that asks."""
        return self.is_alive() and self is not threading.current_thread()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call  # it holds gradients
            with self.lock:
                self.issued -= 1
