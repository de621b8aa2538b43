"""Transports carry messages between hosts: MPI's through mpi4py, Gloo's through torch.

A transport makes a native link; the messages themselves are native code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Transport(Protocol):
    """Joins a communicator's ranks with those of other hosts; one for each communicator."""

    name: str  # as a user knows it

    @property
    def link(self) -> object:
        """A capsule with a native link (csrc/engine/internode/link.h), for one communicator."""

    def split(
        self, members: list[int] | None, across: bool, poll: Callable[[], None]
    ) -> Transport | None:
        """Make a transport for some of the ranks, or None where there is no need; collective.

        Args:
            members: the ranks, in the new communicator's order; None on ranks that are in none.
            across: whether any of the groups that are made now is on several hosts.
            poll: called now and then while this waits for others; what it raises ends that.
        """
