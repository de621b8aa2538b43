"""Where a rank's buffer lies: in this process's memory, or in a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .case import Bytes

if TYPE_CHECKING:
    from pycollective.gpu.array import DeviceArray

_PAGE = 4096  # that a buffer starts at one, is one thing less that could differ


class Buffers(Protocol):
    """Makes a rank's buffers, fills them, and reads them."""

    def new(self, size: int) -> Any:
        """One of `size` bytes, of which slices are views."""

    def fill(self, buffer: Any, initial: Bytes) -> None:
        """Copy all of it, and be done."""

    def read(self, buffer: Any) -> Bytes:
        """What it holds."""


class HostBuffers:
    """NumPy arrays."""

    def new(self, size: int) -> Bytes:
        """See `Buffers`; zeroed."""
        raw = np.zeros(size + _PAGE, np.uint8)
        start = -raw.ctypes.data % _PAGE
        return raw[start : start + size]

    def fill(self, buffer: Bytes, initial: Bytes) -> None:
        """See `Buffers`."""
        np.copyto(buffer, initial)

    def read(self, buffer: Bytes) -> Bytes:
        """See `Buffers`."""
        return buffer


class DeviceBuffers:
    """Arrays in the memory of GPU `device`, on a stream of their own."""

    def __init__(self, rank: int) -> None:
        from pycollective import _core
        from pycollective.gpu.way import number_of

        self.device = number_of("cuda", rank)
        self.stream = _core.DeviceStream(self.device)

    def new(self, size: int) -> DeviceArray:
        """See `Buffers`."""
        from pycollective.gpu.array import DeviceArray

        return DeviceArray((size,), "uint8", self.device, stream=self.stream)

    def fill(self, buffer: DeviceArray, initial: Bytes) -> None:
        """See `Buffers`."""
        buffer.write(initial)

    def read(self, buffer: DeviceArray) -> Bytes:
        """See `Buffers`."""
        return buffer.to_numpy()
