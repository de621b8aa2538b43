"""Which processes of a host belong together: of one kernel, one set of namespaces, one user."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from pycollective.errors import ConfigurationError

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


def host_identity() -> str:
    """The same for processes that can reach each other's sockets and see each other's processes.

    The boot, and the namespaces of network (where abstract sockets live) and of processes. That
    two ranks can share memory is proved by attaching; this says only which ones should try.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid")]
    return "/".join([boot, *spaces])


def other_user(connection: socket.socket) -> int | None:
    """Who is on the other side of a Unix socket, as the kernel says, unless it is this user."""
    if connection.family != socket.AF_UNIX:
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return None if user == os.getuid() else int(user)


def check_user(connection: socket.socket, address: str) -> None:
    """Refuse a Unix socket at which another user listens: anybody may take a name first."""
    if (user := other_user(connection)) is not None:
        connection.close()
        raise ConfigurationError(
            f"user {user} listens at {address}, and this process is of user {os.getuid()}"
        )
