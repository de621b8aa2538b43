"""How driver and ranks talk, in JSON lines over a Unix socket, and the start line of the ranks."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import time
from typing import Any

_LINE_SECONDS = 60.0


class ChannelClosed(ConnectionError):
    """The other side has gone."""


class Channel:
    """One connected end. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""

    def fileno(self) -> int:
        """The socket's descriptor, to select on."""
        return self._socket.fileno()

    @property
    def buffered(self) -> bool:
        """`receive` has a message already, which select would not see."""
        return b"\n" in self._received

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other side has gone.
        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the control channel is closed") from error

    def receive(self) -> dict[str, Any]:
        """Block for one message; there is no limit, but the other side's end is seen.

        Raises:
            ChannelClosed: the other side has gone.
        """
        while b"\n" not in self._received:
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionResetError as error:
                raise ChannelClosed("the control channel is closed") from error
            if not chunk:
                raise ChannelClosed("the control channel is closed")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class ChannelListener:
    """Accepts the ranks of one group, on an abstract socket: no file to leave behind."""

    def __init__(self) -> None:
        self.address = f"pycollective-bench-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(256)

    def accept(self, timeout: float) -> Channel | None:
        """Return this user's next connection; None after `timeout` seconds without one."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():  # another user of this machine guessed the name
            connection.close()
            return None
        # A rank writes whole lines at once: more than a moment within one is a fault.
        connection.settimeout(_LINE_SECONDS)
        return Channel(connection)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(address: str) -> Channel:
    """A rank's end: connect to the driver's `ChannelListener`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address)
    return Channel(connection)


_LINE = 64  # bytes: each rank's cell lies in its own cache line


class StartLine:
    """Where the ranks of a group wait for each other before a block of calls.

    The benchmark's own barrier, the same for every library: a library's own would leave its ranks
    apart by as much as the barrier is slow, which would then count against its collectives.

    One cell a rank in a shared file; a rank writes its own and reads the others'.

    Cells hold how often their rank has arrived, so they only grow, and nothing is ever reset.
    """

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other * _LINE // 8 for other in range(ranks) if other != rank]
        # More ranks than cores: those who wait must not keep those who are late from the cores.
        self._polite = ranks > len(os.sched_getaffinity(0))
        self._arrived = 0
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, self.bytes(ranks))
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._map).cast("Q")

    @staticmethod
    def bytes(ranks: int) -> int:
        """Return the size of the shared file for `ranks` ranks."""
        return ranks * _LINE

    def wait(self, timeout: float = 60.0) -> None:
        """Return once every rank has arrived.

        Raises:
            TimeoutError: not all arrived within `timeout` seconds.
        """
        self._arrived += 1
        cells, arrived = self._cells, self._arrived
        cells[self._rank * _LINE // 8] = arrived
        deadline = time.monotonic() + timeout
        for other in self._others:
            polls = 0
            while cells[other] < arrived:
                polls += 1
                if self._polite or polls > 10_000:
                    os.sched_yield()
                if polls % 1_000 == 0 and time.monotonic() > deadline:
                    raise TimeoutError(f"not every rank arrived within {timeout:g} s")
