"""A gradient as codecs see it: a flat array of NumPy or torch, changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.errors import ConfigurationError
from pycollective.segments import (
    ADDRESS,
    AT,
    COLUMNS,
    COUNT,
    DTYPE,
    DTYPES,
    ENTRY,
    HELD,
    ITEM,
    LEFT,
    K,
)

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
WHAT = "a gradient to compress"  # in errors
_SIZES = np.array([4, 2, 2])  # of the types of elements


class Flat(Protocol):
    """A flat array of fp32, fp16 or bf16.

    Attributes:
        address: of the first element.
        count: elements.
        dtype: the number of their type in `segments.DTYPES`.
        array: all of them, flat.
    """

    address: int
    count: int
    dtype: int
    array: Any


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class FlatArray:
    """A C-contiguous NumPy array."""

    def __init__(self, array: NDArray[Any], written: bool = True) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.name not in DTYPES:
            kind = getattr(array, "dtype", type(array).__name__)
            raise ConfigurationError(
                f"a gradient to compress is a NumPy array of {', '.join(DTYPES)}, not {kind}"
            )
        if not array.flags.c_contiguous or (written and not array.flags.writeable):
            raise ConfigurationError("a gradient to compress must be C-contiguous and writable")
        self.array = array.reshape(-1)
        self.address, self.count, self.dtype = _core.flat_floats(array, WHAT, written)


class Window:
    """A part of a `Flat`, as one."""

    def __init__(self, flat: Flat, start: int, stop: int) -> None:
        self.address = flat.address + start * int(_SIZES[flat.dtype])
        self.count, self.dtype = stop - start, flat.dtype
        self.array = flat.array[start:stop]


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
    flat: Flat
    uncompressed: bool
    owner: tuple[int, int] | None = None


class Elements(NamedTuple):
    """Where the elements of a call's parameters lie.

    Attributes:
        addresses: of each parameter's element 0, wherever those are that there are.
        dtypes: as `Flat` has them.
        kept: the array that holds them, if nobody else keeps it.
    """

    addresses: Numbers
    dtypes: Numbers
    kept: Any = None

    @classmethod
    def of(cls, flats: Sequence[Flat]) -> Elements:
        """Those of whole gradients."""
        both = np.array([(flat.address, flat.dtype) for flat in flats], np.int64).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1])

    @classmethod
    def of_sums(cls, array: Any, address: int, places: Numbers) -> Elements:
        """fp32 numbers of each parameter in one array: so many bytes from its begin on."""
        return cls(address + places, np.zeros_like(places), array)


class Errors(NamedTuple):
    """Where the residuals of a call's parameters lie, as `Elements`.

    Attributes:
        held, left: addresses of the old and the new ones' element 0; 0 of an old one: none is held.
        kept: the arrays.
    """

    held: Numbers
    left: Numbers
    kept: Sequence[Any]


class Segments:
    """The segments of some messages, without addresses: those are another call's each time.

    Args:
        items: the parameter of each in the call.
        starts, stops: its elements.
        ats, ks, entries: see `pycollective.segments`.
    """

    def __init__(
        self,
        items: Numbers,
        starts: Numbers,
        stops: Numbers,
        ats: Numbers,
        ks: Numbers | int = 0,
        entries: Numbers | int = 0,
    ) -> None:
        self.items, self.starts = items, starts
        self._rows = np.zeros((len(items), COLUMNS), np.int64)
        for column, each in (
            *((ITEM, items), (COUNT, stops - starts), (AT, ats)),
            *((K, ks), (ENTRY, entries)),
        ):
            self._rows[:, column] = each

    @classmethod
    def joined(cls, parts: Sequence[Segments]) -> Segments:
        """The segments of some messages, as one."""
        made = parts[0] if len(parts) == 1 else cls.__new__(cls)
        if len(parts) > 1:
            made.items, made.starts, made._rows = (
                np.concatenate([getattr(each, name) for each in parts])
                for name in ("items", "starts", "_rows")
            )
        return made

    def __len__(self) -> int:
        return len(self._rows)

    def table(self, elements: Elements, errors: Errors | None = None) -> NDArray[np.int64]:
        """The table, of elements and residuals that lie there."""
        rows = self._rows.copy()
        dtypes = elements.dtypes[self.items]
        rows[:, DTYPE] = dtypes
        rows[:, ADDRESS] = elements.addresses[self.items] + self.starts * _SIZES[dtypes]
        if errors is not None:
            places = 4 * self.starts
            held = errors.held[self.items]
            rows[:, HELD] = np.where(held != 0, held + places, 0)
            rows[:, LEFT] = errors.left[self.items] + places
        return rows


def whole(flats: Sequence[Flat]) -> NDArray[np.int64]:
    """A table of whole arrays."""
    counts = np.array([flat.count for flat in flats], np.int64)
    every = np.arange(len(flats))
    return Segments(every, np.zeros_like(counts), counts, np.zeros_like(counts)).table(
        Elements.of(flats)
    )
