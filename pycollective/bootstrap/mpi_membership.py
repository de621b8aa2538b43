"""Membership over MPI: its own `Shrink` finds who is left, where it goes on after a death (ULFM).

Each attempt makes a smaller communicator of MPI's, over which the ranks that live say whether they
stay, and join as in `init`. Then they agree whether all have joined. A rank that fails revokes
MPI's communicator, so that nobody waits for it there.

Open MPI's non-blocking `Ishrink` aborts where a rank has died, so calls of MPI that block run on a
thread of their own, and are waited for until the deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

from pycollective.bootstrap import mpi
from pycollective.bootstrap.membership import begin_shrink, close_failed
from pycollective.bootstrap.options import InitOptions
from pycollective.communicator import Communicator
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError, PeerFailure
from pycollective.system_limits import start_thread

T = TypeVar("T")


@dataclass(frozen=True)
class MpiMembership:
    """How the ranks of a communicator over MPI become fewer.

    Attributes:
        world: MPI's communicator of the ranks, in their order.
        options: as `init` was given them.
        left: as `Membership` has it.
    """

    world: Any
    options: InitOptions
    left: dict[int, str] = field(default_factory=dict)
    open_store = None
    next_newcomer = ""

    @classmethod
    def of(cls, world: Any, options: InitOptions) -> MpiMembership | None:
        """Return it for the ranks of `world`; None where mpi4py (before 4.1) knows no `Shrink`."""
        if not hasattr(world, "Shrink"):
            return None
        return cls(world, options)

    def shrink(self, comm: Communicator) -> Communicator:
        """`Communicator.shrink`."""
        made = self._change(comm, stays=True, why="")
        assert made is not None
        return made

    def leave(self, comm: Communicator, why: str) -> None:
        """`Communicator.leave`, with the others."""
        self._change(comm, stays=False, why=why)

    def grow(self, comm: Communicator) -> Communicator:
        """`Communicator.grow`: refused."""
        raise ConfigurationError(
            "grow: mpiexec starts no rank in place of another: start the ranks by `pycollective "
            "run --elastic`"
        )

    def _change(self, comm: Communicator, stays: bool, why: str) -> Communicator | None:
        from mpi4py import MPI

        begin_shrink(comm)
        try:
            return self._change_by_mpi(comm, stays, why)
        except MPI.Exception as error:
            raise PeerFailure(f"MPI does not go on after a death: {error}", comm.rank) from error

    def _change_by_mpi(self, comm: Communicator, stays: bool, why: str) -> Communicator | None:
        from mpi4py import MPI

        deadline = monotonic() + comm.timeout
        mine = comm.rank, comm.host_of[comm.rank], stays, why
        world, attempt = self.world, 0
        while True:
            attempt += 1
            world, size = _within(deadline, comm, world.Shrink), world.Get_size()
            made = error = None
            try:
                made = self._join_over(world, mine, comm, deadline)
            except BaseException as raised:
                error = raised
                world.Revoke()
                if not isinstance(raised, (CollectiveError, ConfigurationError, MPI.Exception)):
                    raise
            with suppress(MPI.Exception):  # another has died: all are told
                if _within(deadline, comm, lambda: world.Agree(int(error is None))):  # noqa: B023
                    close_failed(comm)
                    return made
            if made is not None:
                close_failed(made)
            # If it was not that another has died, it will not be better next time.
            wrong = isinstance(error, ConfigurationError) and attempt > 1
            if error and ((wrong and size == world.Get_size()) or monotonic() > deadline):
                raise error

    def _join_over(
        self, world: Any, mine: tuple[int, int, bool, str], comm: Communicator, deadline: float
    ) -> Communicator | None:
        from mpi4py import MPI

        said = _within(deadline, comm, lambda: world.allgather(mine))
        left = {rank: why for rank, _, stays, why in said if not stays}
        if left:
            color = 0 if mine[2] else MPI.UNDEFINED
            world = _within(deadline, comm, lambda: world.Split(color))
            if world == MPI.COMM_NULL:
                return None
        hosts = Counter(host for _, host, stays, _ in said if stays)
        topology = ",".join(map(str, hosts.values())) if self.options.topology else ""
        bootstrap = mpi.MpiBootstrap(max(0.1, deadline - monotonic()), world)
        with bootstrap.sharing_problems():
            options = replace(self.options, topology=topology)
            made = options.apply(mpi.start(bootstrap, options))
        made.timeout = comm.timeout
        made._membership = replace(self, world=world, left=left)
        return made


def _within(deadline: float, comm: Communicator, call: Callable[[], T]) -> T:
    """Return what a call of MPI's does that all ranks make; wait until the deadline."""
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="pycollective-mpi", daemon=True)
    start_thread(thread)
    thread.join(max(0.0, deadline - monotonic()))
    if raised:
        raise raised[0]
    if not done:
        raise CollectiveTimeout(
            f"shrink timed out on rank {comm.rank} after {comm.timeout:g} s: not all ranks that "
            "live have called it",
            comm.rank,
            "shrink",
        )
    return done[0]
