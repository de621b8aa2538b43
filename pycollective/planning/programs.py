"""Which program the native engine runs for an operation: made when first asked for, then kept."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pycollective import _core

if TYPE_CHECKING:
    from pycollective.schedule import Topology
    from pycollective.schedule.select import Table


class Programs:
    """The programs of one rank. Called by the core, from any thread that holds the interpreter.

    What is chosen follows from the arguments alone, and from what is the same on every rank.

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
        self._made: dict[tuple[str, str, int], _core.Program] = {}

    def __call__(self, operation: str, algorithm: str, root: int) -> _core.Program:
        """The program of an algorithm for an operation.

        Raises:
            ConfigurationError: there is no such algorithm, or it cannot do the operation.
        """
        kind = operation, algorithm, root
        program = self._made.get(kind)
        if program is None:
            # Here, not at the top: who never asks for an algorithm need not wait for the import.
            from pycollective.schedule import make_schedule
            from pycollective.schedule.plan import make_plan

            schedule = make_schedule(operation, algorithm, self._topology, root)
            program = self._made[kind] = _core.Program(make_plan(schedule, self._rank))
        return program

    def choose(self, operation: str, root: int, size: int, dtype: str) -> _core.Program | None:
        """The program for ``algorithm="auto"``; None for the native paths of one host.

        Args:
            operation: the collective, or ``barrier``.
            root: of the operation; 0 where it has none.
            size: bytes of a rank's input or output, whichever is larger.
            dtype: name of the elements' type.
        """
        one_host = self._topology.single
        if operation == "barrier":  # between hosts all hear of all, and nothing is carried
            return None if one_host else self("all_reduce", "recursive_doubling", root)
        from pycollective.planning.elements import ELEMENTS
        from pycollective.schedule.cost import BETWEEN_HOSTS
        from pycollective.schedule.select import choose

        where, element = self._topology, ELEMENTS[dtype]
        if not one_host:
            links = BETWEEN_HOSTS[self._transport]
            name = choose(operation, where, size, element, links, self._table)
            return self(operation, name, root)
        # No model here: it prices programs, and the native paths are faster than it can know.
        if self._table is None:
            return None
        fastest = self._table.fastest(operation, where, size, element)
        if fastest is None or fastest == "direct":  # which the native paths are, at their own speed
            return None
        return self(operation, fastest, root)

    @cached_property
    def _topology(self) -> Topology:
        from pycollective.schedule import Topology

        return Topology(self._host_of)
