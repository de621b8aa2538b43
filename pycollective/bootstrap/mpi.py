"""Joins the ranks that mpiexec started: through mpi4py they tell each other where to meet.

There is no store of all ranks. What must be the same, and who is where, goes by way of rank 0 in
small messages, in rounds: each rank says something, rank 0 decides from all of it, and answers
each. A rank that cannot go on says so at any time, and rank 0 passes it on, so that all raise at
once. The ranks of a host then meet as under any other launcher, in a store that the first of them
serves. Those of several hosts have MPI between them.

Nothing here waits without a deadline, and no receive is left behind: a message is looked for first,
and received when it is there.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pycollective import placement
from pycollective.bootstrap.attach import host_identity
from pycollective.bootstrap.joining import (
    Joined,
    forgetting_node,
    join_alone,
    join_host,
    shared_memory_alone,
)
from pycollective.bootstrap.options import InitOptions
from pycollective.bootstrap.rendezvous import Rendezvous, raise_reported, report_of
from pycollective.bootstrap.shutdown import SHUTDOWN
from pycollective.bootstrap.store import StoreClient, StoreServer
from pycollective.communicator import Communicator
from pycollective.config import (
    INSTALL_MPI4PY,
    MPI_RANK_VARIABLES,
    MPI_SIZE_VARIABLES,
    VERSION,
)
from pycollective.errors import CollectiveTimeout, ConfigurationError, named
from pycollective.planning.planner import describe, load
from pycollective.planning.world import World
from pycollective.transport.mpi import MpiTransport

if TYPE_CHECKING:
    from pycollective.schedule.select import Table

_EAGER = 0.002  # seconds of looking without a pause
_POLL = 0.0005  # seconds between looks after that
_GRACE = 1.0  # seconds that others wait longer than rank 0, so that it can name the absent
_LINGER = 0.5  # seconds that a host's store stays after a failure; ranks hear why by MPI, too
_TAG_BELOW_LAST = 7  # far from the tags that programs choose


class _Message(NamedTuple):
    source: int
    init: int  # the number of the `init` that it belongs to
    report: str  # of the problem that ends it; empty where it goes on
    value: Any


class _Process:
    """What this process keeps from one `init` to the next, also of those that failed."""

    def __init__(self) -> None:
        # Ranks count their calls of `init` alike: a message of an earlier one comes too late.
        self._numbers = itertools.count(1)
        self._early: list[_Message] = []  # of an `init` that this rank has not come to
        self._unsent: list[Any] = []  # sends that nobody took: their memory is MPI's until the end
        self._duplicate: tuple[Any, Any] | None = None
        self._duplicated: Any = None

    def next_number(self) -> int:
        """Return the number of a new `init`."""
        return next(self._numbers)

    def put_off(self, message: _Message) -> None:
        """Keep a message of an `init` that is still to come."""
        self._early.append(message)

    def take_up(self, number: int) -> _Message | None:
        """Return a message that was put off, of the `init` of that number or an earlier one."""
        for index, message in enumerate(self._early):
            if message.init <= number:
                return self._early.pop(index)
        return None

    def keep_sent(self, request: Any) -> None:
        """Keep a send, with its memory, for as long as it goes on."""
        self._unsent.append(request)

    def forget_sent(self) -> None:
        """Forget the sends that have ended."""
        self._unsent = [request for request in self._unsent if not request.test()[0]]

    def duplicate(self, world: Any) -> tuple[Any, Any]:
        """Return a duplicate of MPI's world and the request that makes it; begin it if need be.

        MPI matches duplicates by their order on each rank, so the next `init` goes on with one that
        was begun in an `init` that failed.
        """
        if self._duplicate is None or self._duplicated != world:
            self._duplicate, self._duplicated = world.Idup(), world
        return self._duplicate

    def part_with_duplicate(self) -> None:
        """Make another duplicate next time: all ranks have this one."""
        self._duplicate = None


PROCESS = _Process()


class MpiBootstrap:
    """The messages of one `init` among all ranks of ``MPI.COMM_WORLD``, or of `world`.

    Each rank must make as many as the others. Initialises MPI where the program has not.

    Args:
        timeout: seconds that it may take in all.
        world: another communicator of MPI's.

    Raises:
        ConfigurationError: mpi4py is missing, or belongs to another MPI than mpiexec.
    """

    def __init__(self, timeout: float, world: Any = None) -> None:
        self.world = world or _world()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        # Of a world of its own there is one `init`.
        self._number = PROCESS.next_number() if world is None else 0
        self._tag = _tag()
        self._ended = False  # by a report that has gone out
        self._heard = ""  # the report of another rank
        self._gone: set[int] = set()  # ranks that have reported, and listen no more
        self._ahead: list[_Message] = []  # for the next round

    def exchange(self, mine: Any, decide: Callable[[list[Any]], Callable[[int], Any]]) -> Any:
        """Say `mine`; once all ranks have said theirs, return this rank's answer.

        Args:
            mine: anything small that can be pickled.
            decide: called on rank 0: from what all have said, in rank order, makes a function from
                a rank to its answer.

        Raises:
            CollectiveTimeout: names the ranks that did not come.
            CollectiveError, ConfigurationError: what another rank has reported.
        """
        if self.rank != 0:
            self._send(0, mine)
            absent = "rank 0 did not come, or has not heard of all others"
            return self.poll_until(self._receive, lambda: absent, _GRACE).value
        said: dict[int, Any] = {0: mine, **{each.source: each.value for each in self._ahead}}
        self._ahead.clear()

        def all_have_come() -> bool:
            while (message := self._receive()) is not None:
                said[message.source] = message.value
            return len(said) == self.size

        self.poll_until(all_have_come, lambda: self._absent(said))
        answer = decide([said[rank] for rank in range(self.size)])
        sends = [self._send(other, answer(other)) for other in range(1, self.size)]
        _await_sent(sends, _GRACE)  # perhaps this rank calls MPI no more, and nothing moves then
        return answer(0)

    def poll_until(
        self, done: Callable[[], Any], what_is_missing: Callable[[], str], grace: float = 0.0
    ) -> Any:
        """Call `done` until it returns something true, and return that; or until the deadline."""
        eager = time.monotonic() + _EAGER
        while not (result := done()):
            now = time.monotonic()
            if now > self.deadline + grace:
                raise CollectiveTimeout(
                    f"init timed out on rank {self.rank} after {self.timeout:g} s: "
                    f"{what_is_missing()}",
                    self.rank,
                    "init",
                )
            time.sleep(0 if now < eager else _POLL)
        return result

    def raise_problem(self) -> None:
        """Raise what another rank has reported, now or before; does not wait."""
        if self._heard:
            raise_reported(self._heard, self.rank)
        while (message := self._receive()) is not None:
            self._ahead.append(message)

    def listen(self, seconds: float) -> None:
        """Raise what another rank reports within this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.raise_problem()
            time.sleep(_POLL)

    @contextmanager
    def sharing_problems(self) -> Iterator[None]:
        """Tell all other ranks what ends the block. Blocks may be nested."""
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        if self._ended:
            return
        self._ended = True
        text = report_of(error, self.rank)
        others = range(1, self.size) if self.rank == 0 else [0]
        listening = [other for other in others if other not in self._gone]
        _await_sent([self._send(other, None, text) for other in listening], _GRACE)

    def _send(self, other: int, value: Any, report: str = "") -> Any:
        request = self.world.isend((self._number, report, value), other, self._tag)
        PROCESS.keep_sent(request)
        return request

    def _receive(self) -> _Message | None:
        """Return a message of this `init`, if one has come; raise a report."""
        while (message := self._take()) is not None:
            if message.init < self._number:
                continue
            if message.init > self._number:
                PROCESS.put_off(message)
                self._gone.add(message.source)
                raise ConfigurationError(
                    f"rank {message.source} has begun another init than rank {self.rank}: all must "
                    "call it as often"
                )
            if message.report:
                self._gone.add(message.source)
                self._heard = message.report
                raise_reported(message.report, self.rank)
            return message
        return None

    def _take(self) -> _Message | None:
        message = PROCESS.take_up(self._number)
        if message is not None:
            return message
        from mpi4py import MPI

        status = MPI.Status()
        source = MPI.ANY_SOURCE if self.rank == 0 else 0
        found = self.world.improbe(source, self._tag, status)
        if found is None:
            return None
        request = found.irecv()
        done, told = request.test()
        while not done:  # its end is on the way
            if time.monotonic() > self.deadline + _GRACE:
                raise CollectiveTimeout(
                    f"init timed out on rank {self.rank}: a message did not arrive whole",
                    self.rank,
                    "init",
                )
            done, told = request.test()
        return _Message(status.Get_source(), *told)

    def _absent(self, said: dict[int, Any]) -> str:
        absent = [rank for rank in range(self.size) if rank not in said]
        return f"{named(absent)} of {self.size} did not come"


