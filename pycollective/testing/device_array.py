"""Arrays in a GPU's memory, for tests, the benchmark and `verify`.

They have no arithmetic. An array can be filled from NumPy, read back, sliced, and given to
collectives as CuPy's or torch's are, through DLPack or ``__cuda_array_interface__``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.dtypes import TRAITS, numpy_type
from pycollective.errors import ConfigurationError

_CUDA = 2  # DLPack's number of the kind of device
_LEGACY = 1  # how the interface calls the legacy stream, which has the handle 0
_WAIT = 60.0  # seconds, for a stream's work before another reads what it writes


def storage_type(dtype: str) -> np.dtype[Any]:
    """Return NumPy's type for one of the core's; unsigned words where ml_dtypes is missing."""
    try:
        return numpy_type(dtype)
    except ConfigurationError:
        return np.dtype(f"u{TRAITS[dtype].size}")


class DeviceArray:
    """A C-contiguous array of `shape` in `memory`, from byte `offset` on, of any alignment.

    Whoever puts work on a stream that touches it says so by `stream`, a `_core.DeviceStream` or a
    handle: reads, writes and consumers come after it. None: all work on it is done.

    Raises:
        ConfigurationError: an unknown dtype, or the memory does not hold it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        device: int = 0,
        memory: _core.DeviceMemory | None = None,
        offset: int = 0,
        stream: _core.DeviceStream | int | None = None,
    ) -> None:
        if dtype not in TRAITS:
            raise ConfigurationError(f"unknown dtype {dtype!r}; there are {', '.join(TRAITS)}")
        self.shape = tuple(shape)
        self.dtype = dtype
        self.size = math.prod(self.shape)
        self.itemsize = TRAITS[dtype].size
        self.nbytes = self.size * self.itemsize
        self.memory = memory or _core.DeviceMemory(device, offset + self.nbytes)
        self.device = self.memory.device
        self.offset = offset
        self.stream = stream
        if min(self.shape, default=0) < 0 or offset < 0:
            raise ConfigurationError(f"shape {self.shape} from byte {offset} on: not below 0")
        if offset + self.nbytes > self.memory.nbytes:
            raise ConfigurationError(
                f"{self.nbytes} bytes from {offset} on are more than the memory's "
                f"{self.memory.nbytes}"
            )

    @classmethod
    def from_numpy(
        cls,
        array: NDArray[Any],
        device: int = 0,
        stream: _core.DeviceStream | int | None = None,
        *,
        dtype: str | None = None,
        offset: int = 0,
    ) -> DeviceArray:
        """A copy on GPU `device`, `offset` bytes into an allocation of its own.

        `dtype` names the elements where the array holds only their words.
        """
        made = cls(array.shape, dtype or array.dtype.name, device, None, offset, stream)
        made.write(array)
        return made

    @property
    def address(self) -> int:
        """The device address of the first element."""
        return self.memory.address + self.offset

    def write(self, array: NDArray[Any]) -> None:
        """Copy all of it from an array with as many elements of the same size."""
        if array.size != self.size or array.itemsize != self.itemsize:
            raise ConfigurationError(
                f"{array.size} elements of {array.itemsize} bytes into {self.size} of "
                f"{self.itemsize}"
            )
        bytes_ = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.memory.write(bytes_.data, self.offset, self._handle())

    def to_numpy(self) -> NDArray[Any]:
        """A copy on the host, of `storage_type`."""
        read = self.memory.read(self.offset, self.nbytes, self._handle())
        return np.frombuffer(bytearray(read), storage_type(self.dtype)).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: slice) -> DeviceArray:
        """A view of neighbouring elements of a 1-D array."""
        if len(self.shape) != 1 or not isinstance(where, slice):
            raise ConfigurationError("slices of 1-D arrays alone")
        start, stop, step = where.indices(self.size)
        if step != 1:
            raise ConfigurationError("a slice without steps")
        offset = self.offset + start * self.itemsize
        count = max(0, stop - start)
        return DeviceArray((count,), self.dtype, self.device, self.memory, offset, self.stream)

    def __setitem__(self, where: slice, values: DeviceArray | NDArray[Any]) -> None:
        self[where].write(values.to_numpy() if isinstance(values, DeviceArray) else values)

    def view(self, dtype: str) -> DeviceArray:
        """Return the same bytes of a 1-D array as elements of another type."""
        if dtype not in TRAITS or len(self.shape) != 1 or self.nbytes % TRAITS[dtype].size:
            raise ConfigurationError(f"{self.nbytes} bytes are no 1-D array of {dtype}")
        count = self.nbytes // TRAITS[dtype].size
        return DeviceArray((count,), dtype, self.device, self.memory, self.offset, self.stream)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("it hands over its own memory alone, where it lies")
        # The consumer's stream has nothing to wait for where all work is done.
        mine = self._handle()
        theirs = 0 if stream in (None, _LEGACY) else stream
        if self.stream is not None and theirs != -1 and theirs != mine:
            self._finish()
        versioned = max_version is not None and max_version >= (1, 0)
        return self.memory.capsule(self.offset, self.shape, self.dtype, versioned)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not TRAITS[self.dtype].in_numpy:
            raise AttributeError(f"the interface has no name for {self.dtype}; DLPack has")
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": None,
            "stream": None if self.stream is None else self._handle() or _LEGACY,
        }

    def _handle(self) -> int:
        if isinstance(self.stream, _core.DeviceStream):
            return self.stream.handle
        return 0 if self.stream in (None, _LEGACY) else int(self.stream)

    def _finish(self) -> None:
        if isinstance(self.stream, _core.DeviceStream):
            self.stream.synchronize(_WAIT)
        elif self.nbytes:
            self.memory.read(self.offset, 1, self._handle())  # comes after all that is on it
