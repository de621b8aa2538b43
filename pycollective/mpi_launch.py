"""Joins the ranks that mpiexec started: through mpi4py they tell each other where to meet.

MPI carries two small messages a rank, polled, so that no wait is unbounded. From there on the ranks
of a host meet as under any other launcher, and those of several hosts have MPI between them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pycollective import installing
from pycollective.errors import CollectiveTimeout, ConfigurationError
from pycollective.host import host_identity
from pycollective.store import StoreServer
from pycollective.transport.mpi import MpiTransport, duplicate
from pycollective.tuned import describe, load

if TYPE_CHECKING:
    from pycollective.schedule.select import Table

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_POLL = 0.0005  # seconds
_GRACE = 1.0


@dataclass(frozen=True)
class Launch:
    """The ranks that mpiexec started, as they have told each other.

    Attributes:
        rank: this rank.
        size: number of ranks.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        address: of the store where this host's ranks meet.
        secret: what its clients must present.
        server: of that store, on the first rank of each host; not started.
        timeout: seconds that joining may take.
        table: measured times, the same on all ranks; None for none.
        beside: ranks on this machine.
    """

    rank: int
    size: int
    host_of: tuple[int, ...]
    address: str
    secret: str
    server: StoreServer | None
    timeout: float
    table: Table | None
    beside: int

    def transport(self) -> MpiTransport:
        """Messages between all ranks; every rank must call it."""
        comm = duplicate(_world(), self.timeout)
        return MpiTransport(comm, list(range(self.size)), self.timeout)

    @contextmanager
    def sharing_problems(self) -> Iterator[Callable[[int], list[int]]]:
        """A block in which each rank tells all others a number, or that it cannot go on."""
        told = False

        def all_agree(number: int) -> list[int]:
            nonlocal told
            told = True
            answers = _exchange([number, ""], self.timeout)
            for rank, (_, problem) in enumerate(answers):
                if problem:
                    raise ConfigurationError(f"rank {rank} cannot join: {problem}")
            return [int(each) for each, _ in answers]

        try:
            yield all_agree
        except BaseException as error:
            if not told:
                _exchange([0, f"{type(error).__name__}: {error}"], self.timeout)
            raise


def detected() -> bool:
    """Whether mpiexec has started this process."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def agree(timeout: float, topology: str = "", tuning: str = "") -> Launch:
    """Agree with all ranks of ``MPI.COMM_WORLD`` on who shares a host and where they meet.

    Every rank must call it. Initialises MPI where the program has not.

    Args:
        timeout: seconds that joining may take.
        topology: as in `Topology.parse`, for hosts that are played; empty for those there are.
        tuning: file of a tuning table; empty for none.

    Raises:
        ConfigurationError: mpi4py is missing, or belongs to another MPI than mpiexec, or the
            topology does not fit, or it or the table differs between ranks, or the table cannot
            be read.
        CollectiveTimeout: not every rank came.
    """
    from pycollective.schedule import Topology

    rank = _world().Get_rank()
    address = f"unix:@pycollective-{os.getpid()}-{os.urandom(6).hex()}"
    secret = os.urandom(16).hex()
    # It stands before anyone hears of it; most are not needed.
    server = StoreServer(address, secret, start=False)
    try:
        problem = ""
        try:
            table = load(tuning)
        except ConfigurationError as error:
            table, problem = None, str(error)
        which = f"topology {topology!r}, {describe(table)}"
        answers = _exchange([host_identity(), which, problem, address, secret], timeout)
        for other, (_, theirs, its_problem, _, _) in enumerate(answers):
            if problem or its_problem:
                raise ConfigurationError(problem or f"rank {other}: {its_problem}")
            if theirs != which:
                raise ConfigurationError(f"rank {rank} was given {which} and rank {other} {theirs}")
        machines = [each[0] for each in answers]
        hosts = Topology.of_hosts(machines)
        host_of = (Topology.parse(topology, len(answers)) if topology else hosts).host_of
    except BaseException:
        server.close()
        raise
    first = host_of.index(host_of[rank])
    if rank != first:
        server.close()
    address, secret = answers[first][3:]
    return Launch(
        rank,
        len(answers),
        host_of,
        address,
        secret,
        server if rank == first else None,
        timeout,
        table,
        machines.count(machines[rank]),
    )


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


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigurationError(
            f"this is a launch by mpiexec, which is joined through mpi4py: {error}. "
            f"{installing.MPI}, or start the ranks with `pycollective run -n N` or torchrun"
        ) from error
    world = MPI.COMM_WORLD
    for name in _SIZE_VARIABLES:
        launched = os.environ.get(name, "")
        if launched.isdigit() and int(launched) != world.Get_size():
            raise ConfigurationError(
                f"mpiexec has started {launched} ranks, and mpi4py sees {world.Get_size()}: it "
                f"belongs to another MPI ({MPI.Get_library_version().split(',')[0].strip()}). Use "
                "that one's mpiexec, or the mpi4py of this one"
            )
    return world


def _exchange(mine: list[Any], timeout: float) -> list[list[Any]]:
    """What every rank has to say, by way of rank 0, which knows who has not come."""
    from mpi4py import MPI

    world = _world()
    rank, size = world.Get_rank(), world.Get_size()
    tag = int(world.Get_attr(MPI.TAG_UB)) - 7  # far from those that programs choose
    deadline = time.monotonic() + timeout
    if rank != 0:
        told = [world.isend(mine, 0, tag)]
        # A little longer, so that rank 0 can say who did not come.
        heard = _settled([world.irecv(source=0, tag=tag), *told], deadline + _GRACE)
        if heard is None:
            raise _timed_out(rank, timeout, "rank 0 did not come")
        if isinstance(heard[0], str):
            raise _timed_out(rank, timeout, heard[0])
        return list(heard[0])
    requests = [world.irecv(source=other, tag=tag) for other in range(1, size)]
    everybody = _settled(requests, deadline)
    answer: Any = [mine, *(everybody or [])]
    if everybody is None:
        absent = [str(r + 1) for r, request in enumerate(requests) if not request.test()[0]]
        answer = f"rank(s) {', '.join(absent)} of {size} did not come"
    sent = [world.isend(answer, other, tag) for other in range(1, size)]
    _settled(sent, time.monotonic() + _GRACE)
    if isinstance(answer, str):
        raise _timed_out(rank, timeout, answer)
    return list(answer)


def _timed_out(rank: int, timeout: float, why: str) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"init timed out on rank {rank} after {timeout:g} s: {why}", rank, "init"
    )


def _settled(requests: list[Any], deadline: float) -> list[Any] | None:
    """What the requests brought; None if they are not done in time."""
    brought = []
    for request in requests:
        done, message = request.test()
        while not done:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL)
            done, message = request.test()
        brought.append(message)
    return brought
