"""Ranks that have a store, a rank and a size become a `Communicator`.

1. All ranks tell each other through the store which host they are on (or are said to be on), and
   which options must be the same on all (`rendezvous.py`).
2. The ranks of a host meet. Each checks that there is memory, commits a mailbox in its process's
   shared memory, listens on an abstract Unix socket and publishes all that in a record. It reads
   the table of its host's ranks, and attaches each peer that is not attached yet (`attach.py`).
3. Where there are several hosts, all ranks tell each other that they have got so far, and connect.

In each step one rank reads all records. Each other rank makes some twenty store operations in all,
reads the host of every rank (packed) and some 100 bytes for each rank of its host, and makes at
most 63 short connections there. A rank that finds something wrong tells the others through the
store: all raise at once instead of waiting for it.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, NamedTuple

from pycollective import _core, host_memory, placement
from pycollective.bootstrap.attach import (
    NODE,
    Listener,
    PeerAddress,
    attach_peers,
    host_identity,
)
from pycollective.bootstrap.rendezvous import Record, Rendezvous, check_type, refusing_unreadable
from pycollective.bootstrap.shutdown import SHUTDOWN
from pycollective.communicator import Communicator
from pycollective.config import MAX_RANKS, MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError
from pycollective.planning.planner import describe, load
from pycollective.planning.world import World

DEFAULT_TIMEOUT = 600.0

_MOST_NAME = 107  # bytes of an abstract socket's name, with the NUL that it begins with
_OVER_INT64 = 1 << 63
_SHOWN = 60  # characters of a wrong value in a message


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: float = DEFAULT_TIMEOUT,
    prefix: str = "",
    simulated: Sequence[int] = (),
    transport: str = "",
    tuning: str = "",
    more: str = "",
    check_alive: Callable[[], None] | None = None,
) -> Communicator:
    """Join `size` ranks through a store.

    Args:
        store: see `pycollective.init`; may be None for one rank.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that joining, and later each operation, may take.
        prefix: of the keys; each group that is made through one store needs its own.
        simulated: the host of each rank, numbered from 0 in the order of their first ranks; empty
            to find the hosts out.
        transport: between hosts, ``"gloo"``; ``"shm"`` refuses several hosts.
        tuning: file of a tuning table; empty for none.
        more: other options that must be the same on all ranks, in words.
        check_alive: called while this rank waits; raises if one of the others has died.

    Raises: see `pycollective.init`.
    """
    check_place(rank, size)
    if size == 1:
        world = World.on_one_host(0, 1, load(tuning))
        communicator = Communicator._of(*join_alone(), timeout, world)
    else:
        where = FirstRendezvous(
            *(store, rank, size, timeout, prefix, tuple(simulated), transport, tuning, more),
            check_alive,
        )
        communicator = _connect(where, transport)
    SHUTDOWN.arrange()
    return communicator


def check_place(rank: int, size: int) -> None:
    """Raise ConfigurationError unless `rank` can be one of `size` ranks."""
    if not 1 <= size <= MAX_RANKS:
        raise ConfigurationError(
            f"size {size} is not 1 to {MAX_RANKS}, the most there can be (and at most "
            f"{MAX_RANKS_PER_HOST} on a host)"
        )
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is not one of 0 to {size - 1}")


def shared_memory_alone(host_of: Sequence[int]) -> ConfigurationError:
    """Return the error for transport "shm" where there are several hosts."""
    return ConfigurationError(
        f"transport 'shm' is for one host, and the {len(host_of)} ranks are on "
        f"{len(set(host_of))}: leave transport out, or start them on one"
    )


class FirstRendezvous:
    """The first rendezvous, of all ranks: who is there, on which host, with which options.

    Attributes:
        host_of: the host of each rank, numbered from 0 in the order of their first ranks.
        one_machine: whether all could reach each other without a network.
        on_machine: ranks on this machine.
        table: measured times, the same on all ranks; None for none.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        prefix: str,
        simulated: tuple[int, ...],
        transport: str,
        tuning: str,
        more: str = "",
        check_alive: Callable[[], None] | None = None,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.timeout, self.prefix, self._simulated = timeout, prefix, simulated
        self._check_alive = check_alive
        rendezvous = Rendezvous(store, rank, size, timeout, prefix, check_elsewhere=check_alive)
        self.deadline = rendezvous.deadline
        try:
            with rendezvous.sharing_problems():
                self._meet(rendezvous, transport, tuning, more)
        except BaseException as error:
            self._tell_those_ahead(rendezvous, error)
            raise

    def _meet(self, rendezvous: Rendezvous, transport: str, tuning: str, more: str) -> None:
        rendezvous.claim_rank()
        self.table = load(tuning)
        options = f"topology {_described(self._simulated)}", f"transport {transport or 'any'}"
        mine = Record(
            size=self.size,
            host=socket.gethostname(),
            identity=host_identity(),
            options=", ".join(filter(None, (*options, describe(self.table), more))),
        )
        self._take(rendezvous.exchange(mine, self._decide))

    def _decide(self, records: list[Record]) -> str:
        first = records[0].options
        for other, each in enumerate(records):
            if each.options != first:
                raise ConfigurationError(
                    f"rank 0 was given {first} and rank {other} {each.options}"
                )
        machines = placement.number_hosts([each.identity for each in records])
        if self._simulated:
            placement.check_hosts(self._simulated)
        else:
            placement.check_hosts(machines, [each.host for each in records])
        return placement.pack(machines)

    def _take(self, packed: str) -> None:
        with refusing_unreadable("where the ranks are"):
            machines = placement.unpack(packed, self.size)
        self.one_machine = not any(machines)
        self.on_machine = machines.count(machines[self.rank])
        self.host_of = self._simulated or machines

    def _tell_those_ahead(self, rendezvous: Rendezvous, error: BaseException) -> None:
        """Tell ranks that know the decision already and wait for this one in a later step."""
        with suppress(RuntimeError, OSError, ConfigurationError):
            packed = rendezvous.decided()
            if packed is not None:
                self._take(packed)
                self.of_host().report(error)
                if any(self.host_of):
                    self.of_all().report(error)

    def of_host(self) -> Rendezvous:
        """Return the rendezvous of this host's ranks, with the same deadline."""
        if not any(self.host_of):
            return self._next("host", range(self.size))
        here = self.host_of[self.rank]
        ranks = [rank for rank, host in enumerate(self.host_of) if host == here]
        return self._next(f"host{here}", ranks)

    def of_all(self) -> Rendezvous:
        """Return the rendezvous of all ranks, once those of each host have met."""
        return self._next("all", range(self.size))

    def _next(self, name: str, ranks: Sequence[int]) -> Rendezvous:
        return Rendezvous(
            self.store,
            ranks.index(self.rank),
            len(ranks),
            self.timeout,
            f"{self.prefix}/{name}",
            deadline=self.deadline,
            ranks=ranks,
            check_elsewhere=self._check_alive,
        )


