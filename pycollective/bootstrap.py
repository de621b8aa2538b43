"""How ranks find each other: from a launch to a `Communicator`.

`init` finds the launch: arguments, `pycollective run`, torchrun, mpiexec, or none (one rank).
`connect`, given a store, a rank and a size,

1. claims its rank, asks whether there is room, commits a mailbox in this process's shared memory,
   and listens on an abstract Unix socket;
2. publishes a record of it all in the store, and reads every other rank's (`meeting.py`);
3. attaches to each peer that is not attached yet (`attach.py`).

A rank reads `size` records of some 300 bytes and makes at most ``size - 1`` short connections. What
one rank finds wrong it tells through the store: all raise at once instead of waiting for it.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from pycollective import _core, host_memory, mpi_launch
from pycollective.attach import Listener, PeerAddress, attach_peers
from pycollective.communicator import Communicator
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError
from pycollective.meeting import Meeting, Record, is_full, this_process
from pycollective.store import StoreClient, StoreServer
from pycollective.world import World

MAX_RANKS = 64  # of one host: the width of the engine's masks
DEFAULT_TIMEOUT = 600.0
_LINGER = 5.0  # seconds

# What `pycollective run` tells its ranks.
ENV_RANK, ENV_SIZE = "PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE"
ENV_TOPOLOGY = "PYCOLLECTIVE_TOPOLOGY"
ENV_STORE, ENV_SECRET = "PYCOLLECTIVE_STORE", "PYCOLLECTIVE_SECRET"

# The process's node. All communicators share it, and torch makes each process group separately:
# were it not found again here, hundreds of groups would cost hundreds of segments and threads. The
# communicators own it; this only finds it.
_node: weakref.ref[_core.Node] | None = None
_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_exit_hook_set = False


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    store: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
    topology: str | None = None,
) -> Communicator:
    """Join the job's ranks; every rank must call it, as often as the others.

    Without arguments the launch is found from the environment: `pycollective run`, torchrun,
    mpiexec (through mpi4py), or none, which gives a communicator of one rank.

    Args:
        rank: this rank, 0 to ``size - 1``; with `size` and `store`, for programs that bootstrap
            themselves.
        size: number of ranks, at most 64, all on this host.
        store: where the ranks find each other: ``"tcp://host:port"``, at which rank 0 serves while
            the ranks meet, or an object with ``set(key, bytes)`` and a blocking ``get(key)``, such
            as a `torch.distributed.Store`, which must outlast the call on every rank. A store
            that has no more than those two serves one `init` only.
        timeout: seconds that joining, and later each operation, may take.
        topology: which ranks share a host, instead of what is found: ``"2x2"``, hosts x ranks a
            host, or ``"3,1"``, the ranks of each host; under mpiexec. Ranks of different hosts
            exchange nothing through shared memory, even if they could. Also the environment
            variable PYCOLLECTIVE_TOPOLOGY; the same on all ranks.

    Raises:
        ConfigurationError: the launch or the arguments cannot be right, or memory is short.
        CollectiveTimeout: not every rank came; the message names the absentees.
    """
    if not 0 < timeout < math.inf:
        raise ConfigurationError(f"timeout {timeout} is not a finite number of seconds above 0")
    topology = topology or os.environ.get(ENV_TOPOLOGY, "")
    if rank is not None or size is not None or store is not None:
        _refuse_hosts(topology, size or 1)
        return _init_explicit(rank, size, store, timeout)
    for launch in _LAUNCHES:
        if launch.detected():
            return launch.start(timeout, topology)
    _refuse_hosts(topology, 1)
    return connect(None, 0, 1, timeout)


def connect(
    store: Any, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT, prefix: str = ""
) -> Communicator:
    """Join `size` ranks through a store.

    Args:
        store: see `init`; may be None for one rank.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that joining, and later each operation, may take.
        prefix: of the keys; each group that is made through one store needs its own.

    Raises: see `init`.
    """
    joined = _join_host(store, rank, size, timeout, prefix)
    return _register(Communicator(*joined, timeout))


class _Joined(NamedTuple):
    """A group that shares memory, before it is a communicator; see there."""

    node: _core.Node
    rank: int
    tokens: list[bytes]
    offsets: list[int]
    slot_bytes: int


def _join_host(
    store: Any, rank: int, size: int, timeout: float, prefix: str, far: bool = False
) -> _Joined:
    """Join the ranks of this host; `far`: there are others on other hosts."""
    if not 1 <= size <= MAX_RANKS:
        raise ConfigurationError(f"size {size} is not 1 to {MAX_RANKS}, the most on one host")
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is not one of 0 to {size - 1}")
    if size == 1:
        node = _process_node()
        host_memory.check(node.mailbox_bytes(1, far), 1)
        offset, slot_bytes = node.allocate(1, far)
        return _Joined(node, 0, [node.token], [offset], slot_bytes)
    meeting = Meeting(store, rank, size, timeout, prefix)
    try:
        # The socket closes after the report: who finds it closed looks there for the reason.
        with ExitStack() as after, meeting.sharing_problems():
            return _meet_and_attach(meeting, after, rank, size, far)
    except BaseException as error:
        # Peers may have attached it or not: the next group had better begin with a new one.
        _forget_node()
        if isinstance(error, OSError):  # too many open files, say
            raise ConfigurationError(f"rank {rank} cannot join: {error}") from error
        raise


def _meet_and_attach(
    meeting: Meeting, after: ExitStack, rank: int, size: int, far: bool
) -> _Joined:
    meeting.claim()
    node = _process_node()
    host_memory.check(node.mailbox_bytes(size, far), size)
    offset, slot_bytes = node.allocate(size, far)
    listener = after.enter_context(closing(Listener()))
    records = meeting.exchange(
        Record(
            size=size,
            host=socket.gethostname(),
            token=node.token.hex(),
            offset=offset,
            slot_bytes=slot_bytes,
            socket_name=listener.name,
        )
    )
    peers = [
        PeerAddress(r, bytes.fromhex(each.token), each.socket_name, each.host)
        for r, each in enumerate(records)
    ]
    missing = [peer for peer in peers if not node.is_attached(peer.token)]
    attach_peers(
        node,
        listener,
        [peer for peer in missing if peer.rank < rank],
        [peer for peer in missing if peer.rank > rank],
        meeting.deadline,
        meeting.raise_problem,
    )
    meeting.confirm()
    return _Joined(
        node,
        rank,
        [peer.token for peer in peers],
        [each.offset for each in records],
        min(each.slot_bytes for each in records),
    )


def _process_node() -> _core.Node:
    """This process's node. A fork of a process needs one of its own."""
    global _node
    node = _node() if _node is not None else None
    if node is not None and not node.forked:
        return node
    node = _core.Node()
    _node = weakref.ref(node)
    return node