def _await_sent(sends: list[Any], seconds: float) -> None:
    """Let sends go on until all have been taken, or for so long."""
    end = time.monotonic() + seconds
    while not all(request.test()[0] for request in sends) and time.monotonic() < end:
        time.sleep(_POLL)
    PROCESS.forget_sent()


def _tag() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)) - _TAG_BELOW_LAST


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigurationError(
            f"this is a launch by mpiexec, which is joined through mpi4py: {error}. "
            f"{INSTALL_MPI4PY}, or start the ranks with `pycollective run -n N` or torchrun"
        ) from error
    if MPI.Is_finalized():
        raise ConfigurationError("MPI has been finalized: call init before that")
    world = MPI.COMM_WORLD
    sizes = [("mpiexec", os.environ[name]) for name in MPI_SIZE_VARIABLES if name in os.environ]
    if not sizes and world.Get_size() == 1:  # srun --mpi=pmix says no other
        sizes = [("srun", os.environ.get("SLURM_STEP_NUM_TASKS", ""))]
    for launcher, size in sizes:
        if size.isdigit() and int(size) != world.Get_size():
            way = "mpiexec" if launcher == "mpiexec" else "way of `srun --mpi`"
            raise ConfigurationError(
                f"{launcher} has started {size} ranks, and mpi4py sees {world.Get_size()}: it "
                f"belongs to another MPI ({MPI.Get_library_version().split(',')[0].strip()}). Use "
                f"that one's {way}, or the mpi4py of this one; under Slurm, `srun --mpi=none` "
                "starts ranks that need none"
            )
    return world


