"""Which processes of a host belong together: of one kernel, one set of namespaces, one user."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from pycollective.errors import ConfigurationError

# What pidfd_open wants, by which the death of a process of this host is seen (also peer.cpp).
PIDFD_NEEDS = "Linux 5.3 or later is needed and, in a container, a seccomp profile that allows it"

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


def host_identity() -> str:
    """The same for processes that can reach each other's sockets and see each other's processes.

    The boot, and the namespaces of network (where abstract sockets live) and of processes. That
    two ranks can share memory is proved by attaching; this says only which ones should try.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid")]
    return "/".join([boot, *spaces])


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The process and the user on the other side of a Unix socket, as the kernel says.

    The process is 0 where it is of another pid namespace.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def other_user(connection: socket.socket) -> int | None:
    """The user on the other side of a Unix socket, unless it is this process's own."""
    if connection.family != socket.AF_UNIX:
        return None
    _, user = credentials(connection)
    return None if user == os.getuid() else user


def check_user(connection: socket.socket, address: str) -> None:
    """Refuse a Unix socket at which another user listens: anybody may take a name first."""
    if (user := other_user(connection)) is not None:
        connection.close()
        raise ConfigurationError(
            f"user {user} listens at {address}, and this process is of user {os.getuid()}"
        )