def _forget_node() -> None:
    global _node
    _node = None


def _register(communicator: Communicator) -> Communicator:
    global _exit_hook_set
    if not _exit_hook_set:
        _exit_hook_set = True
        atexit.register(_leave_all)
    _live.add(communicator)
    return communicator


def _leave_all() -> None:
    """Say goodbye at exit, so that the peers need not find out: the last chance for both sides."""
    crashed = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if isinstance(crashed, CollectiveError) and ENV_STORE in os.environ:
        _tell_launcher_that_others_failed()
    for communicator in list(_live):
        if communicator.closed:
            continue
        if communicator.pending:
            communicator.abort("the process exits with operations pending")
        elif crashed is not None:
            communicator.abort("the process exits with an exception")
        try:
            communicator.close()
        except CollectiveError:
            continue  # it had failed before; its own calls have said so
    if crashed is not None:
        mpi_launch.end_after_failure()


def followed_key(rank: int) -> str:
    """The key under which a rank tells `pycollective run` that it ends because of another."""
    return f"pycollective/followed/{rank}"


def _tell_launcher_that_others_failed() -> None:
    address, secret = os.environ[ENV_STORE], os.environ.get(ENV_SECRET, "")
    try:
        client = StoreClient(address, secret, timeout=1.0)
        client.set(followed_key(_environment_number(ENV_RANK)), b"")
        client.close()
    except (CollectiveTimeout, ConfigurationError):
        return  # the launcher has gone; it only makes its report more exact


def _next_prefix(store: Any, rank: int) -> str:
    """A prefix for this process's next `init` through this store, the same on all ranks."""
    if not is_full(store):
        return "init1"
    # Each process counts its own: a second one of the same rank meets the first, and is refused.
    return f"init{store.add(f'pycollective/inits/{rank}/{this_process()}', 1)}"


