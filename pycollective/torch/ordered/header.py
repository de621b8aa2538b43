"""What every rank tells all others before a call's data: what it called, and data that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pycollective.dtypes import DTYPES, REDUCE_OPS
from pycollective.errors import CollectiveMismatch

WORDS = 8
BYTES = 8 * WORDS
MESSAGE = 2048  # bytes with which it travels, where all messages must be alike
ROOM = MESSAGE - BYTES
_MAGIC = 0x6F726465726564  # "ordered"
_KINDS = ("all_reduce", "reduce_scatter", "prepare")
_DTYPES: list[str] = list(DTYPES)
_OPS: list[str] = list(REDUCE_OPS)


@dataclass(frozen=True)
class Header:
    """What a rank has called.

    Attributes:
        number: of the call in its group, from 1.
        kind: one of `_KINDS`.
        dtype, op: as the contract names them.
        count: elements of the input.
        narrow: the type in which leaves may travel, "" for none.
        fits: whether all of this rank's elements have exactly the narrow type's values. Ranks may
            differ in this alone.
    """

    number: int
    kind: str
    dtype: str = "uint8"
    op: str = "sum"
    count: int = 0
    narrow: str = ""
    fits: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """What it is when it travels: numbers of 64 bits."""
        return (
            _MAGIC,
            self.number,
            _KINDS.index(self.kind),
            _DTYPES.index(self.dtype),
            _OPS.index(self.op),
            self.count,
            _DTYPES.index(self.narrow) if self.narrow else -1,
            self.fits,
        )

    @staticmethod
    def read(row: np.ndarray) -> Header | None:
        """What a row says; None where no rank has written it."""
        magic, number, kind, dtype, op, count, narrow, fits = row.view(np.int64).tolist()
        known = (
            magic == _MAGIC
            and kind in range(len(_KINDS))
            and dtype in range(len(_DTYPES))
            and op in range(len(_OPS))
            and narrow in range(-1, len(_DTYPES))
        )
        if not known:
            return None
        small = _DTYPES[narrow] if narrow >= 0 else ""
        return Header(number, _KINDS[kind], _DTYPES[dtype], _OPS[op], count, small, bool(fits))

    def __str__(self) -> str:
        if self.kind == "prepare":
            return f"prepare as call {self.number}"
        narrow = f", as {self.narrow} where that is exact" if self.narrow else ""
        return f"{self.kind} of {self.count} {self.dtype} ({self.op}{narrow}) as call {self.number}"


def compare(
    rows: Sequence[np.ndarray | None], rank: int, results: str = "No data were used"
) -> bool:
    """Compare what ranks have called.

    Args:
        rows: each rank's, of `BYTES` bytes; None for one that has not said it.
        rank: this one.
        results: what has become of them if ranks differ, for the error.

    Returns:
        Whether the leaves of all ranks fit the narrow type.

    Raises:
        CollectiveMismatch: names the first rank that differs from the first, and what both called.
    """
    headers = {r: Header.read(row) for r, row in enumerate(rows) if row is not None}
    said = {r: str(each or "nothing that can be read") for r, each in headers.items()}
    first = next(iter(said))
    for other, each in said.items():
        if each != said[first]:
            mine = headers[rank]
            raise CollectiveMismatch(
                f"ranks called different operations: rank {first} called {said[first]}, rank "
                f"{other} {each}. {results}. All ranks of a group make the same calls in the same "
                "order",
                rank,
                mine.kind if mine is not None else "",
                mine.number if mine is not None else 0,
            )
    return all(each is not None and each.fits for each in headers.values())
