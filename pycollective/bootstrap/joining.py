"""How ranks that have a store, a rank and a size become a `Communicator`.

1. They tell each other which host they are on (or are said to be on), and what must be the same on
   all, all through the store (`meeting.py`).
2. Those of a host meet: each asks whether there is room, commits a mailbox in its process's shared
   memory, listens on an abstract Unix socket, publishes a record of it all, reads the table of its
   host's, and attaches each peer that is not attached yet (`attach.py`).
3. Where there are several hosts, all tell each other that they have got so far, and connect.

In each of these one rank reads what all have published. Of the others each makes some twenty store
operations in all, reads the host of every rank (packed) and some 100 bytes for each rank of its
host, and makes at most 63 short connections there. What one rank finds wrong it tells through the
store: all raise at once instead of waiting for it.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

from pycollective import _core, host_memory, placement
from pycollective.bootstrap.attach import Listener, PeerAddress, attach_peers
from pycollective.bootstrap.host import host_identity
from pycollective.bootstrap.process import NODE
from pycollective.bootstrap.records import (
    Common,
    Record,
    host_table,
    read_host_table,
    understanding,
)
from pycollective.bootstrap.rendezvous import Meeting
from pycollective.bootstrap.shutdown import END
from pycollective.communicator import Communicator
from pycollective.config import MAX_RANKS, MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError
from pycollective.planning.tuning import describe, load
from pycollective.planning.world import World

DEFAULT_TIMEOUT = 600.0


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: float = DEFAULT_TIMEOUT,
    prefix: str = "",
    played: Sequence[int] = (),
    transport: str = "",
    tuning: str = "",
    more: str = "",
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
        more: what else must be the same on all ranks, in words.

    Raises: see `pycollective.init`.
    """
    check_place(rank, size)
    if size == 1:
        world = World.on_one_host(0, 1, load(tuning))
        communicator = Communicator._of(*join_alone(), timeout, world)
    else:
        where = FirstMeeting(
            store, rank, size, timeout, prefix, tuple(played), transport, tuning, more
        )
        communicator = _connect(where, transport)
    END.arrange()
    return communicator


def check_place(rank: int, size: int) -> None:
    """Refuse what cannot be a rank among so many."""
    if not 1 <= size <= MAX_RANKS:
        raise ConfigurationError(
            f"size {size} is not 1 to {MAX_RANKS}, the most there can be (and at most "
            f"{MAX_RANKS_PER_HOST} on a host)"
        )
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is not one of 0 to {size - 1}")


def shared_memory_alone(host_of: Sequence[int]) -> ConfigurationError:
    """What a user is told who wants transport "shm" for ranks of several hosts."""
    return ConfigurationError(
        f"transport 'shm' is for one host, and the {len(host_of)} ranks are on "
        f"{len(set(host_of))}: leave transport out, or start them on one"
    )


class FirstMeeting:
    """The first meeting, of all ranks: who is there, on which host, and what they agree on.

    Attributes:
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        one_machine: whether all could reach each other without a network.
        on_machine: ranks on this machine.
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
        more: str = "",
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.timeout, self.prefix, self._played = timeout, prefix, played
        meeting = Meeting(store, rank, size, timeout, prefix)
        self.deadline = meeting.deadline
        try:
            with meeting.sharing_problems():
                self._meet(meeting, transport, tuning, more)
        except BaseException as error:
            self._tell_those_ahead(meeting, error)
            raise

    def _meet(self, meeting: Meeting, transport: str, tuning: str, more: str) -> None:
        meeting.claim()
        self.table = load(tuning)
        wishes = f"topology {_described(self._played)}", f"transport {transport or 'any'}"
        mine = Record(
            size=self.size,
            host=socket.gethostname(),
            identity=host_identity(),
            wish=", ".join(filter(None, (*wishes, describe(self.table), more))),
        )
        self._take(meeting.agree(mine, self._decide))

    def _decide(self, records: list[Record]) -> str:
        first = records[0].wish
        for other, each in enumerate(records):
            if each.wish != first:
                raise ConfigurationError(f"rank 0 was given {first} and rank {other} {each.wish}")
        machines = placement.number_hosts([each.identity for each in records])
        if self._played:
            placement.check_hosts(self._played)
        else:
            placement.check_hosts(machines, [each.host for each in records])
        return placement.pack(machines)

    def _take(self, packed: str) -> None:
        with understanding("where the ranks are"):
            machines = placement.unpack(packed, self.size)
        self.one_machine = not any(machines)
        self.on_machine = machines.count(machines[self.rank])
        self.host_of = self._played or machines

    def _tell_those_ahead(self, meeting: Meeting, error: BaseException) -> None:
        """Tell ranks that have read already what was decided, and wait for this one further on."""
        with suppress(RuntimeError, OSError, ConfigurationError):
            packed = meeting.decided()
            if packed is not None:
                self._take(packed)
                self.of_host().report(error)
                if any(self.host_of):
                    self.of_all().report(error)

    def of_host(self) -> Meeting:
        """The meeting of this host's ranks, until the same deadline."""
        if not any(self.host_of):
            return self._meeting("host", range(self.size))
        here = self.host_of[self.rank]
        near = [rank for rank, host in enumerate(self.host_of) if host == here]
        return self._meeting(f"host{here}", near)

    def of_all(self) -> Meeting:
        """The meeting of all ranks once those of each host have met."""
        return self._meeting("all", range(self.size))

    def _meeting(self, name: str, ranks: Sequence[int]) -> Meeting:
        return Meeting(
            self.store,
            ranks.index(self.rank),
            len(ranks),
            self.timeout,
            f"{self.prefix}/{name}",
            deadline=self.deadline,
            numbers=ranks,
        )


