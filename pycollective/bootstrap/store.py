"""A small key-value store in which ranks find each other where there is no torch store.

A server thread (in `pycollective run`, or in one rank) keeps the values; clients set them and wait
for them. Keys live as long as the server.

A message is one line of four words: secret, verb, key, value. The answer is one line, the value.
The secret is a word, keys and values are base64. The server compares and keeps bytes and decodes
nothing, so a stranger's bytes can do no more than lose their own connection.

Whoever can reach a port can talk to what serves there, so a store at a port wants a secret. It
travels unencrypted: it keeps out who can reach the port, not who can read the network in between.
"""

from __future__ import annotations

import base64
import hmac
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pycollective.bootstrap.attach import check_user, other_user
from pycollective.config import ENV_SECRET, ENV_SECRET_FILE, MAX_RANKS_PER_HOST
from pycollective.errors import CollectiveTimeout, ConfigurationError
from pycollective.system_limits import connections_for, described, start_thread

_MOST_SECRET = 4096  # bytes of a file
# Bytes of a message. An answer is no longer, so it fits into an empty socket buffer: a client that
# reads each answer before it asks again is always answered without a wait.
_MAX_LINE = 1 << 17
_POLL = 0.005  # seconds between calls of `poll` while a client waits
_word = base64.b64encode


def parse_address(address: str, secret: str) -> tuple[int, Any]:
    """Return the socket family and address of ``unix:@name`` (abstract) or ``tcp://host:port``.

    Raises:
        ConfigurationError: it is neither, or a port without a secret, where anybody could write.
    """
    if address.startswith("unix:@"):
        return socket.AF_UNIX, "\0" + address[len("unix:@") :]
    if address.startswith("tcp://"):
        host, separator, port = address[len("tcp://") :].rpartition(":")
        if separator and host and port.isdecimal() and 0 < int(port) < 65536:
            if not secret:
                raise ConfigurationError(
                    f"the store at {address} wants a secret, or whoever reaches that port could "
                    f"write to it. On all ranks set {ENV_SECRET} to the same random word (openssl "
                    f"rand -hex 16), or {ENV_SECRET_FILE} to a file that holds it and that its "
                    "owner alone may read (chmod 600)"
                )
            return socket.AF_INET, (host, int(port))
    raise ConfigurationError(f"store address {address!r} is not tcp://host:port or unix:@name")


def followed_key(group: int) -> str:
    """Return the key where a rank tells `pycollective run` that it ends because of another.

    Args:
        group: its process group, which it shares with a wrapper, such as a shell, that started it.
    """
    return f"pycollective/followed/{group}"


def joined_key(group: int) -> str:
    """Return the key where a rank of `pycollective run --elastic` tells that it has joined."""
    return f"pycollective/joined/{group}"


def job_secret() -> str:
    """Return the secret of this job's store, from the variable or the file; empty without either.

    Raises:
        ConfigurationError: it is not one word, or the file cannot be read, or others may read it.
    """
    secret = os.environ.get(ENV_SECRET, "")
    source = f"the environment variable {ENV_SECRET}"
    if not secret and (name := os.environ.get(ENV_SECRET_FILE)):
        secret, source = _content_of(Path(name)), f"{name} ({ENV_SECRET_FILE})"
        if not secret:
            raise ConfigurationError(f"the secret in {source} is empty")
    if secret and not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigurationError(
            f"the secret in {source} is not one word of ASCII, such as `openssl rand -hex 16` makes"
        )
    return secret


def _content_of(path: Path) -> str:
    """Return what a secret's file holds; only its owner may have access."""
    try:
        # O_NONBLOCK: a pipe does not keep it waiting.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            mode, owner = status.st_mode, status.st_uid
            if not stat.S_ISREG(mode) or mode & 0o077 or owner not in (os.geteuid(), 0):
                raise ConfigurationError(
                    f"{path} ({ENV_SECRET_FILE}) keeps no secret: it must be a file that its owner "
                    f"alone, this process's user, may read (chmod 600), and it is "
                    f"{stat.filemode(mode)} of user {owner}"
                )
            return file.read(_MOST_SECRET).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigurationError(f"{path} ({ENV_SECRET_FILE}) cannot be read: {error}") from error


