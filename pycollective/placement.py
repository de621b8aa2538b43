"""The host of each rank: numbered, checked, and packed into few bytes."""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

from pycollective.config import MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError


def number_hosts(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Return a number for each rank's host, from 0 in the order of their first ranks."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def pack(host_of: Sequence[int]) -> str:
    """Return the hosts of all ranks as text.

    It has some 100 bytes for thousands of ranks in any order that repeats itself.
    """
    raw = struct.pack(f"<{len(host_of)}H", *host_of)
    return base64.b64encode(zlib.compress(raw)).decode()


def unpack(text: str, size: int) -> tuple[int, ...]:
    """Return what `pack` was given for `size` ranks.

    Raises:
        ValueError, zlib.error, struct.error: this cannot be.
    """
    # No more than it must be, whatever it was made of.
    raw = zlib.decompressobj().decompress(base64.b64decode(text), 2 * size)
    host_of = struct.unpack(f"<{size}H", raw)
    if number_hosts(host_of) != host_of:
        raise ValueError("its hosts are not numbered in the order of their first ranks")
    return host_of


def check_hosts(host_of: Sequence[int], names: Sequence[str] = ()) -> None:
    """Raise if a host has more ranks than can share memory.

    Args:
        host_of: the host of each rank.
        names: of each rank's host, for the message; empty where the hosts are simulated.
    """
    host, ranks = Counter(host_of).most_common(1)[0]
    if ranks <= MAX_RANKS_PER_HOST:
        return
    name = repr(names[list(host_of).index(host)]) if names else f"{host} of the topology"
    raise ConfigurationError(
        f"host {name} has {ranks} ranks, and at most {MAX_RANKS_PER_HOST} share one: start fewer "
        "there, and the rest on other hosts"
    )