class _Said(NamedTuple):
    """What a rank says of itself first."""

    version: str
    options: str  # the options of `init` that must be the same on all ranks
    identity: str  # of its host
    host: str  # for messages
    address: str  # of the store that it would serve to its host
    secret: str


class _Answer(NamedTuple):
    """What rank 0 answers."""

    host_of: str  # packed
    on_machine: int
    address: str
    secret: str
    id: int  # of the communicator


@dataclass(frozen=True)
class Launch:
    """The ranks that mpiexec started, as they have told each other.

    Attributes:
        bootstrap: of all ranks, still going on.
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        address: of the store where this host's ranks meet.
        secret: what its clients must present.
        server: of that store, on the first rank of each host; not started.
        table: measured times, the same on all ranks; None for none.
        on_machine: ranks on this machine.
        id: of the communicator that they make, the same on all.
    """

    bootstrap: MpiBootstrap
    host_of: tuple[int, ...]
    address: str
    secret: str
    server: StoreServer | None
    table: Table | None
    on_machine: int
    id: int

    def transport(self) -> MpiTransport:
        """Make the messages between all ranks. Every rank must call it, as the last step.

        All ranks have agreed that they have it before it is returned.
        """
        comm, request = PROCESS.duplicate(self.bootstrap.world)

        def duplicated() -> bool:
            self.bootstrap.raise_problem()
            return bool(request.Test())

        self.bootstrap.poll_until(
            duplicated, lambda: "not all ranks have duplicated MPI's communicator"
        )
        transport = MpiTransport(comm, list(range(self.bootstrap.size)), self.bootstrap.timeout)
        self.bootstrap.exchange(None, lambda said: lambda rank: True)
        PROCESS.part_with_duplicate()
        return transport

    @contextmanager
    def store(self) -> Iterator[StoreClient | None]:
        """Connect to the store of this host's ranks; None where there is but one of them."""
        linger = _LINGER
        try:
            # Told before the store ends: who finds it closed can hear why.
            with ExitStack() as stack, self.bootstrap.sharing_problems(), self._reason():
                store = None
                if self.host_of.count(self.host_of[self.bootstrap.rank]) > 1:
                    if self.server is not None:
                        self.server.start()
                    left = max(0.1, self.bootstrap.deadline - time.monotonic())
                    client = StoreClient(
                        self.address, self.secret, left, self.bootstrap.raise_problem
                    )
                    store = stack.enter_context(closing(client))
                yield store
                linger = 0.0
        finally:
            self.end_server(linger)

    @contextmanager
    def _reason(self) -> Iterator[None]:
        """Where a store has ended, raise what the rank says that ended it."""
        try:
            yield
        except ConfigurationError as error:
            if isinstance(error.__cause__, OSError):
                self.bootstrap.listen(_LINGER / 2)
            raise

    def end_server(self, linger: float = 0.0) -> None:
        """Close this rank's server, if it has one."""
        if self.server is not None:
            self.server.close(linger)