class StoreServer:
    """Serves a store from a thread of its own until closed.

    Clients may connect as soon as it is made, and are answered once it is started.

    Args:
        address: where to listen; see `parse_address`.
        secret: a word that every client must present; without one, ``unix:`` serves only this
            user.
        start: False to call `start` later, as a process that still has to fork does.
        clients: how many will come.

    Raises:
        ConfigurationError: the address cannot be listened at, or wants a secret, or so many
            clients need more descriptors than this process may open.
    """

    def __init__(
        self,
        address: str,
        secret: str = "",
        *,
        start: bool = True,
        clients: int = MAX_RANKS_PER_HOST,
    ) -> None:
        family, target = parse_address(address, secret)
        self._most_connections = connections_for(clients)
        self._secret = secret.encode()
        self._values: dict[bytes, bytes] = {}
        self._counts: dict[bytes, int] = {}
        self._waiting: dict[bytes, list[socket.socket]] = {}
        self._buffers: dict[socket.socket, bytes] = {}  # of each client, in order of arrival
        self._known: set[socket.socket] = set()  # those that have sent a valid message
        self._served = 0  # how many ever have
        self._wills: dict[socket.socket, list[tuple[bytes, bytes]]] = {}  # set when a client dies
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(target)
            self._listener.listen(self._most_connections)
        except OSError as error:
            self._listener.close()
            raise ConfigurationError(f"cannot serve a store at {address}: {error}") from error
        self._listener.setblocking(False)
        self._orders, self._commander = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._orders, selectors.EVENT_READ)
        self._listening_ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pycollective-store", daemon=True)
        if start:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    def start(self) -> None:
        """Begin to answer. Raises `ConfigurationError` if no thread can be started."""
        start_thread(self._thread)

    def has(self, key: str) -> bool:
        """Return whether `key` is set; from any thread of the serving process."""
        return _word(key.encode()) in self._values

    def stop_listening(self) -> None:
        """Refuse new clients from now on; keep those that have connected."""
        self._commander.send(b"l")
        if not self._listening_ended.wait(10.0):
            raise ConfigurationError("the store does not answer its own process: was it started?")

    def close(self, linger: float = 0.0, clients: int = 0) -> None:
        """End the thread and every connection. Idempotent.

        Args:
            linger: seconds to wait until `clients` clients have come and left again.
            clients: how many.
        """
        deadline = time.monotonic() + linger
        while (self._known or self._served < clients) and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._thread.is_alive():
            self._commander.send(b"x")
            self._thread.join()
        for each in (self._listener, self._orders, self._commander, *self._buffers):
            each.close()
        self._buffers.clear()
        self._selector.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._orders:
                    if self._orders.recv(1) == b"x":
                        return
                    self._selector.unregister(self._listener)
                    self._listener.close()
                    self._listening_ended.set()
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone again
        except OSError:  # no descriptor is left; the client stays in the queue meanwhile
            time.sleep(0.01)
            return
        if not self._secret and other_user(client) is not None:
            client.close()
            return
        if len(self._buffers) >= self._most_connections:
            # The oldest of those that have said nothing yet makes room.
            silent = next((each for each in self._buffers if each not in self._known), None)
            if silent is None:
                client.close()
                return
            self._drop(silent)
        client.setblocking(False)
        self._buffers[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _drop(self, client: socket.socket) -> None:
        if self._buffers.pop(client, None) is None:
            return
        self._known.discard(client)
        self._selector.unregister(client)
        client.close()
        for key, value in self._wills.pop(client, []):
            if key not in self._values:
                self._set(key, value)

    def _read(self, client: socket.socket) -> None:
        if client not in self._buffers:
            return  # dropped while an earlier event was served
        try:
            data = client.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer = self._buffers[client] + data
        if not data or len(buffer) > _MAX_LINE:
            self._drop(client)
            return
        *lines, self._buffers[client] = buffer.split(b"\n")
        for line in lines:
            if client not in self._buffers:
                return
            if not self._handle(client, line):
                self._drop(client)

    def _handle(self, client: socket.socket, line: bytes) -> bool:
        """Serve one message; return False for a line that is none."""
        words = line.split(b" ")
        if len(words) != 4 or not hmac.compare_digest(words[0], self._secret):
            return False
        if client not in self._known:
            self._known.add(client)
            self._served += 1
        _, verb, key, value = words
        if verb == b"set":
            self._set(key, value)
            self._answer(client, b"")
        elif verb == b"get":
            if key in self._values:
                self._answer(client, self._values[key])
            else:
                self._waiting.setdefault(key, []).append(client)
        elif verb == b"check":
            self._answer(client, b"1" if key in self._values else b"0")
        elif verb == b"claim":
            if key not in self._values:
                self._set(key, value)
            self._answer(client, self._values[key])
        elif verb == b"will":  # not answered, nor is the next
            self._wills.setdefault(client, []).extend((each, value) for each in key.split(b","))
        elif verb == b"bye":
            self._wills.pop(client, None)
        elif verb == b"count":
            self._counts[key] = self._counts.get(key, 0) + 1
            self._answer(client, str(self._counts[key]).encode())
        else:
            return False
        return True

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for each in self._waiting.pop(key, []):
            self._answer(each, value)

    def _answer(self, client: socket.socket, value: bytes) -> None:
        try:
            client.sendall(value + b"\n")
        except BlockingIOError:  # it does not read
            self._drop(client)
        except OSError:
            pass  # it has gone: what it said before that, as "bye", is read first


class StoreClient:
    """A connection to a `StoreServer`. Not thread-safe.

    It has those calls of a `torch.distributed.Store` by which ranks find each other.

    Attributes:
        host: where it serves; empty where that is this host.
        poll: as given.

    Args:
        address: see `parse_address`.
        secret: what the server wants.
        timeout: seconds that connecting, and each call, may take.
        poll: called now and then while a call waits; what it raises ends the call.

    Raises:
        CollectiveTimeout: nobody serves there, or a key was not set, in time.
        ConfigurationError: the server has ended or wants another secret, or a value is 90 KB long.
    """

    def __init__(
        self,
        address: str,
        secret: str = "",
        timeout: float = 600.0,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._family, self._target = parse_address(address, secret)
        self._address = address
        self.host = self._target[0] if self._family == socket.AF_INET else ""
        self.poll = poll
        self._secret = secret.encode()
        self._timeout = timeout
        self._buffer = b""
        self._wills = self._unsent = b""  # for each connection; those that it has not been told
        self._socket: socket.socket | None = self._connect()

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, for all clients."""
        self._ask(b"set", key, self._timeout, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait until it is set."""
        return bytes(self._ask(b"get", key, self._timeout, read=base64.b64decode))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all `keys` are set."""
        deadline = time.monotonic() + timeout.total_seconds()
        for key in keys:
            self._ask(b"get", key, deadline - time.monotonic())

    def check(self, keys: list[str]) -> bool:
        """Return whether all `keys` are set."""
        return all(self._ask(b"check", key, self._timeout) == b"1" for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count up by `amount`, which must be 1; return the new count. Counts are no values."""
        if amount != 1:
            raise ConfigurationError("this store counts by 1 only")
        return int(self._ask(b"count", key, self._timeout, read=int))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` unless it is set; return its value. `expected` must be empty."""
        if expected:
            raise ConfigurationError("this store compares with the empty value only")
        value = desired.encode()
        return bytes(self._ask(b"claim", key, self._timeout, value, base64.b64decode))

    def last_will(self, keys: list[str], value: bytes) -> None:
        """Have the server set unset `keys` to `value` if this process dies before `close`."""
        line = self._line(b"will", keys, value)
        self._wills, self._unsent = self._wills + line, self._unsent + line

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall(self._line(b"bye", []))
            self._socket.close()
        self._socket, self._buffer, self._unsent = None, b"", self._wills

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                attempt = socket.socket(self._family, socket.SOCK_STREAM)
            except OSError as error:
                raise ConfigurationError(
                    f"the store at {self._address} cannot be connected to: {described(error)}"
                ) from error
            attempt.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                attempt.connect(self._target)
                if not self._secret:
                    check_user(attempt, self._address)
                return attempt
            except OSError as error:
                attempt.close()
                # A launcher has a secret, and listens before ranks start; no name stays none.
                by_launcher = self._family == socket.AF_UNIX and bool(self._secret)
                ended = by_launcher and isinstance(error, ConnectionRefusedError)
                if ended or isinstance(error, socket.gaierror):
                    raise ConfigurationError(
                        f"there is no store at {self._address}: {error}"
                    ) from error
                if time.monotonic() >= deadline:
                    raise CollectiveTimeout(
                        f"no store answers at {self._address} within the timeout of "
                        f"{self._timeout:g} s: {error}"
                    ) from error
            if self.poll is not None:
                self.poll()
            time.sleep(0.02)  # rank 0 may not serve yet

    def _line(self, verb: bytes, keys: list[str], value: bytes = b"") -> bytes:
        words = b",".join(_word(key.encode()) for key in keys)
        return b" ".join((self._secret, verb, words, _word(value))) + b"\n"

    def _ask(
        self,
        verb: bytes,
        key: str,
        timeout: float,
        value: bytes = b"",
        read: Callable[[bytes], Any] = bytes,
    ) -> Any:
        message = self._line(verb, [key], value)
        if len(message) > _MAX_LINE:
            raise ConfigurationError(
                f"{verb.decode()} {key[:100]!r}: {len(message) - 1} bytes are too long a message "
                f"for the store, which takes {_MAX_LINE - 1}"
            )
        deadline = time.monotonic() + timeout
        if self._socket is None:
            self._socket = self._connect()
        message, self._unsent = self._unsent + message, b""
        try:
            self._socket.settimeout(max(0.001, timeout))
            self._socket.sendall(message)
            while b"\n" not in self._buffer:
                data = self._receive(self._socket, deadline)
                if not data:
                    raise ConnectionResetError("it has ended, or wants another secret")
                self._buffer += data
                if len(self._buffer) > _MAX_LINE:
                    raise ConnectionResetError("its answer is too long for a store's")
        except TimeoutError as error:
            self.close()  # or a late answer would be taken for the next one's
            raise CollectiveTimeout(
                f"the store at {self._address} had no answer to {verb.decode()} {key!r} within "
                f"the timeout of {timeout:g} s"
            ) from error
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"the store at {self._address} closed the connection: {error}"
            ) from error
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return read(line)
        except ValueError as error:
            raise ConfigurationError(f"no store answers at {self._address}: {error}") from error

    def _receive(self, connection: socket.socket, deadline: float) -> bytes:
        while self.poll is not None:
            connection.settimeout(max(0.001, min(_POLL, deadline - time.monotonic())))
            try:
                return connection.recv(65536)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            try:
                self.poll()
            except BaseException:
                self.close()  # the answer may still come
                raise
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        return connection.recv(65536)
