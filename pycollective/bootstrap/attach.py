"""Attaching: two processes of one host give each other their shared memory.

Each passes the descriptor of its segment over an abstract Unix socket. That the connection succeeds
is the proof that both are on one host, in one network namespace; the kernel, not the peer, says
whose process it is (SO_PEERCRED). Of each pair the higher rank connects and the lower accepts:
connecting and sending wait for nobody, because each listener stands before its record is published,
so no order of arrival can lock up. Several threads of a process may join at once: a peer that one
of them attaches is attached for all.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from pycollective import _core
from pycollective.bootstrap.host import PIDFD_NEEDS, credentials, other_user
from pycollective.errors import CollectiveTimeout, ConfigurationError

_HELLO = struct.Struct("=16s16s")  # the sender's token, the token of whom it wants
_MOST_STRANGERS = 64  # connections that have said nothing yet
_ANSWERED_WITHIN = 2.0  # seconds; whoever refuses has attached before
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
    attaching = _Attaching(node, listener, deadline, raise_problem)
    try:
        for peer in lower:
            attaching.connect(peer)
        attaching.wait(lower, higher)
    finally:
        attaching.close()


class _Attaching:
    """One thread's attachments; all that may come is waited for at once.

    For what lies unread here another thread may wait, and this one for what lies unread there: each
    takes what comes whenever it comes. A peer that this process connected to and that closes the
    connection has attached this process for another thread, which has the answer or will have it;
    or its process has ended, which its pidfd tells.
    """

    def __init__(
        self,
        node: _core.Node,
        listener: Listener,
        deadline: float,
        raise_problem: Callable[[], None],
    ) -> None:
        self._node, self._listener = node, listener
        self._deadline, self._raise_problem = deadline, raise_problem
        self._asked = monotonic()  # for a problem
        self._answers: dict[socket.socket, PeerAddress] = {}  # of lower ranks, awaited
        # A stranger may connect and say nothing: every connection waits beside the others.
        self._silent: list[socket.socket] = []
        self._others: set[int] = set()  # users whose connections were refused
        self._closed: dict[int, PeerAddress] = {}  # by the pidfds of processes that closed theirs
        self._refused: list[tuple[float, PeerAddress, OSError]] = []  # and until when
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)

    def connect(self, peer: PeerAddress) -> None:
        """Say hello to a lower rank."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            while True:
                try:
                    connection.connect("\0" + peer.socket_name)
                    break
                except BlockingIOError:  # strangers fill its queue, until it comes to accept
                    if monotonic() > self._deadline:
                        raise
                    sleep(0.01)
            if (user := other_user(connection)) is not None:
                connection.close()
                raise ConfigurationError(
                    f"rank {peer.rank} runs as user {user} and this rank as user {os.getuid()}: "
                    "all ranks of a job must be of one user"
                )
            with suppress(BrokenPipeError, ConnectionResetError):  # closed, as reading will tell
                _send(connection, self._node, peer.token)
        except OSError as error:
            connection.close()
            self._look_for_problem()  # which may be why it has gone
            if not isinstance(error, ConnectionRefusedError):
                raise _unreachable(peer, error) from error
            # With a store of few operations it may have joined by another thread, and not wait.
            self._refused.append((monotonic() + _ANSWERED_WITHIN, peer, error))
        else:
            self._answers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)

    def wait(self, lower: list[PeerAddress], higher: list[PeerAddress]) -> None:
        """Wait until all are attached, whichever thread of this process does it."""
        accepted = {peer.token: peer for peer in higher}
        missing = [*lower, *higher]
        while missing := [peer for peer in missing if not self._node.is_attached(peer.token)]:
            for each in self._ready(missing):
                if each is self._listener.socket:
                    self._admit()
                elif isinstance(each, int):
                    self._selector.unregister(each)
                    self._take_end(self._closed[each])
                elif each in self._answers:
                    self._take_answer(each)
                elif each in self._silent:
                    self._take_hello(each, accepted)
            for until, peer, error in self._refused:
                if monotonic() >= until and not self._node.is_attached(peer.token):
                    self._look_for_problem()
                    raise _unreachable(peer, error) from error

    def close(self) -> None:
        """Let go of all. Another thread may wait for what lies unread."""
        for connection, peer in self._answers.items():
            with suppress(ConfigurationError, OSError, RuntimeError):
                _receive(self._node, connection, {peer.token: peer})
        for connection in (*self._answers, *self._silent):
            connection.close()
        for process in self._closed:
            os.close(process)
        self._selector.close()

    def _ready(self, missing: list[PeerAddress]) -> list[Any]:
        """What can be read, sockets and pidfds; waits a while for one."""
        left = self._deadline - monotonic()
        if left <= 0:
            names = ", ".join(str(peer.rank) for peer in missing)
            others = ", ".join(map(str, sorted(self._others)))
            raise CollectiveTimeout(
                f"init timed out: rank(s) {names} have come but did not attach"
                + (f"; processes of user(s) {others} were refused" if others else ""),
                op="init",
            )
        while_others_attach = self._closed or self._refused
        events = self._selector.select(min(left, _LOOK_AGAIN if while_others_attach else _GLANCE))
        if not events and monotonic() - self._asked >= _GLANCE:
            self._look_for_problem()
        return [key.fileobj for key, _ in events]

    def _look_for_problem(self) -> None:
        self._asked = monotonic()
        self._raise_problem()

    def _take_answer(self, connection: socket.socket) -> None:
        peer = self._answers.pop(connection)
        self._selector.unregister(connection)
        with connection:
            if _receive(self._node, connection, {peer.token: peer}) is not None:
                return
            pid, _ = credentials(connection)
        if pid == 0:
            return  # of another pid namespace: there is but the deadline
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                self._look_for_problem()
                raise ConfigurationError(
                    f"whether rank {peer.rank} lives cannot be seen, as pidfd_open is denied or "
                    f"not there ({error}): {PIDFD_NEEDS}"
                ) from error
            # ENOENT, EINVAL: the number is a thread's by now.
            if error.errno not in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
                raise
            self._take_end(peer)
        else:
            self._closed[process] = peer
            self._selector.register(process, selectors.EVENT_READ)

    def _take_end(self, peer: PeerAddress) -> None:
        self._look_for_problem()  # which may be why
        if not self._node.is_attached(peer.token):
            raise ConfigurationError(f"rank {peer.rank} has ended while it joined")

    def _take_hello(self, connection: socket.socket, expected: Mapping[bytes, PeerAddress]) -> None:
        self._selector.unregister(connection)
        self._silent.remove(connection)
        with connection:
            peer = _receive(self._node, connection, expected)
            if peer is not None:
                with suppress(OSError):  # gone: it says so itself, or has died
                    _send(connection, self._node, peer.token)

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone again
        # Any user of this machine can connect. Only this one's processes are given a place.
        if (user := other_user(connection)) is not None:
            self._others.add(user)
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._silent.append(connection)
        if len(self._silent) > _MOST_STRANGERS:  # a peer speaks as soon as it connects
            self._selector.unregister(self._silent[0])
            self._silent.pop(0).close()


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


def _receive(
    node: _core.Node, connection: socket.socket, expected: Mapping[bytes, PeerAddress]
) -> PeerAddress | None:
    """Attach who sends a hello that is meant for this process; None for a stranger."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return None  # it has gone
    try:
        if len(data) != _HELLO.size:
            return None
        token, wanted = _HELLO.unpack(data)
        peer = expected.get(token)
        if peer is None or wanted != node.token:
            return None
        if not descriptors and flags & socket.MSG_CTRUNC:
            # The kernel has dropped what this process has no number for.
            raise OSError(
                errno.EMFILE, f"{os.strerror(errno.EMFILE)}, for rank {peer.rank}'s memory"
            )
        if len(descriptors) != 1:
            return None
        pid, _ = credentials(connection)
        if pid == 0:
            raise ConfigurationError(
                f"rank {peer.rank} runs in another pid namespace, where its death could not be seen"
            )
        node.attach(token, descriptors[0], pid)
        return peer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
