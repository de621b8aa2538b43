"""What a communicator asks of a transport between hosts; the messages themselves are native."""

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
        self, members: list[int] | None, across: bool, glance: Callable[[], None]
    ) -> Transport | None:
        """A transport for some of the ranks; all must call it. None where there is no need.

        Args:
            members: they, in the new communicator's order; None on ranks that are in none.
            across: whether any of the groups that are made now is on several hosts.
            glance: asked now and then while it waits for others; what it raises ends that.
        """
