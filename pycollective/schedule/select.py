"""Chooses the algorithm: from what was measured where it was, from the cost model elsewhere.

All of it is computed from the arguments. Ranks that choose with the same arguments choose the same;
so each rank must have the same table and the same links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .algorithms import ALGORITHMS
from .cost import COUNTED_RANKS, Element, Links, counts, price
from .operation import find_operation
from .schedule import algorithms_for
from .topology import Topology

# Times that differ by less are the same: two medians of one algorithm often differ as much.
_AS_LITTLE = 1.04
# The model is not so exact; and in each step ranks may wait for each other longer than it knows.
_AS_CHEAP = 1.1

# Between hosts recursive doubling takes all bytes through one rank of each, which alone receives,
# adds and sends: the model, which counts a host's bytes together, does not see that. Of nodes.
_MOST_THROUGH_ONE_RANK = 512 << 10

# operation, topology, bytes of an element, bytes of an accumulator
_Case = tuple[str, str, int, int]


@dataclass(frozen=True)
class Measurement:
    """How long a collective took by some algorithms.

    Attributes:
        operation: the collective.
        topology: as in ``str(Topology)``.
        dtype: name of the elements' type.
        bytes: of a rank's input or output, whichever is larger.
        seconds: by algorithm.
        element: of the dtype.
    """

    operation: str
    topology: str
    dtype: str
    bytes: int
    seconds: Mapping[str, float]
    element: Element

    @property
    def case(self) -> _Case:
        """What it holds for, but for the size: types with elements as large take as long."""
        element = self.element
        return self.operation, self.topology, element.size, element.accumulator

    @property
    def fastest(self) -> str:
        """The algorithm that took least; of those that took as little, the first in the registry.

        So what noise decides does not change from size to size, and goes to ``direct`` where it is
        among them, which on one host is the native code.
        """
        limit = min(self.seconds.values()) * _AS_LITTLE
        return next(name for name in ALGORITHMS if self.seconds.get(name, math.inf) <= limit)


@dataclass(frozen=True)
class Table:
    """Measurements from one machine or cluster.

    Attributes:
        machine: what they were made on; for people.
        entries: the measurements, one for each operation, topology, dtype and size.
    """

    machine: Mapping[str, Any]
    entries: tuple[Measurement, ...]

    @cached_property
    def _cases(self) -> dict[_Case, list[Measurement]]:
        cases: dict[_Case, list[Measurement]] = {}
        for entry in self.entries:
            cases.setdefault(entry.case, []).append(entry)
        return cases

    def fastest(
        self, operation: str, topology: Topology, size: int, element: Element
    ) -> str | None:
        """The algorithm that was fastest at the measured size nearest in logarithm.

        None where nothing was measured, or only larger or only smaller sizes.
        """
        case = operation, str(topology), element.size, element.accumulator
        measured = self._cases.get(case, [])
        sizes = [entry.bytes for entry in measured]
        if not sizes or not min(sizes) <= size <= max(sizes):
            return None
        return min(measured, key=lambda entry: abs(math.log(entry.bytes / size))).fastest


def choose(
    operation: str,
    topology: Topology,
    size: int,
    element: Element,
    links: Links,
    table: Table | None = None,
) -> str:
    """The algorithm for ``algorithm="auto"``.

    Args:
        operation: the collective, as in `Communicator`.
        topology: which ranks share a host.
        size: bytes of a rank's input or output, whichever is larger.
        element: of the buffer; one of `pycollective.planning.tuning_table.ELEMENTS`.
        links: what the machines can do.
        table: measurements that go before the model where they cover the case.

    Returns:
        Its name; by the model, of algorithms that cost about the same the one with fewest steps,
        and of these the first in the registry.

    Raises:
        ConfigurationError: there is no such operation, or the size is negative.
    """
    find_operation(operation)
    if table is not None:
        fastest = table.fastest(operation, topology, size, element)
        if fastest is not None:
            return fastest
    few = _few_like(topology)
    size = round(size * math.sqrt(few.ranks / topology.ranks))
    prices = {
        name: price(operation, name, few, size, element, links)
        for name in algorithms_for(operation)
        if _is_candidate(name, operation, topology, size * element.accumulator // element.size)
    }
    limit = min(prices.values()) * _AS_CHEAP
    return min(
        (name for name, seconds in prices.items() if seconds <= limit),
        key=lambda name: len(counts(operation, name, few)),
    )


def _is_candidate(name: str, operation: str, topology: Topology, nodes: int) -> bool:
    """Whether an algorithm is priced, for so many bytes of nodes."""
    if name == "recursive_doubling":
        return topology.widest == 1 or nodes <= _MOST_THROUGH_ONE_RANK
    # To reduce, a ring was never the cheapest, and it takes longest to count.
    return name != "ring" or operation == "all_gather"


def _few_like(topology: Topology) -> Topology:
    """The first ranks of the first hosts, `COUNTED_RANKS` in all; at least two hosts' if there are.

    As many hosts as there is place for whole, so what the ranks of a host do stays alike.
    """
    if topology.ranks <= COUNTED_RANKS:
        return topology
    hosts = min(max(2, COUNTED_RANKS // topology.widest), len(topology.hosts))
    each = COUNTED_RANKS // hosts
    return Topology.of_hosts([host for host in range(hosts) for _ in topology.hosts[host][:each]])
