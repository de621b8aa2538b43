"""Which plan the native engine runs for an operation, and what is in it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from pycollective import _core
from pycollective.config import ENV_TUNING

if TYPE_CHECKING:
    from pycollective.leaves.deal import Deal
    from pycollective.schedule import Topology
    from pycollective.schedule.select import Table

K = TypeVar("K")
V = TypeVar("V")

_MOST_KEPT = 512  # as plan_cache.cpp: who calls with ever new sizes must not collect them for ever


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
        # Of deals: programs by operation, algorithm, root and digest, and what "auto" has chosen.
        self._of_deals: dict[tuple[str, str, int, int], _core.Program | None] = {}
        self._chosen: dict[tuple[str, int], str] = {}

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

    def of_deal(
        self, operation: str, deal: Deal, root: int, algorithm: str, size: int
    ) -> _core.Program | None:
        """The plan of a reduction of what was dealt; kept, since a deal serves many steps.

        None for the native paths, where all ranks share a host and each has one node, all of as
        many leaves, in rank order.

        Args:
            operation: the collective.
            deal: which leaves each rank gives.
            root: of the operation, where it has one.
            algorithm: as in ``algorithm=``; for ``auto`` priced as if each rank gave one leaf.
            size: bytes of a rank's input, in fp32.

        Raises:
            ConfigurationError: there is no such algorithm, or it cannot do the operation.
        """
        if algorithm == "auto":
            algorithm = _kept(
                self._chosen,
                (operation, size),
                lambda: self.choose(operation, size, "float32") or "direct",
            )
        return _kept(
            self._of_deals,
            (operation, algorithm, root, deal.digest),
            lambda: self._make_of_deal(operation, deal, root, algorithm),
        )

    def _make_of_deal(
        self, operation: str, deal: Deal, root: int, algorithm: str
    ) -> _core.Program | None:
        if algorithm == "direct" and self._topology.single and _one_block_each(deal):
            return None
        from pycollective.schedule import make_schedule
        from pycollective.schedule.plan import make_plan

        schedule = make_schedule(operation, algorithm, self._topology, root, deal)
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
        from pycollective.planning.tuning_table import ELEMENTS
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


def _kept(known: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """What is known for the key, made if nothing is. Another thread may clear it at any time."""
    try:  # suppress() would take as long as all else here
        return known[key]
    except KeyError:
        value = make()
    if len(known) >= _MOST_KEPT:
        known.clear()
    known[key] = value
    return value


def _one_block_each(deal: Deal) -> bool:
    """Whether the order over the ranks is the upper part of the order over the leaves."""
    block = deal.nodes(0)[0][1] if deal.held[0] else 0
    return (block & (block - 1) == 0 or deal.size == 1) and all(
        deal.nodes(rank) == [(rank * block, min((rank + 1) * block, deal.leaves))]
        for rank in range(deal.size)
    )


def tuning_path(given: str | os.PathLike[str] | None) -> str:
    """The file to read: what was given, else PYCOLLECTIVE_TUNING; empty for none."""
    return os.environ.get(ENV_TUNING, "") if given is None else os.fspath(given)


def load(path: str) -> Table | None:
    """The table in a file; None without a path.

    Raises:
        ConfigurationError: the file cannot be read, or is broken; the message names it.
    """
    if not path:
        return None
    # Here, not at the top: who has no table need not wait for the import.
    from pycollective.planning.tuning_table import read_table

    return read_table(path)


def describe(table: Table | None) -> str:
    """Which table it is, in a few words: the same for the same measurements, in whatever order."""
    if table is None:
        return "no tuning table"
    from pycollective.planning.tuning_table import table_as_json

    entries = sorted(json.dumps(each, sort_keys=True) for each in table_as_json(table)["entries"])
    digest = hashlib.sha256("\n".join(entries).encode()).hexdigest()
    return f"the tuning table {digest[:12]}"
