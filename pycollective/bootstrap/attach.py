"""Attaching: two processes of one host give each other their shared memory.

Each passes the descriptor of its segment over an abstract Unix socket. If the connection succeeds,
both are on one host and in one network namespace. The kernel, not the peer, says whose process it
is (SO_PEERCRED). Of each pair the higher rank connects and the lower accepts: connecting and
sending wait for nobody, because each listener stands before its record is published, so no order of
arrival can lock up. Several threads of a process may join at once: a peer that one of them attaches
is attached for all.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from pycollective import _core
from pycollective.errors import CollectiveTimeout, ConfigurationError, PeerFailure

# What pidfd_open wants, by which the death of a process of this host is seen (also peer.cpp).
PIDFD_NEEDS = "Linux 5.3 or later is needed and, in a container, a seccomp profile that allows it"

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_HELLO = struct.Struct("=16s16s")  # the sender's token, the token of the process that it wants
_MOST_STRANGERS = 64  # connections that have said nothing yet
_ANSWERED_WITHIN = 2.0  # seconds; whoever refuses a connection has attached before
_LOOK_AGAIN = 0.05  # seconds between looks whether another thread has attached a peer
_LOOK_FOR_PROBLEMS = 0.25  # seconds between looks at what other ranks have reported


class ProcessNode:
    """Finds this process's node: its one segment of shared memory, made when first asked for.

    All communicators share it. torch makes each process group separately, so hundreds of groups
    would cost hundreds of segments and threads if the node were not found again here. The
    communicators own it.
    """

    def __init__(self) -> None:
        self._found: weakref.ref[_core.Node] | None = None
        self._lock = threading.Lock()
        # A fork may come while another thread has it.
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()

    def get(self) -> _core.Node:
        """Return the node. A fork of a process gets one of its own."""
        with self._lock:  # threads may join at once
            node = self._found() if self._found is not None else None
            if node is None or node.forked:
                node = _core.Node()
                self._found = weakref.ref(node)
            return node

    def forget(self) -> None:
        """Make a new node next time; whoever has the old one keeps it."""
        self._found = None


NODE = ProcessNode()


def host_identity() -> str:
    """Return a text that is the same for processes that should try to share memory.

    It names the boot and the namespaces of network (where abstract sockets live) and of processes.
    Attaching proves that two ranks can share memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid")]
    return "/".join([boot, *spaces])


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user on the other side of a Unix socket, as the kernel says.

    The pid is 0 for a process of another pid namespace.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def other_user(connection: socket.socket) -> int | None:
    """Return the user on the other side of a Unix socket, or None if it is this process's."""
    if connection.family != socket.AF_UNIX:
        return None
    _, user = credentials(connection)
    return None if user == os.getuid() else user


def check_user(connection: socket.socket, address: str) -> None:
    """Raise if another user listens at this Unix socket: anybody may take a name first."""
    if (user := other_user(connection)) is not None:
        connection.close()
        raise ConfigurationError(
            f"user {user} listens at {address}, and this process is of user {os.getuid()}"
        )


@dataclass(frozen=True)
class PeerAddress:
    """A peer and where it listens, from its record."""

    rank: int
    token: bytes
    socket_name: str
    host: str  # for messages only


class Listener:
    """An abstract socket at which higher ranks attach; it leaves no file."""

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
    """Attach peers: connect to the lower ranks, and accept the higher ones.

    Args:
        node: this process's shared memory.
        listener: what this rank's record names.
        lower: the ranks below this one, not attached yet.
        higher: the ranks above, not attached yet.
        deadline: on the monotonic clock, seconds.
        raise_problem: called while waiting; raises what another rank has reported.

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
    """One thread's attachments, all waited for at once.

    Another thread may wait for what lies unread here, and this one for what lies unread there, so
    each takes what comes whenever it comes. A lower rank that closes the connection has attached
    this process through another thread, which has the answer or will have it; or its process has
    ended, which its pidfd tells.
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
        self._looked = monotonic()  # for a problem
        self._answers: dict[socket.socket, PeerAddress] = {}  # of lower ranks, awaited
        # A stranger may connect and say nothing, so no connection keeps the others waiting.
        self._silent: list[socket.socket] = []
        self._others: set[int] = set()  # users whose connections were refused
        self._closed: dict[int, PeerAddress] = {}  # by the pidfds of processes that closed theirs
        self._refused: list[tuple[float, PeerAddress, OSError]] = []  # and until when
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)

    def connect(self, peer: PeerAddress) -> None:
        """Connect to a lower rank and send it this process's memory."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            while True:
                try:
                    connection.connect("\0" + peer.socket_name)
                    break
                except BlockingIOError:  # strangers fill its queue until it accepts
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
            # With a store of few operations it may have joined by another thread already.
            self._refused.append((monotonic() + _ANSWERED_WITHIN, peer, error))
        else:
            self._answers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)

    def wait(self, lower: list[PeerAddress], higher: list[PeerAddress]) -> None:
        """Wait until all are attached, by whichever thread of this process."""
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
        """Close all connections; first read what another thread may wait for."""
        for connection, peer in self._answers.items():
            with suppress(ConfigurationError, OSError, RuntimeError):
                _receive(self._node, connection, {peer.token: peer})
        for connection in (*self._answers, *self._silent):
            connection.close()
        for process in self._closed:
            os.close(process)
        self._selector.close()

    def _ready(self, missing: list[PeerAddress]) -> list[Any]:
        """Return the sockets and pidfds that can be read; wait a while for one."""
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
        longest = _LOOK_AGAIN if while_others_attach else _LOOK_FOR_PROBLEMS
        events = self._selector.select(min(left, longest))
        if not events and monotonic() - self._looked >= _LOOK_FOR_PROBLEMS:
            self._look_for_problem()
        return [key.fileobj for key, _ in events]

    def _look_for_problem(self) -> None:
        self._looked = monotonic()
        self._raise_problem()

    def _take_answer(self, connection: socket.socket) -> None:
        peer = self._answers.pop(connection)
        self._selector.unregister(connection)
        with connection:
            if _receive(self._node, connection, {peer.token: peer}) is not None:
                return
            pid, _ = credentials(connection)
        if pid == 0:
            return  # in another pid namespace: only the deadline ends the wait
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
            raise PeerFailure(f"rank {peer.rank} has ended while it joined", op="init")

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
    """Attach the peer that sends a hello for this process; return None for a stranger."""
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
