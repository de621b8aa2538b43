"""Checks that this host has the shared memory that a group commits.

The kernel does not refuse memory that a cgroup does not grant: it kills whoever touches it. So the
limits are read first; ``fallocate`` alone does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pycollective.errors import ConfigurationError

_MIB = 1 << 20
_UNLIMITED = 1 << 62  # version 1 says a number above it where there is no limit


@dataclass(frozen=True)
class _Version:
    """The files of one version of cgroups, and the lines of its memory.stat."""

    limit: str
    usage: str
    file_cache: tuple[str, str]


_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


@dataclass(frozen=True)
class Headroom:
    """The bytes that can still be committed, and the file that limits them."""

    bytes: int
    limit: str


def headroom(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """Return the least of the machine's available memory and of this process's cgroups' limits.

    Args:
        proc: where proc is mounted.
        cgroups: where cgroup v2 is mounted, or the folder of v1's controllers.
    """
    least = _machine(proc)
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if number == "0" and not controllers:
            least = _walk(cgroups, relative, _V2, least)
        elif "memory" in controllers.split(","):
            least = _walk(cgroups / "memory", relative, _V1, least)
    return least


def check(needed: int, ranks: int, room: Headroom | None = None) -> None:
    """Raise `ConfigurationError` where `ranks` ranks cannot commit `needed` bytes each.

    All are counted together: the ranks of a host come at about the same time, and each would find
    the same memory free.
    """
    room = headroom() if room is None else room
    if needed * ranks > room.bytes:
        raise ConfigurationError(
            f"{ranks} ranks need {needed * ranks / _MIB:.1f} MiB of shared memory together, and "
            f"{room.limit} leaves {room.bytes / _MIB:.1f} MiB: give the job or container more "
            "memory, or run fewer ranks on this host"
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
    return Headroom(_UNLIMITED, "nothing known")


def _walk(root: Path, relative: str, version: _Version, least: Headroom) -> Headroom:
    """Return `least`, or the room in a cgroup up to the root that leaves less.

    Containers may see the root alone. Each file costs some 20 us, and `Communicator.empty` asks on
    each call. So usage is read only where there is a limit, and memory.stat only where it counts.
    """
    folder = root / relative if relative else root
    for each in [folder, *folder.parents]:
        limit = _lines(each / version.limit)
        bounded = limit and limit[0] != "max" and int(limit[0]) < _UNLIMITED
        if bounded and (usage := _lines(each / version.usage)):
            left = int(limit[0]) - int(usage[0])
            if left < least.bytes:
                left = max(0, left + _file_cache(each, version))
                found = Headroom(left, f"the limit {each / version.limit}")
                least = min(least, found, key=lambda room: room.bytes)
        if each == root:
            break
    return least


def _file_cache(folder: Path, version: _Version) -> int:
    """Return the bytes of cached files: they count as usage, and are given back on demand."""
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    return sum(int(stat.get(name, 0)) for name in version.file_cache)
