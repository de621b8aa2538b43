"""Joins the ranks that mpiexec started: through mpi4py, rank 0 tells the others where to meet.

MPI carries one small message to each rank, polled, so that no wait is unbounded; from there on the
ranks meet as under any other launcher.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from pycollective import installing
from pycollective.errors import CollectiveTimeout, ConfigurationError
from pycollective.host import host_identity

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_POLL = 0.0005  # seconds
_GRACE = 1.0


@dataclass(frozen=True)
class Place:
    """Where the ranks meet: a store that rank 0 serves.

    Attributes:
        rank: this rank.
        size: number of ranks.
        address: of the store.
        secret: what its clients must present.
    """

    rank: int
    size: int
    address: str
    secret: str


def detected() -> bool:
    """Whether mpiexec has started this process."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def agree(timeout: float) -> Place:
    """Agree with all ranks of ``MPI.COMM_WORLD`` on a place to meet; every rank must call it.

    Initialises MPI where the program has not.

    Raises:
        ConfigurationError: mpi4py is missing, or belongs to another MPI than mpiexec, or the ranks
            are on several hosts.
        CollectiveTimeout: rank 0 did not come.
    """
    world = _world()
    rank, size = world.Get_rank(), world.Get_size()
    tag = _tag(world)
    if rank == 0:
        told = (f"unix:@pycollective-{os.getpid()}-{os.urandom(6).hex()}", os.urandom(16).hex())
        message = (host_identity(), *told)
        sent = [world.isend(message, dest, tag) for dest in range(1, size)]
        _settle(sent, timeout, rank)
        return Place(rank, size, *told)
    ((host, address, secret),) = _settle([world.irecv(source=0, tag=tag)], timeout, rank)
    if host != host_identity():
        raise ConfigurationError(
            f"rank {rank} is not on the host of rank 0: this version joins the ranks of one host"
        )
    return Place(rank, size, address, secret)


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


def _tag(world: Any) -> int:
    from mpi4py import MPI

    # Far from the tags that programs choose.
    return int(world.Get_attr(MPI.TAG_UB)) - 7


def _settle(requests: list[Any], timeout: float, rank: int) -> list[Any]:
    """What the requests brought, once all are done."""
    deadline = time.monotonic() + timeout
    brought = []
    for request in requests:
        done, message = request.test()
        while not done:
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"init timed out on rank {rank} after {timeout:g} s: rank 0 did not come"
                    if rank
                    else f"init timed out on rank 0 after {timeout:g} s: the others did not come",
                    rank,
                    "init",
                )
            time.sleep(_POLL)
            done, message = request.test()
        brought.append(message)
    return brought
