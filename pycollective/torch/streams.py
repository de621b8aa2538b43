"""Calls on a device: on a stream of their own, behind what the caller's stream has been given."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pycollective.errors import CollectiveTimeout, ConfigurationError

_LONGEST_SLEEP = 1e-3  # seconds


def wait_for(event: Any, limit: float, what: str) -> None:
    """Let the host wait for an event of a device.

    Args:
        event: of its module's.
        limit: seconds.
        what: is waited for, in the error.

    Raises:
        CollectiveTimeout: the device has not come to it in time. Nothing is lost: wait again.
    """
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited > limit:
            raise CollectiveTimeout(
                f"{what}: the device has not ended it after {limit:g} s. A rank has not made the "
                "call or has died, or the device is busy with something else"
            )
        time.sleep(min(waited / 8, _LONGEST_SLEEP))  # an eighth longer than needed, at most


class Streams:
    """The stream of a device on which calls run, one after another, before others' work.

    Args:
        device: with its number.
        whose: makes the calls, in errors.
    """

    def __init__(self, device: torch.device, whose: str) -> None:
        self._device, self._whose = device, whose
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device, priority=-1)

    def behind_caller(self, *tensors: torch.Tensor) -> AbstractContextManager[Any]:
        """Run the block's work behind what the caller's stream has been given.

        Args:
            tensors: those whose memory the caller may let go of meanwhile.

        Raises:
            ConfigurationError: the stream captures a graph, whose replays would tell old headers.
        """
        if getattr(self._module, "is_current_stream_capturing", bool)():
            raise ConfigurationError(
                f"{self._whose}: a graph cannot capture these calls; make them outside of the "
                "capture"
            )
        self._stream.wait_stream(self._module.current_stream(self._device))
        for each in tensors:
            each.record_stream(self._stream)
        return self.entered()

    def entered(self) -> AbstractContextManager[Any]:
        """Make it the current stream in a block, and wait for nothing."""
        found: AbstractContextManager[Any] = self._module.stream(self._stream)
        return found

    def on_device(self) -> AbstractContextManager[Any]:
        """Make its device the current one in a block."""
        found: AbstractContextManager[Any] = self._module.device(self._device)
        return found

    def join_caller(self) -> None:
        """Let the caller's stream wait for all that runs here."""
        self._module.current_stream(self._device).wait_stream(self._stream)

    def let_caller_wait(self, event: Any) -> None:
        """Let the caller's stream wait for an event."""
        self._module.current_stream(self._device).wait_event(event)

    def event(self) -> Any:
        """An event behind what the current stream has been given."""
        event = self._module.Event()
        event.record()
        return event


def ignore_captures() -> None:
    """Let this thread ask CUDA devices while another captures a graph, as NCCL's watchdog does."""
    with contextlib.suppress(OSError):  # no CUDA
        thread_local = ctypes.c_int(1)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))


def streams_of(device: torch.device, whose: str) -> Streams | None:
    """The stream of calls on a device; None on CPUs."""
    return None if device.type == "cpu" else Streams(device, whose)


def issue(
    streams: Streams,
    device: torch.device,
    call: Callable[[], None],
    result: Any,
    tensors: Sequence[torch.Tensor],
) -> torch.futures.Future[Any]:
    """Make a call on the stream, behind the caller's work.

    Args:
        streams: of the device.
        device: where the call's tensors are.
        call: issues the work. If it raises, the caller's stream waits for what was issued.
        result: of the future.
        tensors: those that the call uses.

    Returns:
        A future whose waiters wait in their streams, and the host does not.
    """
    future: torch.futures.Future[Any]
    future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    begun = False
    try:
        with streams.behind_caller(*tensors):
            begun = True
            call()
            future.set_result(result)
    except BaseException:
        if begun:  # a capture that is refused must not wait for what runs outside of it
            streams.join_caller()
        raise
    return future