def _init_explicit(rank: int | None, size: int | None, store: Any, timeout: float) -> Communicator:
    if rank is None or size is None or (store is None and size != 1):
        raise ConfigurationError("init needs rank, size and store together, or none of them")
    if size == 1 or not 0 <= rank < size <= MAX_RANKS:
        return connect(store, rank, size, timeout)  # needs no store, or says what is wrong
    if not isinstance(store, str):
        return connect(store, rank, size, timeout, _next_prefix(store, rank))
    server = StoreServer(store) if rank == 0 else None
    return _meet_at(store, "", server, rank, size, timeout)


def _meet_at(
    address: str, secret: str, server: StoreServer | None, rank: int, size: int, timeout: float
) -> Communicator:
    """Join through a store that rank 0 serves for this one `init`."""
    with _store_at(address, secret, server, size, timeout) as client:
        communicator = connect(client, rank, size, timeout, "init")
        if server is not None:
            server.stop_listening()  # who comes from now on comes for the next `init`
        communicator.barrier()  # all have what they need
        return communicator


@contextmanager
def _store_at(
    address: str, secret: str, server: StoreServer | None, size: int, timeout: float
) -> Iterator[StoreClient]:
    """A client of a store that one rank serves, with `server`, until all have left it."""
    linger = _LINGER  # after a failure, so that the other ranks can read why
    try:
        with closing(StoreClient(address, secret, timeout)) as client:
            yield client
            linger = 0.0
    finally:
        if server is not None:
            server.close(linger, size)


@dataclass(frozen=True)
class _Launch:
    detected: Callable[[], bool]
    start: Callable[[float, str], Communicator]


def _environment_number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigurationError(f"the environment variable {name} is {value!r}, not a number")
    return int(value)


def _refuse_hosts(topology: str, size: int) -> None:
    """Refuse several hosts where there is nothing that could carry messages between them."""
    if not topology:
        return
    from pycollective.schedule import Topology

    if len(Topology.parse(topology, size).hosts) > 1:
        raise ConfigurationError(
            f"topology {topology!r}: between hosts messages go over MPI: start the ranks with "
            "mpiexec"
        )


def _start_run(timeout: float, topology: str) -> Communicator:
    rank, size = _environment_number(ENV_RANK), _environment_number(ENV_SIZE)
    _refuse_hosts(topology, size)
    address, secret = os.environ[ENV_STORE], os.environ.get(ENV_SECRET, "")
    if size == 1:
        return connect(None, rank, size, timeout)
    with closing(StoreClient(address, secret, timeout)) as client:
        return connect(client, rank, size, timeout, _next_prefix(client, rank))


def _start_torchrun(timeout: float, topology: str) -> Communicator:
    from torch.distributed import PrefixStore, rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    _refuse_hosts(topology, size)
    store = PrefixStore("pycollective", store)
    communicator = connect(store, rank, size, timeout, _next_prefix(store, rank))
    communicator.barrier()  # rank 0 may serve the store itself, and lets go of it here
    return communicator


def _start_mpiexec(timeout: float, topology: str) -> Communicator:
    launch = mpi_launch.agree(timeout, topology)
    if launch.size == 1:
        if launch.server is not None:
            launch.server.close()
        return connect(None, 0, 1, timeout)
    if len(set(launch.host_of)) == 1:
        if launch.server is not None:
            launch.server.start()
        return _meet_at(
            launch.address, launch.secret, launch.server, launch.rank, launch.size, timeout
        )
    world = World(launch.rank, launch.host_of, launch.pump())
    near = world.near
    with ExitStack() as stack:
        client = None
        with launch.sharing_problems() as all_agree:
            if launch.server is not None:
                launch.server.start()
            if len(near) > 1:
                store = _store_at(launch.address, launch.secret, launch.server, len(near), timeout)
                client = stack.enter_context(store)
            elif launch.server is not None:
                stack.callback(launch.server.close)
            joined = _join_host(
                client, near.index(launch.rank), len(near), timeout, "init", far=True
            )
            slot_bytes = min(all_agree(joined.slot_bytes))
        return _register(Communicator(*joined._replace(slot_bytes=slot_bytes), timeout, world))


# In this order: a launcher's own variables before those that others inherit.
_LAUNCHES = (
    _Launch(lambda: ENV_STORE in os.environ, _start_run),
    _Launch(
        lambda: all(
            name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        ),
        _start_torchrun,
    ),
    _Launch(mpi_launch.detected, _start_mpiexec),
)
