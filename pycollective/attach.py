"""Attaching: two processes of one host give each other their shared memory.

Each passes the descriptor of its segment over an abstract Unix socket. That the connection succeeds
is the proof that both are on one host, in one network namespace; the kernel, not the peer, says
whose process it is (SO_PEERCRED). Of each pair the higher rank connects and the lower accepts:
connecting and sending wait for nobody, because each listener stands before its record is published,
so no order of arrival can lock up.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

from pycollective import _core
from pycollective.errors import CollectiveTimeout, ConfigurationError

_HELLO = struct.Struct("=16s16s")  # the sender's token, the token of whom it wants
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class PeerAddress:
    """Where and who a peer is, from its record."""

    rank: int
    token: bytes
    socket_name: str
    host: str  # for messages only


class Listener:
    """An abstract socket at which higher ranks attach; no file, gone when closed."""

    def __init__(self, backlog: int) -> None:
        self.name = f"pycollective-{os.getpid()}-{os.urandom(8).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(backlog)
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def attach_peers(
    node: _core.Node,
    listener: Listener,
    lower: list[PeerAddress],
    higher: list[PeerAddress],
    deadline: float,
) -> None:
    """Attach every peer that is not attached yet: connect to the lower ranks, accept the higher.

    Args:
        node: this process's shared memory.
        listener: what this rank's record names.
        lower: the ranks below this one, not attached yet.
        higher: the ranks above, not attached yet.
        deadline: on the monotonic clock, seconds.

    Raises:
        ConfigurationError: a peer is on another host, belongs to another user, or is no peer.
        CollectiveTimeout: names the ranks that did not attach in time.
    """
    with ExitStack() as stack:
        connections = {stack.enter_context(_connect(peer, node)): peer for peer in lower}
        _accept(node, listener, {peer.token: peer for peer in higher}, deadline)
        for connection, peer in connections.items():
            connection.settimeout(max(0.001, deadline - monotonic()))
            try:
                _receive(node, connection, {peer.token: peer})
            except TimeoutError as error:
                raise _absent([peer]) from error


def _absent(peers: list[PeerAddress]) -> CollectiveTimeout:
    names = ", ".join(str(peer.rank) for peer in peers)
    return CollectiveTimeout(
        f"init timed out: rank(s) {names} published an address but did not attach"
    )


def _connect(peer: PeerAddress, node: _core.Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + peer.socket_name)
        _send(connection, node, peer.token)
    except OSError as error:
        connection.close()
        raise ConfigurationError(
            f"rank {peer.rank} on host {peer.host!r} cannot be reached from {socket.gethostname()!r} "
            f"through this host's sockets ({error}): it has ended, or runs on another host or in "
            "another network namespace, and this version joins the ranks of one host only"
        ) from error
    return connection


def _send(connection: socket.socket, node: _core.Node, wanted: bytes) -> None:
    socket.send_fds(connection, [_HELLO.pack(node.token, wanted)], [node.fileno()])


def _receive(
    node: _core.Node, connection: socket.socket, expected: Mapping[bytes, PeerAddress]
) -> PeerAddress | None:
    """Attach who sends a hello that is meant for this process; None for a stranger."""
    data, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    try:
        if len(data) != _HELLO.size or len(descriptors) != 1:
            return None
        token, wanted = _HELLO.unpack(data)
        peer = expected.get(token)
        if peer is None or wanted != node.token:
            return None
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise ConfigurationError(
                f"rank {peer.rank} runs as user {uid} and this rank as {os.getuid()}: all ranks of a "
                "job must be of one user"
            )
        if pid == 0:
            raise ConfigurationError(
                f"rank {peer.rank} runs in another pid namespace, where its death could not be seen"
            )
        node.attach(token, descriptors[0], pid)
        return peer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _accept(
    node: _core.Node, listener: Listener, missing: dict[bytes, PeerAddress], deadline: float
) -> None:
    # A stranger may connect and say nothing: every connection waits beside the others.
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        selector.register(listener.socket, selectors.EVENT_READ)
        while missing:
            remaining = deadline - monotonic()
            if remaining <= 0:
                raise _absent(list(missing.values()))
            for key, _ in selector.select(remaining):
                if key.fileobj is listener.socket:
                    try:
                        connection, _ = listener.socket.accept()
                    except OSError:
                        continue  # it went again
                    stack.enter_context(connection)
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                try:
                    peer = _receive(node, key.fileobj, missing)
                    if peer is not None:
                        _send(key.fileobj, node, peer.token)
                        del missing[peer.token]
                except OSError:
                    continue  # a connection that broke was no peer's, or its own rank says so
