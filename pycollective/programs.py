"""Which program the native engine runs for an operation: made when first asked for, then kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycollective import _core

if TYPE_CHECKING:
    from pycollective.schedule import Topology

# Up to so many bytes steps cost more than what they carry.
_SMALL = 32 << 10


class Programs:
    """The programs of one rank. Called by the core, from any thread that holds the interpreter.

    Args:
        rank: the rank.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
    """

    def __init__(self, rank: int, host_of: tuple[int, ...]) -> None:
        self._rank = rank
        self._host_of = host_of
        self._made: dict[tuple[str, str, int, bool], _core.Program] = {}

    def __call__(self, operation: str, algorithm: str, root: int, size: int) -> _core.Program:
        """The program for an operation on a buffer of `size` bytes.

        Raises:
            ConfigurationError: there is no such algorithm, or it cannot do the operation.
        """
        kind = operation, algorithm, root, algorithm == "auto" and size <= _SMALL
        program = self._made.get(kind)
        if program is None:
            program = self._made[kind] = self._make(operation, algorithm, root, size)
        return program

    def _make(self, operation: str, algorithm: str, root: int, size: int) -> _core.Program:
        # Here, not at the top: who never asks for an algorithm need not wait for their import.
        from pycollective.schedule import Topology, make_schedule
        from pycollective.schedule.assemble import assemble

        topology = Topology(self._host_of)
        if operation == "barrier":  # all hear of all, and nothing is carried
            return self("all_reduce", "recursive_doubling", root, 0)
        if algorithm == "auto":
            return self(operation, _choose(operation, topology, size), root, size)
        schedule = make_schedule(operation, algorithm, topology, root)
        return _core.Program(assemble(schedule, self._rank))


def _choose(operation: str, topology: Topology, size: int) -> str:
    from pycollective.schedule import algorithms_for

    possible = algorithms_for(operation)
    if size <= _SMALL and "recursive_doubling" in possible:
        return "recursive_doubling"
    for name in ("hierarchical", "tree", "direct"):
        if name in possible:
            return name
    raise AssertionError(operation)
