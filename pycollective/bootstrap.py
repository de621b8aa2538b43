"""How ranks find each other: from a launch to a `Communicator`.

`init` finds the launch: arguments, `pycollective run`, torchrun, or none (one rank). `connect`,
given a store, a rank and a size,

1. asks whether there is room, commits a mailbox in this process's shared memory, and listens on an
   abstract Unix socket;
2. publishes a record of it all in the store, and reads every other rank's;
3. attaches to each peer that is not attached yet (`attach.py`).

A rank reads `size` records of some 300 bytes and makes at most ``size - 1`` short connections. What
one rank finds wrong goes into its record, so that all raise at once instead of waiting for it.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from pycollective import _core, host_memory
from pycollective.attach import Listener, PeerAddress, attach_peers
from pycollective.communicator import Communicator
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError
from pycollective.store import StoreClient, StoreServer
from pycollective.version import VERSION

MAX_RANKS = 64  # of one host: the width of the engine's masks
DEFAULT_TIMEOUT = 600.0

# What `pycollective run` tells its ranks.
ENV_RANK, ENV_SIZE = "PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE"
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
) -> Communicator:
    """Join the job's ranks; every rank must call it, as often as the others.

    Without arguments the launch is found from the environment: `pycollective run`, torchrun, or
    neither, which gives a communicator of one rank.

    Args:
        rank: this rank, 0 to ``size - 1``; with `size` and `store`, for programs that bootstrap
            themselves.
        size: number of ranks, at most 64, all on this host.
        store: where the ranks find each other: ``"tcp://host:port"``, at which rank 0 serves while
            the ranks meet, or an object with ``set(key, bytes)`` and a blocking ``get(key)``, such
            as a `torch.distributed.Store`. A store that has no ``add`` serves one `init` only.
        timeout: seconds that joining, and later each operation, may take.

    Raises:
        ConfigurationError: the launch or the arguments cannot be right, or memory is short.
        CollectiveTimeout: not every rank came; the message names the absentees.
    """
    if not timeout > 0:
        raise ConfigurationError(f"timeout {timeout} is not a number of seconds above 0")
    if rank is not None or size is not None or store is not None:
        return _init_explicit(rank, size, store, timeout)
    for launch in _LAUNCHES:
        if launch.detected():
            return launch.start(timeout)
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
    if not 1 <= size <= MAX_RANKS:
        raise ConfigurationError(f"size {size} is not 1 to {MAX_RANKS}, the most on one host")
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is not one of 0 to {size - 1}")
    node, first = _process_node()
    if size == 1:
        offset, slot_bytes = node.allocate(1)
        return _register(Communicator(node, 0, [node.token], [offset], slot_bytes, timeout))

    meeting = _Meeting(store, rank, size, timeout, prefix)
    meeting.claim()
    listener = Listener(size)
    try:
        record = _Record(
            version=VERSION, size=size, host=socket.gethostname(), token=node.token.hex()
        )
        try:
            host_memory.check(_core.mailbox_bytes(size, first))
            record.offset, record.slot_bytes = node.allocate(size)
            record.socket_name = listener.name
        except ConfigurationError as error:
            record.problem = str(error)
        records = meeting.exchange(record)
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
        )
    finally:
        listener.close()
    return _register(
        Communicator(
            node,
            rank,
            [peer.token for peer in peers],
            [each.offset for each in records],
            min(each.slot_bytes for each in records),
            timeout,
        )
    )


@dataclass
class _Record:
    """What a rank publishes."""

    version: str
    size: int
    host: str
    token: str
    offset: int = 0
    slot_bytes: int = 0
    socket_name: str = ""
    problem: str = ""


class _Meeting:
    """One exchange of records through a store, within a deadline."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, prefix: str) -> None:
        if not (hasattr(store, "set") and hasattr(store, "get")):
            raise ConfigurationError(
                f"store is {store!r}: give tcp://host:port, or an object with set(key, bytes) and a "
                "blocking get(key)"
            )
        self._store = store
        self._rank, self._size = rank, size
        self._prefix = f"pycollective/{prefix}/"
        self._timeout = timeout
        self.deadline = monotonic() + timeout

    def claim(self) -> None:
        """Refuse a second process with this rank, where the store can count."""
        if hasattr(self._store, "add"):
            claims = self._store.add(f"{self._prefix}claim/{self._rank}", 1)
            if claims > 1:
                raise ConfigurationError(
                    f"{claims} processes claim rank {self._rank}: each needs a rank of its own, or "
                    "each new group its own prefix"
                )

    def exchange(self, record: _Record) -> list[_Record]:
        """Publish one's own record, and read all."""
        self._store.set(self._key(self._rank), json.dumps(record.__dict__).encode())
        records = [self._read(r) for r in range(self._size)]
        for r, each in enumerate(records):
            if each.problem:
                where = "" if r == self._rank else f"rank {r}: "
                raise ConfigurationError(where + each.problem)
            if each.size != self._size:
                raise ConfigurationError(
                    f"rank {r} was given size {each.size} and rank {self._rank} size {self._size}"
                )
            if each.version != VERSION:
                raise ConfigurationError(
                    f"rank {r} runs pycollective {each.version} and rank {self._rank} {VERSION}"
                )
        return records

    def _key(self, rank: int) -> str:
        return f"{self._prefix}{rank}"

    def _read(self, rank: int) -> _Record:
        key = self._key(rank)
        if hasattr(self._store, "wait"):
            left = timedelta(seconds=max(0.001, self.deadline - monotonic()))
            try:
                self._store.wait([key], left)
            except RuntimeError as error:  # torch's stores raise kinds of it
                if monotonic() < self.deadline:
                    raise
                raise self._absent() from error
        raw = json.loads(self._store.get(key))
        return _Record(**{name: raw[name] for name in _Record.__dataclass_fields__ if name in raw})

    def _absent(self) -> CollectiveTimeout:
        missing = [
            r
            for r in range(self._size)
            if r != self._rank
            and not (hasattr(self._store, "check") and self._store.check([self._key(r)]))
        ]
        return CollectiveTimeout(
            f"init timed out on rank {self._rank} after {self._timeout:g} s: rank(s) "
            f"{', '.join(map(str, missing))} of {self._size} did not come",
            self._rank,
            "init",
        )


