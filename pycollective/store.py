"""A small key-value store with which ranks find each other where no torch store is at hand.

A server thread (in `pycollective run`, or in rank 0 for ``store="tcp://host:port"``) keeps the
values; clients set them and wait for them. Each message is one JSON line, so a stranger's bytes can
do no more than lose their own connection. Keys live as long as the server.
"""

from __future__ import annotations

import base64
import hmac
import json
import selectors
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from pycollective.errors import CollectiveTimeout, ConfigurationError

_MAX_LINE = 1 << 20
_MAX_CLIENTS = 1024


def parse_address(address: str) -> tuple[int, Any]:
    """``unix:@name`` (abstract) or ``tcp://host:port`` as a socket family and address."""
    if address.startswith("unix:@"):
        return socket.AF_UNIX, "\0" + address[len("unix:@") :]
    if address.startswith("tcp://"):
        host, separator, port = address[len("tcp://") :].rpartition(":")
        if separator and host and port.isdigit():
            return socket.AF_INET, (host, int(port))
    raise ConfigurationError(f"store address {address!r} is not tcp://host:port or unix:@name")


class StoreServer:
    """Serves one store from a thread of its own until closed.

    Args:
        address: where to listen; see `parse_address`.
        secret: what every client must present; empty for none.
    """

    def __init__(self, address: str, secret: str = "") -> None:
        family, target = parse_address(address)
        self._secret = secret
        self._values: dict[str, str] = {}
        self._counters: dict[str, int] = {}
        self._waiting: dict[str, list[socket.socket]] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(target)
            self._listener.listen(_MAX_CLIENTS)
        except OSError as error:
            self._listener.close()
            raise ConfigurationError(f"cannot serve a store at {address}: {error}") from error
        self._listener.setblocking(False)
        self._stop, self._stopper = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="pycollective-store", daemon=True)
        self._thread.start()

    def has(self, key: str) -> bool:
        """Whether `key` is set; from any thread of the serving process."""
        return key in self._values

    def close(self) -> None:
        """End the thread and every connection. Idempotent."""
        if self._thread.is_alive():
            self._stopper.send(b"x")
            self._thread.join()
        for each in (self._listener, self._stop, self._stopper, *self._buffers):
            each.close()
        self._selector.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # gone again
        if len(self._buffers) >= _MAX_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self._buffers[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _drop(self, client: socket.socket) -> None:
        if self._buffers.pop(client, None) is None:
            return
        self._selector.unregister(client)
        for waiting in self._waiting.values():
            if client in waiting:
                waiting.remove(client)
        client.close()

    def _read(self, client: socket.socket) -> None:
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
            if not self._handle(client, line):
                self._drop(client)
                return

    def _handle(self, client: socket.socket, line: bytes) -> bool:
        try:
            message = json.loads(line)
            secret, what, key = (str(message[name]) for name in ("secret", "do", "key"))
            value = str(message.get("value", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return False
        if what == "set":
            self._values[key] = value
            for waiting in self._waiting.pop(key, []):
                self._answer(waiting, value)
            return self._answer(client, "")
        if what == "get":
            if key in self._values:
                return self._answer(client, self._values[key])
            self._waiting.setdefault(key, []).append(client)
            return True
        if what == "check":
            return self._answer(client, "yes" if key in self._values else "")
        if what == "add":
            self._counters[key] = self._counters.get(key, 0) + 1
            return self._answer(client, str(self._counters[key]))
        return False

    def _answer(self, client: socket.socket, value: str) -> bool:
        try:
            client.sendall(value.encode() + b"\n")
        except OSError:
            self._drop(client)
            return False
        return True


class StoreClient:
    """A connection to a `StoreServer`, with the calls of a `torch.distributed.Store` that ranks use
    to find each other. Not thread-safe.

    Args:
        address: see `parse_address`.
        secret: what the server wants.
        timeout: seconds that connecting, and each call, may take.

    Raises:
        CollectiveTimeout: nobody serves there in time, or a key was not set in time.
    """

    def __init__(self, address: str, secret: str = "", timeout: float = 600.0) -> None:
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._connect()

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, for all clients."""
        self._ask("set", key, self._timeout, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until it is set."""
        return base64.b64decode(self._ask("get", key, self._timeout))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all `keys` are set."""
        deadline = time.monotonic() + timeout.total_seconds()
        for key in keys:
            self._ask("get", key, deadline - time.monotonic())

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are set."""
        return all(self._ask("check", key, self._timeout) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count up by `amount`, which must be 1; the count, which starts at 0 and is no value."""
        if amount != 1:
            raise ConfigurationError("this store counts by 1 only")
        return int(self._ask("add", key, self._timeout))

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def _connect(self) -> socket.socket:
        family, target = parse_address(self._address)
        deadline = time.monotonic() + self._timeout
        while True:
            attempt = socket.socket(family, socket.SOCK_STREAM)
            attempt.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                attempt.connect(target)
            except OSError as error:
                attempt.close()
                if time.monotonic() >= deadline:
                    raise CollectiveTimeout(
                        f"no store answers at {self._address} within {self._timeout:g} s: {error}"
                    ) from error
                time.sleep(0.02)  # rank 0 may not serve yet
            else:
                self._socket = attempt
                return attempt

    def _ask(self, what: str, key: str, timeout: float, value: str = "") -> str:
        message = {"secret": self._secret, "do": what, "key": key, "value": value}
        deadline = time.monotonic() + timeout
        connection = self._socket or self._connect()
        try:
            connection.settimeout(max(0.001, timeout))
            connection.sendall(json.dumps(message).encode() + b"\n")
            while b"\n" not in self._buffer:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError("it has ended, or wants another secret")
                self._buffer += data
        except TimeoutError as error:
            self.close()  # or a late answer would be taken for the next one's
            raise CollectiveTimeout(f"{key!r} was not set within {timeout:g} s") from error
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"the store at {self._address} closed the connection: {error}"
            ) from error
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()
