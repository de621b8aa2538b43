"""Whether this host has room for the shared memory that a group commits.

Memory that a cgroup does not grant is not refused: the kernel kills whoever touches it. So it is
asked for first. ``fallocate`` alone does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pycollective.errors import ConfigurationError

_MIB = 1 << 20


@dataclass(frozen=True)
class Headroom:
    """What can still be committed: `bytes`, as `limit` (a file) says."""

    bytes: int
    limit: str


def headroom(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """The least of the machine's available memory and of every limit of this process's cgroups.

    Args:
        proc: where proc is mounted.
        cgroups: where cgroup v2 is mounted, or the folder of v1's controllers.
    """
    found = [_machine(proc)]
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if number == "0" and not controllers:
            found += _walk(cgroups, relative, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _walk(
                cgroups / "memory", relative, "memory.limit_in_bytes", "memory.usage_in_bytes"
            )
    return min(found, key=lambda each: each.bytes)


def check(needed: int, room: Headroom | None = None) -> None:
    """Raise `ConfigurationError` where `needed` bytes cannot be committed."""
    room = headroom() if room is None else room
    if needed > room.bytes:
        raise ConfigurationError(
            f"this rank needs {needed / _MIB:.1f} MiB of shared memory, and {room.limit} leaves "
            f"{room.bytes / _MIB:.1f} MiB: give the job or container more memory, or run fewer "
            "ranks on this host"
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _machine(proc: Path) -> Headroom:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Headroom(int(value.split()[0]) * 1024, "the machine's MemAvailable")
    return Headroom(1 << 62, "nothing known")


def _walk(root: Path, relative: str, limit_name: str, usage_name: str) -> list[Headroom]:
    """The limits from a cgroup up to the root; in a container the path may not exist below it."""
    found = []
    folder = root / relative if relative else root
    for each in [folder, *folder.parents]:
        limit, usage = _lines(each / limit_name), _lines(each / usage_name)
        if limit and usage and limit[0] != "max":
            left = max(0, int(limit[0]) - int(usage[0]))
            found.append(Headroom(left, f"the limit {each / limit_name}"))
        if each == root:
            break
    return found
