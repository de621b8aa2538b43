"""Where a store is served, and the secret that its clients present.

Whoever can reach a port can talk to what serves there, so a store at a port wants a secret. It
travels as it is: it keeps out who reaches the port, not who listens to the network in between.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

from pycollective.config import ENV_SECRET, ENV_SECRET_FILE
from pycollective.errors import ConfigurationError

_MOST_SECRET = 4096  # bytes of a file


def parse_address(address: str, secret: str) -> tuple[int, Any]:
    """``unix:@name`` (abstract) or ``tcp://host:port`` as a socket family and address.

    Raises:
        ConfigurationError: it is neither, or a port without a secret: anybody could write to what
            the ranks read there.
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


def job_secret() -> str:
    """The secret of this job's store: the variable's, or the file's; empty where there is none.

    Raises:
        ConfigurationError: it is no single word, or the file cannot be read, or by others too.
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
    """A secret's file, which its owner alone may read."""
    try:
        # Not even a pipe keeps it waiting.
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