def _described(simulated: tuple[int, ...]) -> str:
    if len(simulated) > MAX_RANKS_PER_HOST:
        digest = hashlib.sha256(repr(simulated).encode()).hexdigest()
        return f"{len(set(simulated))} hosts in the order {digest[:12]}"
    return f"hosts {','.join(map(str, simulated))}" if simulated else "as found"


def _connect(where: FirstRendezvous, transport: str) -> Communicator:
    if len(set(where.host_of)) > 1:
        if transport == "shm":
            raise shared_memory_alone(where.host_of)
        return _connect_hosts(where)
    world = World.on_one_host(where.rank, where.size, where.table)
    return Communicator._of(*join_host(where.of_host()), where.timeout, world)


def _connect_hosts(where: FirstRendezvous) -> Communicator:
    from pycollective.transport.gloo import GlooTransport, MessageStore

    rank, size = where.rank, where.size
    everybody = where.of_all()
    with forgetting_node(), everybody.sharing_problems():
        joined = join_host(where.of_host(), internode=True)
        store = MessageStore(where.store, rank, where.one_machine)
        mine = Record(size=size, data_bytes=joined.data_bytes, address=store.address)
        common = Common.from_text(everybody.exchange(mine, Common.of_records), joined.data_bytes)
        store.reach(common.address, where.timeout, everybody.raise_problem, size)
        transport = GlooTransport(
            store, f"{where.prefix}/messages", rank, size, where.timeout, everybody.raise_problem
        )
        everybody.confirm()
    joined = joined._replace(data_bytes=common.data_bytes)
    world = World(rank, where.host_of, transport, where.table, where.on_machine)
    return Communicator._of(*joined, where.timeout, world)


class Joined(NamedTuple):
    """A group that shares memory, before it is a communicator; see `Communicator._of`."""

    node: _core.Node
    rank: int
    tokens: list[bytes]
    offsets: list[int]
    data_bytes: int


def join_alone(internode: bool = False) -> Joined:
    """Join as the only rank of this host; `internode`: there are ranks on other hosts."""
    node = NODE.get()
    host_memory.check(node.mailbox_bytes(1, internode), 1)
    offset, data_bytes = node.allocate(1, internode)
    return Joined(node, 0, [node.token], [offset], data_bytes)


def join_host(rendezvous: Rendezvous, internode: bool = False) -> Joined:
    """Join the ranks of this host by their rendezvous; `internode`: there are other hosts."""
    if rendezvous.size == 1:
        return join_alone(internode)
    # The socket closes after the report: who finds it closed looks there for the reason.
    with forgetting_node(), ExitStack() as after, rendezvous.sharing_problems():
        return _meet_and_attach(rendezvous, after, internode)


@contextmanager
def forgetting_node() -> Iterator[None]:
    """Where a group could not be made, begin the next one with a new node.

    Peers may have attached this one or not, and the mailbox goes with it.
    """
    try:
        yield
    except BaseException:
        NODE.forget()
        raise


