"""Attaching: two processes of one host give each other their shared memory.

Each passes the descriptor of its segment over an abstract Unix socket. That the connection succeeds
is the proof that both are on one host, in one network namespace; the kernel, not the peer, says
whose process it is (SO_PEERCRED). Of each pair the higher rank connects and the lower accepts:
connecting and sending wait for nobody, because each listener stands before its record is published,
so no order of arrival can lock up. Several threads of a process may join at once: a peer that one
of them attaches is attached for all.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from time import monotonic, sleep

from pycollective import _core
from pycollective.errors import CollectiveTimeout, ConfigurationError

_HELLO = struct.Struct("=16s16s")  # the sender's token, the token of whom it wants
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_MOST_STRANGERS = 64  # connections that have said nothing yet
_LOOK_AGAIN = 0.05  # seconds until a look whether another thread has attached a peer
_GLANCE = 0.25  # seconds between looks at what other ranks have reported, and threads attached


@dataclass(frozen=True)
class PeerAddress:
    """Where and who a peer is, from its record."""

    rank: int
    token: bytes
    socket_name: str
    host: str  # for messages only


class Listener:
    """An abstract socket at which higher ranks attach; no file, gone when closed."""

    def __init__(self) -> None:
        self.name = f"pycollective-{os.getpid()}-{os.urandom(8).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(128)
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
    raise_problem: Callable[[], None],
) -> None:
    """Attach every peer that is not attached yet: connect to the lower ranks, accept the higher.

    Args:
        node: this process's shared memory.
        listener: what this rank's record names.
        lower: the ranks below this one, not attached yet.
        higher: the ranks above, not attached yet.
        deadline: on the monotonic clock, seconds.
        raise_problem: raises what another rank has reported; asked while waiting.

    Raises:
        ConfigurationError: a peer is on another host, belongs to another user, or is no peer.
        CollectiveTimeout: names the ranks that did not attach in time.
    """
    with ExitStack() as stack:
        answers = {
            stack.enter_context(_connect(peer, node, deadline, raise_problem)): peer
            for peer in lower
        }
        _accept(node, listener, {peer.token: peer for peer in higher}, deadline, raise_problem)
        with selectors.DefaultSelector() as selector:
            for connection in answers:
                selector.register(connection, selectors.EVENT_READ)
            while answers:
                for connection in _ready(selector, list(answers.values()), deadline, raise_problem):
                    selector.unregister(connection)
                    peer = answers.pop(connection)
                    if _receive(node, connection, {peer.token: peer}) is None:
                        _await_attached(node, peer, connection, deadline, raise_problem)
                for connection, peer in list(answers.items()):
                    if node.is_attached(peer.token):  # as another thread joins with it, too
                        selector.unregister(connection)
                        del answers[connection]


def _ready(
    selector: selectors.BaseSelector,
    awaited: list[PeerAddress],
    deadline: float,
    raise_problem: Callable[[], None],
) -> list[socket.socket]:
    """The sockets that can be read; waits a while for one."""
    left = deadline - monotonic()
    if left <= 0:
        raise _not_attached(awaited)
    events = selector.select(min(left, _GLANCE))
    if not events:
        raise_problem()
    return [key.fileobj for key, _ in events if isinstance(key.fileobj, socket.socket)]


def _await_attached(
    node: _core.Node,
    peer: PeerAddress,
    connection: socket.socket,
    deadline: float,
    raise_problem: Callable[[], None],
) -> None:
    """Wait for another thread of this process to attach a peer that has closed this connection.

    It has closed because it had attached this process already, for that thread's communicator, and
    its answer there may take as long as that thread waits for others. Or it has ended.
    """
    pid, _, _ = _credentials(connection)
    with ExitStack() as stack:
        ended = selectors.DefaultSelector()
        stack.callback(ended.close)
        over = False
        if pid > 0:  # else in another pid namespace: the deadline is all there is
            try:
                process = os.pidfd_open(pid)
                stack.callback(os.close, process)
                ended.register(process, selectors.EVENT_READ)
            except ProcessLookupError:
                over = True
        while not node.is_attached(peer.token):
            raise_problem()
            if over:
                raise _ended(peer)
            if monotonic() >= deadline:
                raise _not_attached([peer])
            over = bool(ended.select(_LOOK_AGAIN))


def _connect(
    peer: PeerAddress, node: _core.Node, deadline: float, raise_problem: Callable[[], None]
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        while True:
            try:
                connection.connect("\0" + peer.socket_name)
                break
            except BlockingIOError:  # strangers fill its queue, until it comes to accept
                if monotonic() > deadline:
                    raise
                sleep(0.01)
        with suppress(BrokenPipeError, ConnectionResetError):  # closed, as the answer will tell
            _send(connection, node, peer.token)
    except OSError as error:
        connection.close()
        raise_problem()  # which may be why it has gone
        raise _unreachable(peer, error) from error
    return connection


def _not_attached(peers: list[PeerAddress]) -> CollectiveTimeout:
    names = ", ".join(str(peer.rank) for peer in peers)
    return CollectiveTimeout(
        f"init timed out: rank(s) {names} have come but did not attach", op="init"
    )


def _ended(peer: PeerAddress) -> ConfigurationError:
    return ConfigurationError(f"rank {peer.rank} has ended while it joined")


def _unreachable(peer: PeerAddress, error: OSError) -> ConfigurationError:
    here = socket.gethostname()
    where = "another host or in another" if peer.host != here else "this host, in another"
    return ConfigurationError(
        f"rank {peer.rank} on host {peer.host!r} cannot be reached from host {here!r} through "
        f"abstract Unix sockets ({error}): it has ended, or runs on {where} network namespace; "
        "ranks that are to share memory must be on one host, in one container"
    )


def _send(connection: socket.socket, node: _core.Node, wanted: bytes) -> None:
    socket.send_fds(connection, [_HELLO.pack(node.token, wanted)], [node.fileno()])


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _receive(
    node: _core.Node, connection: socket.socket, expected: Mapping[bytes, PeerAddress]
) -> PeerAddress | None:
    """Attach who sends a hello that is meant for this process; None for a stranger."""
    try:
        data, descriptors, _, _ = socket.recv_fds(
            connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return None  # it has gone
    try:
        if len(data) != _HELLO.size or len(descriptors) != 1:
            return None
        token, wanted = _HELLO.unpack(data)
        peer = expected.get(token)
        if peer is None or wanted != node.token:
            return None
        pid, uid, _ = _credentials(connection)
        if uid != os.getuid():
            raise ConfigurationError(
                f"rank {peer.rank} runs as user {uid} and this rank as user {os.getuid()}: all "
                "ranks of a job must be of one user"
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
    node: _core.Node,
    listener: Listener,
    missing: dict[bytes, PeerAddress],
    deadline: float,
    raise_problem: Callable[[], None],
) -> None:
    # A stranger may connect and say nothing: every connection waits beside the others.
    silent: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener.socket, selectors.EVENT_READ)
        try:
            while missing:
                for each in _ready(selector, list(missing.values()), deadline, raise_problem):
                    if each is listener.socket:
                        _admit(selector, listener, silent)
                    elif each in silent:
                        selector.unregister(each)
                        silent.remove(each)
                        with each:
                            peer = _receive(node, each, missing)
                            if peer is not None:
                                del missing[peer.token]
                                with suppress(OSError):  # gone: it says so itself, or has died
                                    _send(each, node, peer.token)
                # Whom another thread has attached meanwhile may never come here.
                for token in [each for each in missing if node.is_attached(each)]:
                    del missing[token]
        finally:
            for each in silent:
                each.close()


def _admit(
    selector: selectors.BaseSelector, listener: Listener, silent: list[socket.socket]
) -> None:
    try:
        connection, _ = listener.socket.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return  # gone again
    connection.setblocking(False)
    selector.register(connection, selectors.EVENT_READ)
    silent.append(connection)
    if len(silent) > _MOST_STRANGERS:  # a peer speaks as soon as it connects
        selector.unregister(silent[0])
        silent.pop(0).close()
