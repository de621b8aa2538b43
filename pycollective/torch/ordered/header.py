"""What every rank tells all others with a call's data, or before them: what it has called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pycollective.dtypes import DTYPES, REDUCE_OPS
from pycollective.errors import CollectiveMismatch, named
from pycollective.triton.header_check import BYTES, FITS, WORDS

__all__ = ["BYTES", "FITS", "MESSAGE", "ROOM", "WORDS", "Header", "compare", "misfit"]

MESSAGE = 2048  # bytes with which it travels, where all messages must be alike
ROOM = MESSAGE - BYTES
_MAGIC = 0x6F726465726564  # "ordered"
NOT_OF_DEAL = 9  # bits of a deal's digest, of 63, that its header has not
_ON_DEVICE = 1 << 16  # of the word of the narrow type
_DEAL = 8  # the bit of the operation's word from which on it has the deal
_KINDS = ("all_reduce", "reduce_scatter", "prepare", "all_reduce_nodes", "all_gather")
_DTYPES: list[str] = list(DTYPES)
_OPS: list[str] = list(REDUCE_OPS)


@dataclass(slots=True)  # frozen takes three times as long to make
class Header:
    """What a rank has called.

    Attributes:
        number: of the call in its group, from 1.
        kind: one of `_KINDS`.
        dtype, op: as the contract names them.
        count: elements of the input.
        narrow: the type in which leaves may travel, "" for none.
        narrow_check: "host" or "device": who waits to learn whether they fit it.
        fits: whether all of this rank's elements have exactly the narrow type's values. Ranks may
            differ in this alone.
        deal: bits of the digest of that which messages are cut by, where nodes are reduced on
            devices; else 0.
    """

    number: int
    kind: str
    dtype: str = "uint8"
    op: str = "sum"
    count: int = 0
    narrow: str = ""
    narrow_check: str = "host"
    fits: bool = False
    deal: int = 0

    @property
    def words(self) -> tuple[int, ...]:
        """What it is when it travels: numbers of 64 bits."""
        return (
            _MAGIC,
            self.number,
            _KINDS.index(self.kind),
            _DTYPES.index(self.dtype),
            _OPS.index(self.op) + (self.deal << _DEAL),
            self.count,
            self._narrow_word,
            int(self.fits),  # launches tell numbers from tensors by their type
        )

    @property
    def _narrow_word(self) -> int:
        if not self.narrow:
            return -1
        return _DTYPES.index(self.narrow) + _ON_DEVICE * (self.narrow_check == "device")

    @staticmethod
    def read(row: np.ndarray) -> Header | None:
        """What a row says; None where no rank has written it."""
        magic, number, kind, dtype, word, count, narrow, fits = row.view(np.int64).tolist()
        deal, op = divmod(word, 1 << _DEAL)
        known = (
            magic == _MAGIC
            and kind in range(len(_KINDS))
            and dtype in range(len(_DTYPES))
            and op in range(len(_OPS))
            and (narrow == -1 or narrow & ~_ON_DEVICE in range(len(_DTYPES)))
        )
        if not known:
            return None
        called = number, _KINDS[kind], _DTYPES[dtype], _OPS[op], count
        small = _DTYPES[narrow & ~_ON_DEVICE] if narrow >= 0 else ""
        who = "device" if narrow >= 0 and narrow & _ON_DEVICE else "host"
        return Header(*called, small, who, bool(fits), deal)

    def __str__(self) -> str:
        if self.kind == "prepare":
            return f"prepare as call {self.number}"
        how = (
            ' by narrow_check="device"' if self.narrow_check == "device" else " where that is exact"
        )
        narrow = f", as {self.narrow}{how}" if self.narrow else ""
        narrow += f", dealt as {self.deal:x}" if self.deal else ""
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
    first = next(iter(said), rank)  # none, where the backend has ended the first exchange
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


def misfit(rows: Sequence[np.ndarray | None], rank: int) -> CollectiveMismatch:
    """The error of a call that all ranks have made alike, with leaves that do not fit.

    Args:
        rows: as for `compare`; this rank's is there.
        rank: this one.
    """
    headers = [Header.read(row) if row is not None else None for row in rows]
    ranks = [r for r, each in enumerate(headers) if each is not None and not each.fits]
    mine = headers[rank]
    assert mine is not None
    return CollectiveMismatch(
        f"elements of {named(ranks)} are not exactly {mine.narrow}, in {mine}. Results are NaN. "
        'Give narrow_check="host", which looks before elements travel, or narrow=None',
        rank,
        mine.kind,
        mine.number,
    )
