"""What the native engine asks of a transport between hosts."""

from __future__ import annotations

from typing import Protocol

# (kind of failure, rank that reports it, its account); kinds as in csrc/engine/api.h
Notice = tuple[int, int, str]


class Pump(Protocol):
    """Moves messages between this rank and those of other hosts; one for a communicator.

    Thread-safe. Messages from one rank to another with one tag arrive in
    the order of the calls. No call waits. An exception fails the communicator.
    """

    transport: str  # its name, as a user knows it

    def isend(self, rank: int, tag: int, data: memoryview) -> int:
        """Begin to send; the memory stays as it is until the ticket that is returned is done."""

    def irecv(self, rank: int, tag: int, data: memoryview) -> int:
        """Begin to receive exactly ``len(data)`` bytes into `data`."""

    def poll(self) -> tuple[list[int], list[Notice]] | None:
        """Let transfers go on: the tickets done since the last time, and failures told by others.

        None where there is nothing of either.
        """

    def ring_with(self, bell: object) -> bool:
        """Ring this bell (a capsule, for native code) whenever `poll` has something to tell.

        Whether it will: False where nothing wakes the pump itself.
        """

    def give_up(self, tickets: list[int]) -> None:
        """Leave the memory of these tickets alone from now on."""

    def tell(self, kind: int, report: str) -> None:
        """Tell every rank of other hosts that the communicator has failed."""

    def close(self) -> None:
        """Let go of the other ranks. Idempotent."""

    def split(self, members: list[int] | None, far: list[int]) -> Pump | None:
        """A pump for some of the ranks; all must call it. None where there is nothing for it.

        Args:
            members: they, in the new pump's order; None on ranks that are in no new group.
            far: those of them on other hosts, as the new pump counts.
        """
