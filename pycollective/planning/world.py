"""All ranks of a communicator, which may be on several hosts, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pycollective.planning.planner import Planner

if TYPE_CHECKING:
    from pycollective.schedule.select import Table
    from pycollective.transport import Transport


@dataclass(frozen=True)
class World:
    """The ranks of a communicator.

    Attributes:
        rank: this rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        transport: to ranks of other hosts; None where there are none.
        table: measured times to choose algorithms by, the same on all ranks; None for none.
        on_machine: ranks on this machine; more than on this host if it simulates several.
        id: the same on all ranks, and another for each communicator whose messages might meet.
    """

    rank: int
    host_of: tuple[int, ...]
    transport: Transport | None = None
    table: Table | None = None
    on_machine: int = 1
    id: int = 0

    @classmethod
    def on_one_host(cls, rank: int, size: int, table: Table | None = None) -> World:
        """All ranks share memory."""
        return cls(rank, (0,) * size, table=table)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.host_of)

    @cached_property
    def local_ranks(self) -> list[int]:
        """The ranks on this rank's host, this one included, ascending."""
        here = self.host_of[self.rank]
        return [rank for rank, host in enumerate(self.host_of) if host == here]

    @property
    def chooses(self) -> bool:
        """Whether there is a choice of algorithms where a call leaves it open."""
        return self.transport is not None or self.table is not None

    @cached_property
    def planner(self) -> Planner:
        """Makes this rank's plans."""
        transport = "" if self.transport is None else self.transport.name
        return Planner(self.rank, self.host_of, self.table, transport)

    @property
    def link(self) -> object:
        """The native link to ranks of other hosts, in a capsule; None where there are none."""
        return None if self.transport is None else self.transport.link
