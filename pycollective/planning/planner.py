"""Which plan the native engine runs for an operation, and what is in it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pycollective import _core

if TYPE_CHECKING:
    from pycollective.schedule import Topology
    from pycollective.schedule.select import Table


class Planner:
    """Makes the plans of one rank. The core calls it, from any thread, and keeps what it gets.

    What it chooses follows from the arguments alone, and from what is the same on every rank.

    Args:
        rank: the rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        table: measured times; the same on all ranks.
        transport: between hosts, as in `cost.BETWEEN_HOSTS`; empty where there is but one.
    """

    def __init__(
        self,
        rank: int,
        host_of: tuple[int, ...],
        table: Table | None = None,
        transport: str = "",
    ) -> None:
        self._rank = rank
        self._host_of = host_of
        self._table = table
        self._transport = transport

    def __call__(self, operation: str, algorithm: str, root: int) -> _core.Program:
        """Make the plan of an algorithm for an operation.

        Raises:
            ConfigurationError: there is no such algorithm, or it cannot do the operation.
        """
        # Here, not at the top: who never asks for an algorithm need not wait for the import.
        from pycollective.schedule import make_schedule
        from pycollective.schedule.plan import make_plan

        schedule = make_schedule(operation, algorithm, self._topology, root)
        return _core.Program(make_plan(schedule, self._rank))

    def choose(self, operation: str, size: int, dtype: str) -> str:
        """The algorithm for ``algorithm="auto"``; empty for the native paths of one host.

        Args:
            operation: the collective, or ``barrier``, which is an all-reduce of nothing.
            size: bytes of a rank's input or output, whichever is larger.
            dtype: name of the elements' type.
        """
        one_host = self._topology.single
        if operation == "barrier":  # between hosts all hear of all
            return "" if one_host else "recursive_doubling"
        from pycollective.planning.elements import ELEMENTS
        from pycollective.schedule.cost import BETWEEN_HOSTS
        from pycollective.schedule.select import choose

        where, element = self._topology, ELEMENTS[dtype]
        if not one_host:
            links = BETWEEN_HOSTS[self._transport]
            return choose(operation, where, size, element, links, self._table)
        # No model here: it prices plans, and the native paths are faster than it can know.
        if self._table is None:
            return ""
        fastest = self._table.fastest(operation, where, size, element)
        # The native paths are direct, at their own speed.
        return "" if fastest is None or fastest == "direct" else fastest

    @cached_property
    def _topology(self) -> Topology:
        from pycollective.schedule import Topology

        return Topology(self._host_of)
