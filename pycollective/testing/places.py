"""Places for the arrays of a call: this process's memory, or a GPU's."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from pycollective import _core
from pycollective.communicator import Communicator
from pycollective.testing.device_array import DeviceArray

PLACES = ("cpu", "cuda")


class Place(Protocol):
    """Makes the arrays that a call is given, and reads them once it is done.

    Attributes:
        name: in words; empty for host memory.
        options: given to each call besides.
    """

    name: str
    options: dict[str, Any]

    def copy(self, array: NDArray[Any]) -> Any:
        """Return an array like this one."""

    def read(self, array: Any) -> NDArray[Any]:
        """Return what it holds."""


class Host:
    """NumPy arrays."""

    name = ""
    options: dict[str, Any] = {}  # noqa: RUF012  nobody adds any

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        return array


class Gpu:
    """Arrays of one GPU, on a stream of their own."""

    def __init__(self, device: int, name: str = "") -> None:
        self.device = device
        self.name = name
        self.stream = _core.DeviceStream(device)
        self.options = {"stream": self.stream}

    def new(self, size: int, offset: int = 0) -> DeviceArray:
        """Return an array of `size` bytes; a GPU's do not heed the offset."""
        return DeviceArray((size,), "uint8", self.device, stream=self.stream)

    def copy(self, array: NDArray[Any]) -> DeviceArray:
        return DeviceArray.from_numpy(array, self.device, self.stream)

    def fill(self, array: DeviceArray, values: NDArray[Any]) -> None:
        """Copy all of it, and wait for the end of that."""
        array.write(values)

    def read(self, array: DeviceArray) -> NDArray[Any]:
        return array.to_numpy()


def place_of(name: str, communicator: Communicator) -> Place:
    """Return the place of that name on this rank; collective.

    The ranks of a host take its GPUs in turn. Where they can, the communicator's calls are carried
    out there.

    Raises:
        ConfigurationError: there is no GPU.
    """
    if name == "cpu":
        return Host()
    communicator.use_device(name)
    assert communicator.device is not None  # it has just been given
    path, reason = communicator.device_path
    return Gpu(communicator.device, f"GPU {communicator.device}, device path {path!r} ({reason})")