def _meet_and_attach(rendezvous: Rendezvous, after: ExitStack, internode: bool) -> Joined:
    place, size = rendezvous.place, rendezvous.size
    node = NODE.get()
    host_memory.check(node.mailbox_bytes(size, internode), size)
    offset, data_bytes = node.allocate(size, internode)
    listener = after.enter_context(closing(Listener()))
    mine = Record(
        size=size,
        host=socket.gethostname(),
        token=node.token.hex(),
        offset=offset,
        data_bytes=data_bytes,
        socket_name=listener.name,
    )
    text = rendezvous.exchange(mine, host_table)
    rows = read_host_table(text, mine, place, rendezvous.ranks)
    peers = [
        PeerAddress(rank, bytes.fromhex(row.token), row.socket_name, row.host)
        for rank, row in zip(rendezvous.ranks, rows, strict=True)
    ]
    missing = [peer for peer in peers if not node.is_attached(peer.token)]
    attach_peers(
        node,
        listener,
        [peer for peer in missing if peer.rank < rendezvous.rank],
        [peer for peer in missing if peer.rank > rendezvous.rank],
        rendezvous.deadline,
        rendezvous.raise_problem,
    )
    for peer, row in zip(peers, rows, strict=True):
        if not node.has_mailbox(peer.token, row.offset, row.data_bytes, size):
            raise ConfigurationError(
                f"rank {peer.rank} has no mailbox of {row.data_bytes} bytes at offset {row.offset} "
                "of its shared memory, as the store says: something else writes to this store"
            )
    rendezvous.confirm()
    offsets = [row.offset for row in rows]
    tokens = [peer.token for peer in peers]
    return Joined(node, place, tokens, offsets, min(row.data_bytes for row in rows))


class Row(NamedTuple):
    """What a rank must know of another rank of its host to attach it."""

    token: str
    offset: int
    data_bytes: int
    socket_name: str
    host: str

    @classmethod
    def of(cls, record: Record) -> Row:
        """Return the row of a record."""
        return cls(record.token, record.offset, record.data_bytes, record.socket_name, record.host)

    def check(self) -> None:
        """Raise TypeError or ValueError where no rank can have written this."""
        for name, value in self._asdict().items():
            check_type(name, value, "int" if name in ("offset", "data_bytes") else "str")
        if len(bytes.fromhex(self.token)) != 16:
            raise ValueError(f"token is {self.token[:_SHOWN]!r}")
        if not 0 <= self.offset < _OVER_INT64:
            raise ValueError(f"offset is {str(self.offset)[:_SHOWN]}")
        if not 0 <= self.data_bytes < _OVER_INT64:
            raise ValueError(f"data_bytes is {str(self.data_bytes)[:_SHOWN]}")
        if not (self.socket_name.isascii() and 0 < len(self.socket_name) < _MOST_NAME):
            raise ValueError(f"socket_name is {self.socket_name[:_SHOWN]!r}")


def host_table(records: Sequence[Record]) -> str:
    """Return what the ranks of a host must know of each other, as text: one column a field."""
    return json.dumps(list(zip(*map(Row.of, records), strict=True)))


def read_host_table(text: str, mine: Record, rank: int, numbers: Sequence[int]) -> list[Row]:
    """Return each rank's row, from the text that `host_table` gave.

    Args:
        text: as it was read from the store.
        mine: what this rank has published.
        rank: this rank; its row must agree with `mine`.
        numbers: what messages call the ranks.

    Raises:
        ConfigurationError: it is no such table, or this rank's row differs.
    """
    with refusing_unreadable("the table of this host's ranks"):
        rows = [Row(*each) for each in zip(*json.loads(text), strict=True)]
        if len(rows) != len(numbers):
            raise ValueError(f"it has {len(rows)} rows for {len(numbers)} ranks")
        for number, row in zip(numbers, rows, strict=True):
            try:
                row.check()
            except (TypeError, ValueError) as error:
                raise ValueError(f"of rank {number} the {error}") from error
    for name, here, published in zip(Row._fields, rows[rank], Row.of(mine), strict=True):
        if here != published:
            raise ConfigurationError(
                f"rank {numbers[rank]} has published another {name} than its row in the table of "
                f"this host's ranks has: {published!r}, and {str(here)[:_SHOWN]!r} is there. "
                "Another process claims this rank, or something else writes to the store"
            )
    return rows


class Common(NamedTuple):
    """What the ranks of all hosts must know before they connect."""

    data_bytes: int
    address: str

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> str:
        """Return it as text, from the records of all ranks."""
        data_bytes = min(each.data_bytes for each in records)
        return json.dumps({"data_bytes": data_bytes, "address": records[0].address})

    @classmethod
    def from_text(cls, text: str, most_bytes: int) -> Common:
        """Read what `of_records` gave; this rank's own data area has `most_bytes`."""
        with refusing_unreadable("what all hosts have in common"):
            raw = json.loads(text)
            common = cls(raw["data_bytes"], raw["address"])
            check_type("data_bytes", common.data_bytes, "int")
            check_type("address", common.address, "str")
            if not 0 < common.data_bytes <= most_bytes:
                raise ValueError(f"data_bytes is {str(common.data_bytes)[:_SHOWN]}")
            return common