def _process_node() -> tuple[_core.Node, bool]:
    """This process's node, and whether it is new. A fork of a process needs one of its own."""
    global _node
    node = _node() if _node is not None else None
    if node is not None and not node.forked:
        return node, False
    node = _core.Node()
    _node = weakref.ref(node)
    return node, True


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


def _numbered(store: Any, rank: int) -> str:
    """A prefix for the next `init` through this store, the same on all ranks."""
    number = store.add(f"pycollective/inits/{rank}", 1) if hasattr(store, "add") else 1
    return f"init{number}"


def _init_explicit(rank: int | None, size: int | None, store: Any, timeout: float) -> Communicator:
    if rank is None or size is None or (store is None and size != 1):
        raise ConfigurationError("init needs rank, size and store together, or none of them")
    if not isinstance(store, str):
        prefix = "" if store is None else _numbered(store, rank)
        return connect(store, rank, size, timeout, prefix)
    server = StoreServer(store) if rank == 0 and size > 1 else None
    client = None
    try:
        client = StoreClient(store, timeout=timeout) if size > 1 else None
        communicator = connect(client, rank, size, timeout, "init")
        communicator.barrier()  # all have what they need: rank 0 may stop serving
        return communicator
    finally:
        if client is not None:
            client.close()
        if server is not None:
            server.close()


@dataclass(frozen=True)
class _Launch:
    detected: Callable[[], bool]
    start: Callable[[float], Communicator]


def _environment_number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigurationError(f"the environment variable {name} is {value!r}, not a number")
    return int(value)


def _start_run(timeout: float) -> Communicator:
    rank, size = _environment_number(ENV_RANK), _environment_number(ENV_SIZE)
    client = StoreClient(os.environ[ENV_STORE], os.environ.get(ENV_SECRET, ""), timeout)
    try:
        return connect(client, rank, size, timeout, _numbered(client, rank))
    finally:
        client.close()


def _start_torchrun(timeout: float) -> Communicator:
    from torch.distributed import PrefixStore, rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store = PrefixStore("pycollective", store)
    return connect(store, rank, size, timeout, _numbered(store, rank))


def _start_mpiexec(timeout: float) -> Communicator:
    raise ConfigurationError(
        "this looks like a launch by mpiexec, which this version cannot join yet: start the ranks "
        "with `pycollective run -n N` or torchrun, or call init(rank=, size=, store=)"
    )


# In this order: a launcher's own variables before those that others inherit.
_LAUNCHES = (
    _Launch(lambda: ENV_STORE in os.environ, _start_run),
    _Launch(
        lambda: all(
            name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        ),
        _start_torchrun,
    ),
    _Launch(
        lambda: "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ, _start_mpiexec
    ),
)
