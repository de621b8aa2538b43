"""Over MPI: whichever MPI the program was launched with.

mpi4py knows which that is, and what its handles are; the messages go straight to its library
(`csrc/mpi/`). Each communicator has an MPI communicator of its own, so that its messages meet no
others; making one is polled, so that no wait is unbounded.
"""

from __future__ import annotations

import time
from typing import Any

from pycollective import _core
from pycollective.errors import CollectiveTimeout, ConfigurationError

_POLL = 0.0002  # seconds


class MpiTransport:
    """See `Transport`.

    Args:
        comm: an MPI communicator of its own; freed when the communicator closes.
        ranks: the number there of each rank.
        timeout: seconds that making another, in `split`, may take.

    Raises:
        ConfigurationError: MPI was not initialised for several threads.
    """

    name = "mpi"

    def __init__(self, comm: Any, ranks: list[int], timeout: float) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                "MPI must be initialised with MPI_THREAD_MULTIPLE, as mpi4py does by itself: an "
                "asynchronous operation runs on a thread of its own"
            )
        self._comm, self._ranks, self._timeout = comm, ranks, timeout
        self.link = _core.mpi_link(
            library=MPI.__file__,
            handle_bytes=MPI._sizeof(MPI.Comm),
            status_bytes=MPI._sizeof(MPI.Status),
            byte=_handle(MPI._handleof(MPI.BYTE)),
            any_source=MPI.ANY_SOURCE,
            comm=_handle(MPI._handleof(comm)),
            ranks=ranks,
        )

    def split(self, members: list[int] | None, across: bool) -> MpiTransport | None:
        """See `Transport`. The groups share one duplicate: their ranks send each other nothing."""
        if not across:
            return None
        comm = _duplicate(self._comm, self._timeout)
        if members is None:
            comm.Free()
            return None
        return MpiTransport(comm, [self._ranks[member] for member in members], self._timeout)


def _duplicate(comm: Any, timeout: float) -> Any:
    """A duplicate of an MPI communicator, which all of its ranks make."""
    made, request = comm.Idup()
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeout(
                f"split timed out on rank {comm.Get_rank()} after {timeout:g} s: not all ranks "
                "have duplicated MPI's communicator",
                comm.Get_rank(),
                "split",
            )
        time.sleep(_POLL)
    return made


def _handle(value: int) -> int:
    """A handle as an unsigned number of 64 bits."""
    return value & 0xFFFF_FFFF_FFFF_FFFF