def _described(played: tuple[int, ...]) -> str:
    if len(played) > MAX_RANKS_PER_HOST:
        digest = hashlib.sha256(repr(played).encode()).hexdigest()
        return f"{len(set(played))} hosts in the order {digest[:12]}"
    return f"hosts {','.join(map(str, played))}" if played else "as found"


def _connect(where: FirstMeeting, transport: str) -> Communicator:
    if len(set(where.host_of)) > 1:
        if transport == "shm":
            raise shared_memory_alone(where.host_of)
        return _connect_hosts(where)
    world = World.on_one_host(where.rank, where.size, where.table)
    return Communicator._of(*join_host(where.of_host()), where.timeout, world)


def _connect_hosts(where: FirstMeeting) -> Communicator:
    from pycollective.transport.gloo import C10dTransport, MessageStore

    rank, size = where.rank, where.size
    whole = where.of_all()
    with whole.sharing_problems():
        joined = join_host(where.of_host(), far=True)
        store = MessageStore(where.store, rank, where.one_machine)
        mine = Record(size=size, data_bytes=joined.data_bytes, address=store.address)
        common = Common.from_text(whole.agree(mine, Common.of_records), joined.data_bytes)
        store.reach(common.address, where.timeout, whole.raise_problem, size)
        transport = C10dTransport(
            store, f"{where.prefix}/messages", rank, size, where.timeout, whole.raise_problem
        )
        whole.confirm()
    joined = joined._replace(data_bytes=common.data_bytes)
    world = World(rank, where.host_of, transport, where.table, where.on_machine)
    return Communicator._of(*joined, where.timeout, world)


class Joined(NamedTuple):
    """A group that shares memory, before it is a communicator; see there."""

    node: _core.Node
    rank: int
    tokens: list[bytes]
    offsets: list[int]
    data_bytes: int


def join_alone(far: bool = False) -> Joined:
    """The only rank of this host; `far`: there are others on other hosts."""
    node = NODE.get()
    host_memory.check(node.mailbox_bytes(1, far), 1)
    offset, data_bytes = node.allocate(1, far)
    return Joined(node, 0, [node.token], [offset], data_bytes)


def join_host(meeting: Meeting, far: bool = False) -> Joined:
    """Join the ranks of this host, by their meeting; `far`: there are others on other hosts."""
    if meeting.size == 1:
        return join_alone(far)
    try:
        # The socket closes after the report: who finds it closed looks there for the reason.
        with ExitStack() as after, meeting.sharing_problems():
            return _meet_and_attach(meeting, after, far)
    except BaseException:
        # Peers may have attached it or not: the next group had better begin with a new one.
        NODE.forget()
        raise


def _meet_and_attach(meeting: Meeting, after: ExitStack, far: bool) -> Joined:
    rank, size = meeting.rank, meeting.size
    node = NODE.get()
    host_memory.check(node.mailbox_bytes(size, far), size)
    offset, data_bytes = node.allocate(size, far)
    listener = after.enter_context(closing(Listener()))
    mine = Record(
        size=size,
        host=socket.gethostname(),
        token=node.token.hex(),
        offset=offset,
        data_bytes=data_bytes,
        socket_name=listener.name,
    )
    text = meeting.agree(mine, host_table)
    rows = read_host_table(text, mine, rank, meeting.numbers)
    peers = [
        PeerAddress(number, bytes.fromhex(row.token), row.socket_name, row.host)
        for number, row in zip(meeting.numbers, rows, strict=True)
    ]
    missing = [peer for peer in peers if not node.is_attached(peer.token)]
    attach_peers(
        node,
        listener,
        [peer for peer in missing if peer.rank < meeting.number],
        [peer for peer in missing if peer.rank > meeting.number],
        meeting.deadline,
        meeting.raise_problem,
    )
    for peer, row in zip(peers, rows, strict=True):
        if not node.has_mailbox(peer.token, row.offset, row.data_bytes, size):
            raise ConfigurationError(
                f"rank {peer.rank} has no mailbox of {row.data_bytes} bytes at offset {row.offset} "
                "of its shared memory, as the store says: something else writes to this store"
            )
    meeting.confirm()
    offsets = [row.offset for row in rows]
    tokens = [peer.token for peer in peers]
    return Joined(node, rank, tokens, offsets, min(row.data_bytes for row in rows))
