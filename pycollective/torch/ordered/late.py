"""Calls on devices that do not end: ranks tell each other, by the group's store, what they called.

Where sizes differ, NCCL waits before any header has come. So a call that has not ended after some
seconds puts its header into the store, and looks for those of other ranks. If they differ, the
error names them, and the group is aborted.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from pycollective.bootstrap.shutdown import SHUTDOWN
from pycollective.config import ENV_LATE_AFTER
from pycollective.errors import CollectiveError, ConfigurationError, PeerFailure
from pycollective.system_limits import start_thread
from pycollective.torch.ordered import header
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.work import Issued, UnderWay
from pycollective.torch.serving import store_of
from pycollective.torch.streams import Streams, ignore_captures

_AFTER = 10.0  # seconds
_ANSWER = timedelta(seconds=2)  # of the store: another rank may take back what it has told
_JOIN = 2.0  # seconds, at the end of the process
_FAILED = "failed: "


class LateCalls:
    """The calls of one group that have not ended when they should have.

    Args:
        group: of torch's; held weakly.
        under_way: its calls.
        found: says what those that have ended have found.
        streams: of the device.
        fail: gives what is told what is wrong, and aborts the group; None once that is gone.

    Raises:
        ConfigurationError: the environment variable holds no number of seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        under_way: UnderWay,
        found: Callable[[], CollectiveError | None],
        streams: Streams,
        fail: Callable[[], Callable[[CollectiveError], None] | None],
    ) -> None:
        self._group, self._under_way, self._fail = weakref.ref(group), under_way, fail
        self._found, self._streams = found, streams
        self._rank, self._size = group.rank(), group.size()
        self._after = seconds()
        self._store: dist.Store | None = None
        self._told: dict[int, str] = {}  # by the number of the call
        self._over = False  # whether the group makes no more calls
        self._one_at_a_time = threading.Lock()

    @property
    def after(self) -> float:
        """Seconds from a call's beginning."""
        return self._after

    def look(self, now: float) -> None:
        """Compare the oldest call, if it should have ended by now."""
        if self._over:
            return
        with self._streams.on_device():
            late = self._under_way.late(now - self._after)
        with self._one_at_a_time:
            if self._found() is None:  # else peers may still ask
                self._forget(late)
        if late is None:
            return
        error, fail = self.compare(late.headers), self._fail()
        if error is not None and fail is not None:
            self._over = True
            fail(error)

    def compare(
        self, headers: Sequence[Header], has_ended: bool = False, failed: str = ""
    ) -> CollectiveError | None:
        """Tell other ranks of a call, and see what they tell.

        Args:
            headers: what is called here: one, or some that were issued at once.
            has_ended: whether the group makes no more calls; then what is told stays.
            failed: why this rank has given the call up, if it has.

        Returns:
            The error that names a rank that has called something else, or given up; else None, also
            if the store does not answer.
        """
        # Errors of the store are no news of the call.
        with self._one_at_a_time, contextlib.suppress(RuntimeError):
            self._over = self._over or has_ended
            return self._compared(headers, failed)
        return None

    def _compared(self, headers: Sequence[Header], failed: str) -> CollectiveError | None:
        group = self._group()
        if group is None:
            return None
        if self._store is None:
            self._store = store_of(group, "pycollective.torch.ordered.late", _ANSWER)
        for mine in headers:
            said = _FAILED + failed if failed else np.array(mine.words).tobytes().hex()
            if self._told.get(mine.number) != said:
                self._store.set(f"{mine.number}/{self._rank}", said)
                self._told[mine.number] = said
            rows: list[np.ndarray | None] = [None] * self._size
            rows[self._rank] = np.array(mine.words).view(np.uint8)
            for rank in range(self._size):
                key = f"{mine.number}/{rank}"
                if rank == self._rank or not self._store.check([key]):
                    continue
                theirs = self._store.get(key).decode()
                if theirs.startswith(_FAILED):
                    why = theirs.removeprefix(_FAILED)
                    text = f"rank {rank} has given up {mine}: {why}"
                    return PeerFailure(text, self._rank, mine.kind, mine.number)
                if len(theirs) == 2 * header.BYTES:  # else taken back just now
                    rows[rank] = np.frombuffer(bytes.fromhex(theirs), np.uint8)
            try:
                header.compare(rows, self._rank, "The backend waited for sizes that do not fit")
            except CollectiveError as error:
                return error
        return None

    def _forget(self, late: Issued | None) -> None:
        """Take back what was told of calls before this one, which have ended."""
        first = math.inf if late is None else late.headers[0].number
        for number in [each for each in self._told if each < first]:
            with contextlib.suppress(RuntimeError):  # a store that cannot forget
                assert self._store is not None
                self._store.delete_key(f"{number}/{self._rank}")
            del self._told[number]


class _Watch:
    """A thread that looks at the late calls of all groups, from the first one on."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[LateCalls] = weakref.WeakSet()
        self._ends = False
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = 0

    def add(self, calls: LateCalls) -> None:
        with self._lock:
            self._groups.add(calls)
            self._wake.set()  # it may look sooner than others
            if self._process != os.getpid():  # also in a fork, which has no thread
                self._thread = threading.Thread(
                    target=self._run, name="pycollective-late-calls", daemon=True
                )
                start_thread(self._thread)
                if not self._process:
                    SHUTDOWN.arrange()
                    SHUTDOWN.add(lambda: None, self.end)
                self._process = os.getpid()

    def end(self) -> None:
        """End the thread, which may be in a call of a store."""
        self._ends = True
        self._wake.set()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(_JOIN)

    def _run(self) -> None:
        ignore_captures()
        pause = 0.0
        while True:
            self._wake.wait(pause)
            if self._ends:
                return
            with self._lock:
                self._wake.clear()
                groups = list(self._groups)
            pause = min([each.after / 4 for each in groups], default=_AFTER / 4)
            while groups:  # each may be freed behind its look
                # A device, a store or a backend that fails is heard of by calls; others are left.
                with contextlib.suppress(Exception):
                    groups.pop().look(time.monotonic())


WATCH = _Watch()


def seconds() -> float:
    """After how long a call that has not ended is late.

    Raises:
        ConfigurationError: the environment variable holds no number above 0.
    """
    said = os.environ.get(ENV_LATE_AFTER, "")
    if not said:
        return _AFTER
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigurationError(
            f"the environment variable {ENV_LATE_AFTER} is {said!r}, not a number of seconds"
        )
    return found
