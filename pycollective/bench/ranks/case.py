"""A case to measure, the buffers for it, and the interface of each library's adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PAGE = 4096


class Unsupported(Exception):
    """The library cannot do this; the message says why, and the table prints n/a."""


@dataclass(frozen=True)
class Case:
    """One operation on one message.

    Attributes:
        operation: of `bench.operations.OPERATIONS`.
        dtype: NumPy's name of the element type, or bfloat16.
        item_size: bytes an element.
        reduce_op: sum, avg, prod, min, max, band, bor, bxor; "" where nothing is reduced.
        root: of broadcast, gather and scatter; else 0.
        size: bytes of the whole message: what `Problem` calls its size.
        algorithm: for the library's own ranks; peers choose for themselves.
        offsets: bytes behind a page at which the buffer of each rank begins: the ranks take these
            in turn. The same for all libraries.
    """

    operation: str
    dtype: str
    item_size: int
    reduce_op: str
    root: int
    size: int
    algorithm: str = "auto"
    offsets: Sequence[int] = (16,)

    @property
    def buffer(self) -> int:
        """The bytes of a rank's buffer: the message, and of all-to-all behind it what comes."""
        return self.size * (2 if self.operation == "all_to_all" else 1)

    def shard(self, rank: int, ranks: int) -> slice:
        """Return the bytes of `rank`'s shard."""
        step = self.size // ranks
        return slice(rank * step, (rank + 1) * step)

    def result(self, rank: int, ranks: int) -> slice:
        """Return the bytes of the buffer that are compared at the end.

        Those of `rank`'s result, or, where it has none, of its input, which must stay as it was.
        """
        if self.operation == "all_to_all":
            return slice(self.size, 2 * self.size)
        whole = {"reduce_scatter": False, "gather": rank == self.root, "scatter": rank == self.root}
        return slice(0, self.size) if whole.get(self.operation, True) else self.shard(rank, ranks)

    def expected(self, rows: Bytes, rank: int) -> Bytes:
        """Return what must be there then; `rows` are those of the `Problem`."""
        *initial, answer = rows
        if self.operation == "all_to_all":
            return np.concatenate([row[self.shard(rank, len(initial))] for row in initial])
        return answer[self.result(rank, len(initial))]


def _done() -> None:
    """Nothing is left to be waited for."""


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        call: performs the operation once, in place (all-to-all from one half of the buffer into
            the other), and blocks until it is done, or on a GPU until it is handed over.
        result: where what is compared then lies, in the rank's buffer.
        time: performs it `n` times without Python in the loop, and returns seconds; None where
            `call` is to be timed in a Python loop.
        finish: blocks until all calls are done, where `call` does not.
        sent: bytes that this rank has sent to other hosts so far, and what they would have been
            unpacked; None where nobody counts.
    """

    call: Callable[[], Any]
    result: Any
    time: Callable[[int], float] | None = None
    sent: Callable[[], tuple[int, int]] | None = None
    finish: Callable[[], Any] = _done


class Buffers(Protocol):
    """Makes a rank's buffers, fills them, and reads them; on GPUs `testing.places.Gpu`."""

    def new(self, size: int, offset: int) -> Any:
        """Return a buffer of `size` bytes, of which slices are views.

        In host memory that the ranks do not share it begins `offset` bytes behind a page.
        """

    def fill(self, buffer: Any, initial: Bytes) -> None:
        """Copy all of it, and wait for the end of that."""

    def read(self, buffer: Any) -> Bytes:
        """Return what it holds."""


class HostBuffers:
    """NumPy arrays."""

    def new(self, size: int, offset: int) -> Bytes:
        raw = np.zeros(size + PAGE, np.uint8)
        start = (offset - raw.ctypes.data) % PAGE
        return raw[start : start + size]

    def fill(self, buffer: Bytes, initial: Bytes) -> None:
        np.copyto(buffer, initial)

    def read(self, buffer: Bytes) -> Bytes:
        return buffer


class Library(Protocol):
    """One library, in one rank."""

    rank: int
    ranks: int
    versions: dict[str, str]

    def prepare(self, case: Case, variant: str, buffer: Any) -> Prepared:
        """Make the call for `case` on `buffer`, `case.buffer` bytes that `Buffers` has made.

        Raises:
            Unsupported: the library has no such operation or type.
        """

    def close(self) -> None:
        """Leave the group."""
