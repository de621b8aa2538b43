"""Tables of segments on a device, and which of a launch's programs has which segment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pycollective import segments
from pycollective.errors import ConfigurationError

Made = TypeVar("Made")

_ADDRESSES = (segments.ADDRESS, segments.HELD, segments.LEFT)
_KEPT = 4096  # tables and what is made of them: some of each bucket, as addresses change by turns

# Columns in kernels: those of `segments`, and the number of the row's first program.
ADDRESS = tl.constexpr(segments.ADDRESS)
DTYPE = tl.constexpr(segments.DTYPE)
COUNT = tl.constexpr(segments.COUNT)
ITEM = tl.constexpr(segments.ITEM)
AT = tl.constexpr(segments.AT)
K = tl.constexpr(segments.K)
HELD = tl.constexpr(segments.HELD)
LEFT = tl.constexpr(segments.LEFT)
ENTRY = tl.constexpr(segments.ENTRY)
FIRST = tl.constexpr(segments.COLUMNS)
COLUMNS = tl.constexpr(segments.COLUMNS + 1)
# Words of what a call finds.
BAD = tl.constexpr(segments.BAD)
DIFFERS = tl.constexpr(segments.DIFFERS)
NONZERO = tl.constexpr(segments.NONZERO)


class Table(NamedTuple):
    """A table on a device.

    Attributes:
        rows: int64, ``(segments, COLUMNS)``.
        row_of: int32, ``(programs,)``: of each program the row of its segment.
        aligned: whether all addresses are multiples of 16.
        dtypes: the numbers in `segments.DTYPES` that the rows have, ascending.
        is_held: whether anything is held.
    """

    rows: torch.Tensor
    row_of: torch.Tensor
    aligned: bool
    dtypes: tuple[int, ...]
    is_held: bool

    @property
    def programs(self) -> int:
        """How many a launch has."""
        return self.row_of.numel()


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, behind the current stream's work; the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class Tables:
    """Uploads tables to a device. The same ones come again: addresses change by turns.

    One stream's; not thread-safe.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
        self._workspaces: dict[str, torch.Tensor] = {}

    def of(self, rows: NDArray[np.int64], programs: NDArray[np.int64]) -> Table:
        """A table whose rows have so many programs each.

        Raises:
            ConfigurationError: it is no table.
        """

        def make() -> Table:
            if rows.dtype != np.int64 or rows.shape[1:] != (segments.COLUMNS,):
                raise ConfigurationError(
                    f"a table has {segments.COLUMNS} columns of int64, not {rows.shape[1:]} of "
                    f"{rows.dtype}"
                )
            dtypes = rows[:, segments.DTYPE]
            if ((dtypes < 0) | (dtypes >= len(segments.DTYPES))).any():
                raise ConfigurationError(f"dtypes in tables are numbers of {segments.DTYPES}")
            firsts = np.cumsum(programs) - programs
            whole = np.concatenate([rows, firsts[:, None]], axis=1)
            row_of = np.repeat(np.arange(len(rows), dtype=np.int32), programs)
            return Table(
                upload(whole, self.device),
                upload(row_of, self.device),
                not (rows[:, _ADDRESSES] % 16).any(),
                tuple(np.unique(dtypes).tolist()),
                bool(rows[:, segments.HELD].any()),
            )

        return self.once((rows.tobytes(), programs.tobytes()), make)

    def numbers(self, array: NDArray[Any]) -> torch.Tensor:
        """Numbers that come again, such as where rows begin."""
        key = array.tobytes(), array.dtype, array.shape
        return self.once(key, lambda: upload(array, self.device))

    def workspace(self, name: str, size: int) -> torch.Tensor:
        """At least `size` zeros of int32. Whoever uses them leaves zeros."""
        kept = self._workspaces.get(name)
        if kept is None or kept.numel() < size:
            kept = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._workspaces[name] = kept
        return kept

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Made]) -> Made:
        """What was made for this key, such as what a table's numbers ask of tensors."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        made: Made = found
        return made


@triton.jit
def row_of_program(rows, row_of):
    """(this program's row, its number among those of the row)."""
    program = tl.program_id(0)
    row = rows + tl.load(row_of + program).to(tl.int64) * COLUMNS
    return row, program - tl.load(row + FIRST)


@triton.jit
def pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A column's address, as a pointer to words of this type."""
    found = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)  # of the number the compiler forgets it
    return found


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of so many to come here: it sees what the others stored.

    The counter, which is 0 at first, is 0 again then.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.atomic_add(counter, -programs, sem="relaxed")
    return last
