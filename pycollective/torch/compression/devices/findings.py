"""What the host is to know of a call, and learns once the device has made it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pycollective.compression.groups import Bytes
from pycollective.torch.ordered.group import Streams

Learn = Callable[[], bool]


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

    def send(self, streams: Streams) -> Learn:
        """Start the copy behind the current stream's work.

        Returns:
            What waits for the copy, and says whether all was finite. It raises what a part's `read`
            raises.
        """
        whole = torch.cat([part.reshape(-1) for part, _ in self._parts])
        there = whole.to("cpu", non_blocking=True, copy=True)
        event = streams.event()
        reads = [(part.shape, part.numel(), read) for part, read in self._parts]

        def learn() -> bool:
            event.synchronize()
            found, at, finite = there.numpy(), 0, True
            for shape, size, read in reads:
                finite &= read(found[at : at + size].reshape(tuple(shape)))
                at += size
            return finite

        return learn
