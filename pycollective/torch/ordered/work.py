"""Calls under way, as torch's own works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import CollectiveError, CollectiveTimeout
from pycollective.torch.ordered.header import Header
from pycollective.torch.streams import Streams, wait_for


class Work(dist.Work):
    """A call of CPU tensors that was issued with ``async_op=True``."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future
        self._ended = threading.Event()
        future.add_done_callback(lambda _: self._ended.set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Raises:
            CollectiveTimeout: it is not there in time. The call goes on.
            CollectiveError: the call failed.
        """
        limit = timeout.total_seconds() if timeout else None
        if limit is not None and not self._ended.wait(limit):
            raise CollectiveTimeout(f"the call has not ended after {limit:g} s; it goes on")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the call raised; None if it has not, or has not ended."""
        if self._future.done():
            try:
                self._future.value()
            except RuntimeError as error:
                return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        value = self._future.value()
        return list(value) if isinstance(value, list | tuple) else [value]

    def synchronize(self) -> None:
        self.wait()


@dataclass(eq=False)
class Issued:
    """A call that was given to a device.

    Attributes:
        headers: what was called.
        event: behind it.
        tensors: those that it uses, until the event, or until somebody's stream waits for it.
        error: what has been learnt of it.
        at: when it was issued, by `time.monotonic`.
    """

    headers: Sequence[Header]
    event: Any
    tensors: Sequence[torch.Tensor]
    error: CollectiveError | None = None
    at: float = field(default_factory=time.monotonic)


# Of groups that are gone. They may go in the middle of anything: no lock.
_left: deque[UnderWay] = deque()


class UnderWay:
    """The calls of a group that a device may not have ended, with the memory that they use.

    Attributes:
        written: memory of the host that each of them may write.
    """

    written: torch.Tensor | None = None

    def __init__(self) -> None:
        self._issued: deque[Issued] = deque()
        self._lock = threading.Lock()

    def __del__(self, left: deque[UnderWay] = _left) -> None:
        # The group is gone, and the device may go on to write memory that would be given to others.
        if self._issued:
            left.append(self)

    def add(self, issued: Issued) -> None:
        """Keep a call, and let go of those that have ended, also of groups that are gone."""
        for _ in range(len(_left)):
            with contextlib.suppress(IndexError):  # another thread was faster
                gone = _left.popleft()
                if gone.newest() is not None:
                    _left.append(gone)
        with self._lock:
            self._sweep()
            self._issued.append(issued)

    @contextlib.contextmanager
    def listed(self, issued: Issued) -> Iterator[None]:
        """Keep a call in a block, in which the host waits for it."""
        self.add(issued)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._issued.remove(issued)

    def late(self, before: float) -> Issued | None:
        """The one that the device has to end next, if it was issued before this moment.

        The device is not asked about others: that would end the capture of a graph by the program,
        unless the thread has said that it ignores those of others.
        """
        with self._lock:
            if not self._issued or self._issued[0].at > before:
                return None
            self._sweep()
            oldest = self._issued[0] if self._issued else None
            return oldest if oldest is not None and oldest.at <= before else None

    def newest(self) -> Issued | None:
        """The one that the device has to end last."""
        with self._lock:
            self._sweep()
            return self._issued[-1] if self._issued else None

    def fail(self, error: CollectiveError) -> None:
        """Say so of all that have not ended."""
        with self._lock:
            self._sweep()
            for each in self._issued:
                each.error = error

    def _sweep(self) -> None:
        while self._issued and self._issued[0].event.query():
            self._issued.popleft()


class DeviceWork(dist.Work):
    """A call on a device; as a work of `ProcessGroupNCCL`.

    Args:
        issued: the call.
        value: the tensor, or the list, of its future.
        device: where the tensors are.
        streams: of the device.
        found: says what calls that have ended have found, up to one by its number.
    """

    def __init__(
        self,
        issued: Issued,
        value: Any,
        device: torch.device,
        streams: Streams,
        found: Callable[[int], CollectiveError | None],
    ) -> None:
        super().__init__()
        self._issued, self._value, self._found = issued, value, found
        self._device, self._streams = device, streams
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the result; with a timeout, the host.

        Raises:
            CollectiveTimeout: it is not there in time. The call goes on.
            CollectiveError: the call failed, as far as it is known.
        """
        if timeout is not None and timeout.total_seconds() > 0:
            wait_for(self._issued.event, timeout.total_seconds(), "an ordered call")
        if (error := self.exception()) is not None:
            raise error
        self._streams.let_caller_wait(self._issued.event)
        self._issued.tensors = ()  # the caller's stream frees and uses them behind the call
        return True

    def is_completed(self) -> bool:
        """Whether the device has ended it, or it has failed."""
        return self._issued.error is not None or bool(self._issued.event.query())

    def is_success(self) -> bool:
        return bool(self._issued.event.query()) and self.exception() is None

    def exception(self) -> BaseException | None:
        """What is known to have gone wrong with it, or with a call before it; never waits."""
        return self._issued.error or self._found(self._issued.headers[-1].number)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose waiters wait in their streams, and the host does not."""
        if self._future is None:
            cpu = self._device.type == "cpu"
            self._future = torch.futures.Future(devices=None if cpu else [self._device])
            with self._streams.entered():
                self._future.set_result(self._value)
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        value = self._value
        return list(value) if isinstance(value, list | tuple) else [value]

    def synchronize(self) -> None:
        self.wait()
