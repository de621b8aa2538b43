"""Joins the ranks that mpiexec started: through mpi4py they tell each other where to meet.

What they must agree on goes by way of rank 0 (`mpi_talk.py`), in small messages, polled, so that no
wait is unbounded. The ranks of a host meet as under any other launcher, and those of several hosts
have MPI between them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pycollective import placement
from pycollective.bootstrap.host import host_identity
from pycollective.bootstrap.mpi_talk import RANK_VARIABLES, TALKS, Talk
from pycollective.bootstrap.store import StoreServer
from pycollective.config import VERSION
from pycollective.errors import ConfigurationError
from pycollective.planning.tuning import describe, load
from pycollective.transport.mpi import MpiTransport

if TYPE_CHECKING:
    from pycollective.schedule.select import Table

_GRACE = 1.0


class _Wish(NamedTuple):
    """What a rank says of itself first."""

    version: str
    wish: str  # what its caller asked for, and all must alike
    identity: str  # of its host
    host: str  # for messages
    address: str  # of the store that it would serve to its host
    secret: str


class _Place(NamedTuple):
    """What a rank is answered."""

    host_of: str  # packed
    on_machine: int
    address: str
    secret: str
    id: int  # of the communicator


@dataclass(frozen=True)
class Launch:
    """The ranks that mpiexec started, as they have told each other.

    Attributes:
        talk: of all ranks, still going on.
        rank: this rank.
        size: number of ranks.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        address: of the store where this host's ranks meet.
        secret: what its clients must present.
        server: of that store, on the first rank of each host; not started.
        table: measured times, the same on all ranks; None for none.
        on_machine: ranks on this machine.
        id: of the communicator that they make, the same on all.
    """

    talk: Talk
    rank: int
    size: int
    host_of: tuple[int, ...]
    address: str
    secret: str
    server: StoreServer | None
    table: Table | None
    on_machine: int
    id: int

    def transport(self) -> MpiTransport:
        """Messages between all ranks; every rank must call it, when nothing else can go wrong.

        That all have it is agreed on before it is returned.
        """
        comm, request = TALKS.duplicate(self.talk.world)

        def duplicated() -> bool:
            self.talk.glance()
            return bool(request.Test())

        self.talk.until(duplicated, lambda: "not all ranks have duplicated MPI's communicator")
        transport = MpiTransport(comm, list(range(self.size)), self.talk.timeout)
        self.talk.round(None, lambda said: lambda rank: True)
        TALKS.part_with_duplicate()
        return transport


def detected() -> bool:
    """Whether mpiexec has started this process."""
    return any(name in os.environ for name in RANK_VARIABLES)


def agree(
    talk: Talk, topology: str = "", transport: str = "", tuning: str = "", more: str = ""
) -> Launch:
    """Agree with all ranks of ``MPI.COMM_WORLD`` on who shares a host and where they meet.

    Every rank must call it, in a block of ``talk.sharing_problems()``.

    Args:
        talk: a new one.
        topology: as in `Topology.parse`, for hosts that are played; empty for those there are.
        transport: that the caller of `init` asked for; empty for any.
        tuning: file of a tuning table; empty for none.
        more: what else must be the same on all ranks, in words.

    Raises:
        ConfigurationError: the topology does not fit, or what must be the same differs between
            ranks, or the table cannot be read, or a host has too many ranks.
        CollectiveTimeout: not every rank came.
    """
    address = f"unix:@pycollective-{os.getpid()}-{os.urandom(6).hex()}"
    secret = os.urandom(16).hex()
    table = load(tuning)
    wish = f"topology {topology!r}, transport {transport or 'any'}, {describe(table)}, {more}"
    # It stands before anyone hears of it; most are not needed.
    server = StoreServer(address, secret, start=False)
    try:
        mine = _Wish(VERSION, wish, host_identity(), socket.gethostname(), address, secret)
        place = _Place(*talk.round(tuple(mine), _decide(topology)))
        host_of = placement.unpack(place.host_of, talk.size)
        if place.address != address:
            server.close()
        return Launch(
            talk,
            talk.rank,
            talk.size,
            host_of,
            place.address,
            place.secret,
            server if place.address == address else None,
            table,
            place.on_machine,
            place.id,
        )
    except BaseException:
        server.close()
        raise


def _decide(topology: str) -> Callable[[list[Any]], Callable[[int], Any]]:
    """How rank 0 finds from what all have said where each is."""

    def decide(said: list[Any]) -> Callable[[int], Any]:
        from pycollective.schedule import Topology

        wishes = [_Wish(*each) for each in said]
        for other, theirs in enumerate(wishes):
            if theirs.version != VERSION:
                raise ConfigurationError(
                    f"rank {other} runs pycollective {theirs.version} and rank 0 {VERSION}"
                )
            if theirs.wish != wishes[0].wish:
                raise ConfigurationError(
                    f"rank 0 was given {wishes[0].wish} and rank {other} {theirs.wish}"
                )
        machines = placement.number_hosts([each.identity for each in wishes])
        host_of = Topology.parse(topology, len(said)).host_of if topology else machines
        placement.check_hosts(host_of, () if topology else [each.host for each in wishes])
        first = [host_of.index(host) for host in range(max(host_of) + 1)]
        on_machine = [machines.count(machine) for machine in range(max(machines) + 1)]
        packed = placement.pack(host_of)
        number = int.from_bytes(os.urandom(8), "little")

        def answer(rank: int) -> Any:
            server = wishes[first[host_of[rank]]]
            return packed, on_machine[machines[rank]], server.address, server.secret, number

        return answer

    return decide


def end_after_failure() -> None:
    """End the job where an exception ends a rank that mpiexec started: MPI_Finalize would hang.

    It waits for all ranks, of which some may be dead or may wait in turn. The others get a moment
    first, to say what they saw.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if not detected() or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_GRACE)
    mpi.COMM_WORLD.Abort(1)
