"""Over MPI, through mpi4py: whichever MPI the program was launched with.

Every call is non-blocking and polled, so that no wait is unbounded and a failure can end it. Each
communicator has an MPI communicator of its own, so that its messages meet no others.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from pycollective.errors import ConfigurationError

from .pump import Notice

_NOTICE_TAG = 1
_NOTICE_BYTES = 1024
_GIVE_UP_WITHIN = 0.5  # seconds


class MpiPump:
    """See `Pump`.

    Args:
        comm: an MPI communicator of its own, whose ranks are the communicator's.
        far: the ranks of other hosts.

    Raises:
        ConfigurationError: MPI was not initialised for several threads.
    """

    transport = "mpi"

    def __init__(self, comm: Any, far: list[int]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                "MPI must be initialised with MPI_THREAD_MULTIPLE, as mpi4py does by itself: an "
                "asynchronous operation runs on a thread of its own"
            )
        self._comm = comm
        self._far = far
        self._requests: list[Any] = []
        self._tickets: list[int] = []
        self._receiving: set[int] = set()  # of the tickets
        self._next = 1
        self._notice = bytearray(_NOTICE_BYTES)
        self._notice_request: Any = None
        self._told: list[tuple[Any, bytes]] = []
        self._closed = False
        # mpi4py lets other threads run while it is in MPI.
        self._lock = threading.Lock()
        if far:
            self._await_notice()

    def isend(self, rank: int, tag: int, data: memoryview) -> int:
        """See `Pump`."""
        with self._lock:
            return self._started(self._comm.Isend([data, self._mpi.BYTE], rank, tag))

    def irecv(self, rank: int, tag: int, data: memoryview) -> int:
        """See `Pump`."""
        with self._lock:
            ticket = self._started(self._comm.Irecv([data, self._mpi.BYTE], rank, tag))
            self._receiving.add(ticket)
            return ticket

    def _started(self, request: Any) -> int:
        ticket = self._next
        self._next += 1
        self._requests.append(request)
        self._tickets.append(ticket)
        return ticket

    def poll(self) -> tuple[list[int], list[Notice]] | None:
        """See `Pump`."""
        if not self._lock.acquire(blocking=False):
            return None  # another thread does it
        try:
            return None if self._closed else self._poll()
        finally:
            self._lock.release()

    def _poll(self) -> tuple[list[int], list[Notice]] | None:
        done: list[int] = []
        if self._requests:
            completed = self._mpi.Request.Testsome(self._requests)
            if completed:
                done = [self._tickets[i] for i in completed]
                self._receiving.difference_update(done)
                left = set(range(len(self._requests))).difference(completed)
                self._requests = [self._requests[i] for i in sorted(left)]
                self._tickets = [self._tickets[i] for i in sorted(left)]
        notices: list[Notice] = []
        if self._notice_request is not None and self._notice_request.Test():
            kind, reporter, report = bytes(self._notice).split(b"\0", 2)
            text = report.rstrip(b"\0").decode(errors="replace")
            notices.append((int(kind), int(reporter), text))
            self._await_notice()
        return (done, notices) if done or notices else None

    def _await_notice(self) -> None:
        self._notice[:] = bytes(_NOTICE_BYTES)
        self._notice_request = self._comm.Irecv(
            [self._notice, self._mpi.BYTE], self._mpi.ANY_SOURCE, _NOTICE_TAG
        )

    def ring_with(self, bell: object) -> bool:
        """See `Pump`. MPI wakes nobody."""
        return False

    def give_up(self, tickets: list[int]) -> None:
        """See `Pump`."""
        with self._lock:
            self._give_up(set(tickets))

    def _give_up(self, given_up: set[int]) -> None:
        left: list[tuple[Any, int]] = []
        ending = []
        for request, ticket in zip(self._requests, self._tickets, strict=True):
            if ticket in given_up:
                # A send that its receiver never takes is left alone: MPI-4 deprecates cancelling
                # it, and MPICH over UCX crashes.
                if ticket in self._receiving:
                    request.Cancel()
                ending.append(request)
            else:
                left.append((request, ticket))
        self._requests = [request for request, _ in left]
        self._tickets = [ticket for _, ticket in left]
        deadline = time.monotonic() + _GIVE_UP_WITHIN
        while ending and time.monotonic() < deadline:
            ending = [request for request in ending if not request.Test()]

    def tell(self, kind: int, report: str) -> None:
        """See `Pump`."""
        with self._lock:
            if not self._closed:
                self._tell(kind, report)

    def _tell(self, kind: int, report: str) -> None:
        text = f"{kind}\0{self._comm.Get_rank()}\0".encode() + report.encode()
        text = text[:_NOTICE_BYTES]
        for rank in self._far:
            request = self._comm.Isend([text, self._mpi.BYTE], rank, _NOTICE_TAG)
            self._told.append((request, text))

    def close(self) -> None:
        """See `Pump`."""
        with self._lock:
            if not self._closed:
                self._close()

    def _close(self) -> None:
        self._closed = True
        if self._notice_request is not None:
            self._notice_request.Cancel()
            deadline = time.monotonic() + _GIVE_UP_WITHIN
            while not self._notice_request.Test() and time.monotonic() < deadline:
                time.sleep(0.0005)
        self._give_up(set(self._tickets))

    def split(self, members: list[int] | None, far: list[int]) -> MpiPump | None:
        """See `Pump`. Waits for all ranks, which have just met in the operation before."""
        if members is None:
            self._comm.Split(self._mpi.UNDEFINED, 0)
            return None
        # By the first member's rank: MPI's colors are smaller numbers than ours.
        comm = self._comm.Split(members[0], members.index(self._comm.Get_rank()))
        if not far:
            comm.Free()
            return None
        return MpiPump(comm, far)
