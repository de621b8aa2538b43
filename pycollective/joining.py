"""How ranks that have a store, a rank and a size become a `Communicator`.

1. They tell each other which host they are on (or are said to be on), and what must be the same on
   all, all through the store.
2. Those of a host meet: each asks whether there is room, commits a mailbox in its process's shared
   memory, listens on an abstract Unix socket, publishes a record of it all (`meeting.py`), reads
   the others', and attaches each peer that is not attached yet (`attach.py`).
3. Where there are several hosts, all tell each other that they have got so far, and connect.

A rank reads `size` records of some 300 bytes twice, and makes at most ``size - 1`` short
connections on its host. What one rank finds wrong it tells through the store: all raise at once
instead of waiting for it.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from pycollective import _core, host_memory
from pycollective.attach import Listener, PeerAddress, attach_peers
from pycollective.communicator import Communicator
from pycollective.errors import ConfigurationError
from pycollective.host import host_identity
from pycollective.leaving import leave_at_exit
from pycollective.meeting import Meeting, Record
from pycollective.tuned import describe, load
from pycollective.world import World

MAX_RANKS = 64  # the width of the engine's masks
DEFAULT_TIMEOUT = 600.0

# The process's node. All communicators share it, and torch makes each process group separately:
# were it not found again here, hundreds of groups would cost hundreds of segments and threads. The
# communicators own it; this only finds it.
_node: weakref.ref[_core.Node] | None = None


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: float = DEFAULT_TIMEOUT,
    prefix: str = "",
    played: Sequence[int] = (),
    transport: str = "",
    tuning: str = "",
) -> Communicator:
    """Join `size` ranks through a store.

    Args:
        store: see `pycollective.init`; may be None for one rank.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that joining, and later each operation, may take.
        prefix: of the keys; each group that is made through one store needs its own.
        played: the host of each rank, numbered from 0 in the order of their first ranks, where
            they are not to be found out.
        transport: between hosts, ``"c10d"``; ``"shm"`` refuses several hosts.
        tuning: file of a tuning table; empty for none.

    Raises: see `pycollective.init`.
    """
    check_place(rank, size)
    if size == 1:
        world = World.on_one_host(0, 1, load(tuning))
        return leave_at_exit(Communicator(*join_alone(), timeout, world))
    places = _Places(store, rank, size, timeout, prefix, tuple(played), transport, tuning)
    if len(set(places.host_of)) == 1:
        world = World.on_one_host(rank, size, places.table)
        return leave_at_exit(Communicator(*join_host(places.meeting("host")), timeout, world))
    if transport == "shm":
        raise shared_memory_alone(places.host_of)
    return leave_at_exit(_connect_hosts(places))


def check_place(rank: int, size: int) -> None:
    """Refuse what cannot be a rank among so many."""
    if not 1 <= size <= MAX_RANKS:
        raise ConfigurationError(f"size {size} is not 1 to {MAX_RANKS}, the most there can be")
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is not one of 0 to {size - 1}")


def shared_memory_alone(host_of: Sequence[int]) -> ConfigurationError:
    """What a user is told who wants transport "shm" for ranks of several hosts."""
    return ConfigurationError(
        f"transport 'shm' is for one host, and the {len(host_of)} ranks are on "
        f"{len(set(host_of))}: leave transport out, or start them on one"
    )


class _Places:
    """Which rank is on which host, as all ranks have told each other.

    Attributes:
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        one_machine: whether all could reach each other without a network.
        beside: ranks on this machine.
        table: measured times, the same on all; None for none.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        prefix: str,
        played: tuple[int, ...],
        transport: str,
        tuning: str,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.timeout, self.prefix = timeout, prefix
        meeting = Meeting(store, rank, size, timeout, prefix)
        self.deadline = meeting.deadline
        with meeting.sharing_problems():
            meeting.claim()
            self.table = load(tuning)
            wishes = f"topology {_described(played)}", f"transport {transport or 'any'}"
            mine = Record(
                size=size,
                host=socket.gethostname(),
                identity=host_identity(),
                wish=", ".join((*wishes, describe(self.table))),
            )
            records = meeting.exchange(mine)
            for other, each in enumerate(records):
                if each.wish != mine.wish:
                    raise ConfigurationError(
                        f"rank {rank} was given {mine.wish} and rank {other} {each.wish}"
                    )
            meeting.confirm()  # nobody goes on to meet those who do not
        identities = [each.identity for each in records]
        self.one_machine = len(set(identities)) == 1
        self.beside = identities.count(identities[rank])
        numbers: dict[str, int] = {}
        found = tuple(numbers.setdefault(each, len(numbers)) for each in identities)
        self.host_of = played or found

    def meeting(self, name: str, ranks: Sequence[int] = ()) -> Meeting:
        """A meeting of some of the ranks, or of all, until the same deadline."""
        numbers = list(ranks) or list(range(self.size))
        return Meeting(
            self.store,
            numbers.index(self.rank),
            len(numbers),
            self.timeout,
            f"{self.prefix}/{name}",
            deadline=self.deadline,
            numbers=numbers,
        )


def _described(played: tuple[int, ...]) -> str:
    return f"hosts {','.join(map(str, played))}" if played else "as found"


def _connect_hosts(places: _Places) -> Communicator:
    from pycollective.transport.c10d import C10dTransport, MessageStore

    rank, size = places.rank, places.size
    world = World(rank, places.host_of)
    near = world.near
    host = places.host_of[rank]
    whole = places.meeting("all")
    with whole.sharing_problems():
        joined = join_host(places.meeting(f"host{host}", near), far=True)
        store = MessageStore(places.store, rank, places.one_machine)
        records = whole.exchange(
            Record(size=size, slot_bytes=joined.slot_bytes, address=store.address)
        )
        store.reach(records[0].address, places.timeout)
        transport = C10dTransport(
            store, f"{places.prefix}/messages", rank, size, places.timeout
        )
        whole.confirm()
    joined = joined._replace(slot_bytes=min(each.slot_bytes for each in records))
    world = World(rank, places.host_of, transport, places.table, places.beside)
    return Communicator(*joined, places.timeout, world)


class Joined(NamedTuple):
    """A group that shares memory, before it is a communicator; see there."""

    node: _core.Node
    rank: int
    tokens: list[bytes]
    offsets: list[int]
    slot_bytes: int


def join_alone(far: bool = False) -> Joined:
    """The only rank of this host; `far`: there are others on other hosts."""
    node = _process_node()
    host_memory.check(node.mailbox_bytes(1, far), 1)
    offset, slot_bytes = node.allocate(1, far)
    return Joined(node, 0, [node.token], [offset], slot_bytes)


def join_host(meeting: Meeting, far: bool = False) -> Joined:
    """Join the ranks of this host, by their meeting; `far`: there are others on other hosts."""
    if meeting.size == 1:
        return join_alone(far)
    try:
        # The socket closes after the report: who finds it closed looks there for the reason.
        with ExitStack() as after, meeting.sharing_problems():
            return _meet_and_attach(meeting, after, far)
    except BaseException as error:
        # Peers may have attached it or not: the next group had better begin with a new one.
        _forget_node()
        if isinstance(error, OSError):  # too many open files, say
            raise ConfigurationError(f"rank {meeting.number} cannot join: {error}") from error
        raise


def _meet_and_attach(meeting: Meeting, after: ExitStack, far: bool) -> Joined:
    rank, size = meeting.rank, meeting.size
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
    return Joined(
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
