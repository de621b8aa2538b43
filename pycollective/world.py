"""All ranks of a communicator, which may be on several hosts, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pycollective.programs import Programs

if TYPE_CHECKING:
    from pycollective.transport.pump import Pump


@dataclass(frozen=True)
class World:
    """The ranks of a communicator.

    Attributes:
        rank: this rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        pump: moves messages to and from ranks of other hosts; None where there are none.
    """

    rank: int
    host_of: tuple[int, ...]
    pump: Pump | None = None

    @classmethod
    def on_one_host(cls, rank: int, size: int) -> World:
        """All ranks share memory."""
        return cls(rank, (0,) * size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.host_of)

    @cached_property
    def near(self) -> list[int]:
        """The ranks on this rank's host, this one included, ascending."""
        here = self.host_of[self.rank]
        return [rank for rank, host in enumerate(self.host_of) if host == here]

    @cached_property
    def programs(self) -> Programs:
        """Of the algorithms that were asked for."""
        return Programs(self.rank, self.host_of)
