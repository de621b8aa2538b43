"""The transport over MPI: whichever MPI the program was launched with.

mpi4py knows which MPI that is and what its handles are; the messages go straight to its library
(`csrc/mpi/`). Each communicator has an MPI communicator of its own, so that its messages meet no
others. Making one is polled, so that no wait is unbounded.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from typing import Any

from pycollective import _core
from pycollective.errors import CollectiveTimeout, ConfigurationError

_POLL = 0.0002  # seconds
_NO_CLASS = -1  # of errors: they are above 0
_MARK = 0x5A5A1234  # a number that a status does not have by chance


class MpiTransport:
    """A `Transport` over an MPI communicator.

    Args:
        comm: an MPI communicator of its own; freed when the communicator closes.
        ranks: the number there of each rank.
        timeout: seconds that making another, in `split`, may take.
        frees_unused: free it also if no communicator is made of this.

    Raises:
        ConfigurationError: MPI was not initialised for several threads.
    """

    name = "mpi"

    def __init__(
        self, comm: Any, ranks: list[int], timeout: float, frees_unused: bool = False
    ) -> None:
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
            null_request=_handle(MPI._handleof(MPI.REQUEST_NULL)),
            any_source=MPI.ANY_SOURCE,
            error_offset=_error_offset(MPI),
            in_status=MPI.ERR_IN_STATUS,
            # mpi4py before 4 does not know them.
            proc_failed=getattr(MPI, "ERR_PROC_FAILED", _NO_CLASS),
            proc_failed_pending=getattr(MPI, "ERR_PROC_FAILED_PENDING", _NO_CLASS),
            comm=_handle(MPI._handleof(comm)),
            ranks=ranks,
            frees_unused=frees_unused,
        )
        # Duplicates that were begun in a `split` that failed: MPI matches them by their order.
        self._begun: list[tuple[Any, Any]] = []

    def split(
        self, members: list[int] | None, across: bool, poll: Callable[[], None]
    ) -> MpiTransport | None:
        # The groups share one duplicate: their ranks send each other nothing.
        if not across:
            return None
        comm = self._duplicate(poll)
        if members is None:
            comm.Free()
            return None
        return MpiTransport(comm, [self._ranks[member] for member in members], self._timeout, True)

    def _duplicate(self, poll: Callable[[], None]) -> Any:
        """Duplicate the MPI communicator; all of its ranks do."""
        if not self._begun:
            self._begun.append(self._comm.Idup())
        made, request = self._begun[0]
        deadline = time.monotonic() + self._timeout
        while not request.Test():
            if time.monotonic() > deadline:
                rank = self._comm.Get_rank()
                raise CollectiveTimeout(
                    f"split timed out on rank {rank} after {self._timeout:g} s: not all ranks "
                    "have duplicated MPI's communicator",
                    rank,
                    "split",
                )
            poll()
            time.sleep(_POLL)
        del self._begun[0]
        return made


def _error_offset(mpi: Any) -> int:
    """Return the byte offset of MPI_ERROR in a status, which differs between MPIs."""
    status = mpi.Status()
    status.Set_error(_MARK)
    raw = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
    return raw.index(struct.pack("=i", _MARK))


def _handle(value: int) -> int:
    """Return a handle as an unsigned number of 64 bits."""
    return value & 0xFFFF_FFFF_FFFF_FFFF