def detected() -> bool:
    """Return whether mpiexec has started this process."""
    return any(name in os.environ for name in MPI_RANK_VARIABLES)


def start(bootstrap: MpiBootstrap, options: InitOptions) -> Communicator:
    """Join all ranks. Every rank must call it, in a block of ``bootstrap.sharing_problems()``.

    Raises:
        ConfigurationError: the topology does not fit, or what must be the same differs between
            ranks, or the table cannot be read, or a host has too many ranks.
        CollectiveTimeout: not every rank came.
    """
    launch = find_hosts(bootstrap, options)
    several = any(launch.host_of)
    if several and options.transport == "shm":
        launch.end_server()
        raise shared_memory_alone(launch.host_of)
    with forgetting_node():
        with launch.store() as store:
            joined = _join_host(launch, store, several)
            # All have what they need from the stores, and all join or none.
            data_bytes = bootstrap.exchange(joined.data_bytes, lambda said: lambda rank: min(said))
        transport = launch.transport() if several else None
    world = World(
        bootstrap.rank, launch.host_of, transport, launch.table, launch.on_machine, launch.id
    )
    joined = joined._replace(data_bytes=data_bytes)
    communicator = Communicator._of(*joined, options.timeout, world)
    SHUTDOWN.arrange()
    return communicator


def _join_host(launch: Launch, store: StoreClient | None, several: bool) -> Joined:
    if store is None:
        return join_alone(several)
    bootstrap = launch.bootstrap
    ranks = World(bootstrap.rank, launch.host_of).local_ranks
    rendezvous = Rendezvous(
        store,
        ranks.index(bootstrap.rank),
        len(ranks),
        bootstrap.timeout,
        "host",
        deadline=bootstrap.deadline,
        ranks=ranks,
        check_elsewhere=bootstrap.raise_problem,
    )
    return join_host(rendezvous, several)


def find_hosts(bootstrap: MpiBootstrap, options: InitOptions) -> Launch:
    """Agree with all ranks on who shares a host and where they meet; raises as `start`."""
    address = f"unix:@pycollective-{os.getpid()}-{os.urandom(6).hex()}"
    secret = os.urandom(16).hex()
    table = load(options.tuning)
    same = (
        f"topology {options.topology!r}, transport {options.transport or 'any'}, "
        f"{describe(table)}, {options.more}"
    )
    # It stands before anyone hears of it; most are not needed.
    server = StoreServer(address, secret, start=False)
    try:
        mine = _Said(VERSION, same, host_identity(), socket.gethostname(), address, secret)
        answer = _Answer(*bootstrap.exchange(tuple(mine), _decide(options.topology)))
        host_of = placement.unpack(answer.host_of, bootstrap.size)
        if answer.address != address:
            server.close()
        return Launch(
            bootstrap,
            host_of,
            answer.address,
            answer.secret,
            server if answer.address == address else None,
            table,
            answer.on_machine,
            answer.id,
        )
    except BaseException:
        server.close()
        raise


def _decide(topology: str) -> Callable[[list[Any]], Callable[[int], Any]]:
    """Return how rank 0 finds each rank's answer from what all have said."""

    def decide(said: list[Any]) -> Callable[[int], Any]:
        from pycollective.schedule import Topology

        ranks = [_Said(*each) for each in said]
        for other, theirs in enumerate(ranks):
            if theirs.version != VERSION:
                raise ConfigurationError(
                    f"rank {other} runs pycollective {theirs.version} and rank 0 {VERSION}"
                )
            if theirs.options != ranks[0].options:
                raise ConfigurationError(
                    f"rank 0 was given {ranks[0].options} and rank {other} {theirs.options}"
                )
        machines = placement.number_hosts([each.identity for each in ranks])
        host_of = Topology.parse(topology, len(said)).host_of if topology else machines
        placement.check_hosts(host_of, () if topology else [each.host for each in ranks])
        first = [host_of.index(host) for host in range(max(host_of) + 1)]
        on_machine = [machines.count(machine) for machine in range(max(machines) + 1)]
        packed = placement.pack(host_of)
        number = int.from_bytes(os.urandom(8), "little")

        def answer(rank: int) -> Any:
            server = ranks[first[host_of[rank]]]
            return packed, on_machine[machines[rank]], server.address, server.secret, number

        return answer

    return decide
