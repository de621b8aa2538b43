"""Where the arrays of a call lie: in this process's memory, or in a GPU's."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from pycollective import _core
from pycollective.communicator import Communicator
from pycollective.gpu.array import DeviceArray

PLACES = ("cpu", "cuda")


class Place(Protocol):
    """Makes the arrays that a call is given, and reads them once it is done.

    Attributes:
        name: in words; empty for what needs none.
        options: which a call is given besides.
    """

    name: str
    options: dict[str, Any]

    def copy(self, array: NDArray[Any]) -> Any:
        """An array like it."""

    def read(self, array: Any) -> NDArray[Any]:
        """What it holds."""


class Host:
    """NumPy arrays."""

    name = ""
    options: dict[str, Any] = {}  # noqa: RUF012  nobody adds any

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """See `Place`."""
        return array.copy()

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        """See `Place`."""
        return array


class Gpu:
    """Arrays of one GPU, on a stream of their own."""

    def __init__(self, device: int, way: tuple[str, str]) -> None:
        name, reason = way
        self.name = f"GPU {device}, by way {name!r} ({reason})"
        self._device = device
        self._stream = _core.DeviceStream(device)
        self.options = {"stream": self._stream}

    def copy(self, array: NDArray[Any]) -> DeviceArray:
        """See `Place`."""
        return DeviceArray.from_numpy(array, self._device, self._stream)

    def read(self, array: DeviceArray) -> NDArray[Any]:
        """See `Place`."""
        return array.to_numpy()


def place_of(name: str, communicator: Communicator) -> Place:
    """The place of that name, on this rank: ranks of a host take its GPUs in turn, and where they
    can the communicator's calls are carried out there. Collective.

    Raises:
        ConfigurationError: there is no GPU.
    """
    if name == "cpu":
        return Host()
    communicator.use_device(name)
    assert communicator.device is not None  # it has just been given
    return Gpu(communicator.device, communicator.way)
