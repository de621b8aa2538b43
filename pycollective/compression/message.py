"""One call: its messages' headers, and what is found in it.

A rank that has read what does not fit sends damaged digests from then on. So all ranks find out,
though no host may look before the call has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.groups import Group
from pycollective.compression.header import Agreement, header_bytes
from pycollective.compression.kernels import Kernels
from pycollective.errors import CollectiveMismatch
from pycollective.segments import BAD, DIFFERS, heads_at, zero_at

Found = NDArray[np.int32]
Numbers = NDArray[np.int64]


class Learning(Protocol):
    """When the host learns what a call has found.

    Attributes:
        at_once: whether it may look at any time; else when the next step begins.
    """

    at_once: bool

    def send(self, found: Any, what: str) -> Callable[[], Found]:
        """Start bringing what a call has found to the host.

        Args:
            found: of the call.
            what: the call is, in errors.

        Returns:
            What waits for it, and returns it; it may be called again.
        """
        ...

    def looking(self) -> AbstractContextManager[None]:
        """Within it the host does what follows from what was found."""
        ...

    def finish(self, what: str) -> None:
        """Wait until all calls have ended."""
        ...


@dataclass(frozen=True)
class _Heads:
    """Headers that came: where they are in what was found, and whose they are."""

    at: int
    senders: Sequence[int]


class Call:
    """One call, and what this rank finds in it.

    Args:
        kernels: that make it.
        learning: when the host learns.
        agreement: what all its messages say.
        heads: how many headers will be read.
        sizes: of its messages, bytes.
        items: parameters of the call, where its messages do not name all.
        ranks: whose verdicts `hear` will gather; 0: none.

    Attributes:
        agreement: as given.
        found: see `pycollective.segments`.
        messages: of these sizes, bytes that are zero.
        sent: bytes that this rank handed over for other hosts; None for a dense call, whose bytes
            are the backend's affair.
    """

    def __init__(
        self,
        kernels: Kernels,
        learning: Learning,
        agreement: Agreement,
        heads: int,
        sizes: Sequence[int] = (),
        items: int | None = None,
        ranks: int = 0,
    ) -> None:
        self._kernels, self._learning, self.agreement = kernels, learning, agreement
        self._items = agreement.items if items is None else items
        self._header = header_bytes(agreement.items)
        self._next = heads_at(self._items)
        self._told_at = -(-(self._next + heads * self._header) // 4)
        self._told_by = 0
        self.found, self.messages = kernels.memory(self._told_at + 2 * ranks, sizes)
        self._heads: list[_Heads] = []
        self._came: list[tuple[Any, Numbers, int]] = []
        self.sent: int | None = None

    def note(self, buffer: Any, offsets: Numbers, senders: Sequence[int]) -> None:
        """Let the next `headers` read those of messages.

        Args:
            buffer: bytes that hold them, flat.
            offsets: where each begins.
            senders: whose they are.
        """
        self._came.append((buffer, offsets, self._next))
        self._heads.append(_Heads(self._next, senders))
        self._next += len(offsets) * self._header

    def headers(self, write: Any = None, means: bool = False) -> None:
        """Read the headers that were noted, and begin messages with one that says what is found.

        Args:
            write: messages, (rows, bytes); None: read only.
            means: whether the last headers that were noted are of all hosts: what all of them call
                zero is found to be, and `write` is told that.

        Raises:
            CollectiveMismatch: ranks differ, and the host looks at once.
        """
        self._kernels.headers(self.found, self.agreement, self._came, write, means)
        self._came = []
        if self._learning.at_once:
            self.check(self.found)

    def look(self) -> None:
        """Read the headers that were noted, where the host looks at once.

        Raises:
            CollectiveMismatch: ranks differ.
        """
        if self._learning.at_once:
            self.headers()

    def release(self) -> None:
        """Let go of its memory; only `check` and `all_zero` are called from then on."""
        self.found, self.messages = None, []

    def hear(self, group: Group) -> None:
        """Find what any rank of a group has found: whether all is finite, and whether ranks differ.

        Raises:
            CollectiveMismatch: this rank has read what does not fit, and the host looks at once.
        """
        if self._learning.at_once:
            self.check(self.found)
        rows = group.all_gather(self._kernels.verdict(self.found))
        self._kernels.join(self.found, rows, self._told_at)
        self._told_by = group.size

    def check(self, found: Found) -> bool:
        """Whether all was finite.

        Args:
            found: `found`, on the host.

        Raises:
            CollectiveMismatch: ranks differ, or a message was damaged.
        """
        if found[DIFFERS]:
            told = found.view(np.uint8)
            for heads in self._heads:
                for row, sender in enumerate(heads.senders):
                    at = heads.at + row * self._header
                    self.agreement.check(told[at : at + self._header], sender)
            ends = self._told_at + 2 * self._told_by
            if ranks := np.flatnonzero(found[self._told_at + DIFFERS : ends : 2]).tolist():
                raise CollectiveMismatch(
                    f"compressed exchange: rank(s) {ranks} have read what does not fit"
                )
            raise CollectiveMismatch("compressed exchange: a damaged message")
        return not found[BAD]

    def all_zero(self, found: Found) -> NDArray[np.int64]:
        """The parameters that are all zero on all hosts."""
        first = zero_at(self._items)
        return np.flatnonzero(found[first : first + self._items])


class AtOnce:
    """The host's own memory: it may look at any time."""

    at_once = True

    def send(self, found: Found, what: str) -> Callable[[], Found]:
        return lambda: found

    def looking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, what: str) -> None: ...
