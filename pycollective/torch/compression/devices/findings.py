"""What the host is to know of a call, and learns once the device has made it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pycollective.compression.groups import Bytes
from pycollective.errors import CollectiveTimeout
from pycollective.torch.streams import Streams

Learn = Callable[[], bool]
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


class Findings:
    """Bytes on a device, each part with what the host does about it when it has them.

    They go to pinned memory behind the call's work, in one copy.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, Callable[[Bytes], bool]]] = []

    def add(self, part: torch.Tensor, read: Callable[[Bytes], bool]) -> None:
        """Add a part, and what says of it, on the host, whether all was finite; it may raise."""
        self._parts.append((part, read))

    def append(self, others: Findings) -> None:
        """Add another call's."""
        self._parts += others._parts

    def send(self, streams: Streams, wait: Callable[[Any], None]) -> Learn:
        """Start the copy behind the current stream's work.

        Args:
            streams: of the device.
            wait: lets the host wait for an event; it may raise.

        Returns:
            What waits for the copy, and says whether all was finite. It raises what a part's `read`
            raises. It may be called again.
        """
        whole = torch.cat([part.reshape(-1) for part, _ in self._parts])
        there = whole.to("cpu", non_blocking=True, copy=True)
        event = streams.event()
        reads = [(part.shape, part.numel(), read) for part, read in self._parts]

        def learn() -> bool:
            wait(event)
            found, at, finite = there.numpy(), 0, True
            for shape, size, read in reads:
                finite &= read(found[at : at + size].reshape(tuple(shape)))
                at += size
            return finite

        return learn
