"""A gradient as codecs see it: a flat array of NumPy or torch, changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective.errors import ConfigurationError

Floats = NDArray[np.float32]


class Readable(Protocol):
    """A flat array of `count` elements of fp32, fp16 or bf16."""

    count: int

    def part(self, start: int, stop: int) -> Any:
        """A view of some elements, such as the native kernels take."""
        ...

    def widen(self, start: int, stop: int, out: Floats) -> None:
        """Copy some elements to fp32, exactly."""
        ...


class Flat(Readable, Protocol):
    """A flat array that may be written."""

    def put(self, start: int, values: Floats) -> None:
        """Overwrite elements from `start` on, each rounded once."""
        ...

    def fill(self, value: float) -> None:
        """Overwrite all elements."""
        ...

    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        ...

    def is_zero(self) -> bool:
        """Whether all elements are zero."""
        ...

    @property
    def narrow(self) -> bool:
        """Whether elements have 16 bits: what is finite in fp32 may not be in them."""
        ...


class FlatArray:
    """A C-contiguous NumPy array."""

    DTYPES = ("float32", "float16", "bfloat16")

    def __init__(self, array: NDArray[Any], written: bool = True) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.name not in self.DTYPES:
            kind = getattr(array, "dtype", type(array).__name__)
            raise ConfigurationError(
                f"a gradient to compress is a NumPy array of {', '.join(self.DTYPES)}, not {kind}"
            )
        if not array.flags.c_contiguous or (written and not array.flags.writeable):
            raise ConfigurationError("a gradient to compress must be C-contiguous and writable")
        self._array = array.reshape(-1)
        self.count = array.size

    def part(self, start: int, stop: int) -> NDArray[Any]:
        return self._array[start:stop]

    def widen(self, start: int, stop: int, out: Floats) -> None:
        out[:] = self._array[start:stop]

    def put(self, start: int, values: Floats) -> None:
        with np.errstate(over="ignore"):
            self._array[start : start + values.size] = values

    def fill(self, value: float) -> None:
        self._array[:] = value

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._array).all())

    def is_zero(self) -> bool:
        return not self._array.any()

    @property
    def narrow(self) -> bool:
        return self._array.itemsize == 2


class Window:
    """A part of a `Flat`, as one."""

    def __init__(self, flat: Readable, start: int, stop: int) -> None:
        self._flat, self._start = flat, start
        self.count = stop - start

    def part(self, start: int, stop: int) -> Any:
        return self._flat.part(self._start + start, self._start + stop)

    def widen(self, start: int, stop: int, out: Floats) -> None:
        self._flat.widen(self._start + start, self._start + stop, out)


@dataclass(frozen=True)
class Item:
    """One parameter's gradient in a call, or a shard of it.

    Attributes:
        name: of the parameter; its residual is kept by it.
        flat: the gradient; the average takes its place.
        uncompressed: whether it is sent as it is, such as a small parameter's.
        owner: the local shard and the host that get its average; None for all of them.
    """

    name: str
    flat: Any  # a Flat; of a shard, whose average goes elsewhere, a Readable
    uncompressed: bool
    owner: tuple[int, int] | None = None
