"""Which way top-k goes between hosts, by bytes alone, so that all ranks say the same."""

from __future__ import annotations

from pycollective.compression.placing import Places

# Up to here a rank may receive by gather; beyond, more than two hosts go by region.
GATHERED = 256 << 10
_PLACE = 2  # bytes that one takes, about


def gathers(entries: int, value_bytes: int, places: Places) -> bool:
    """Whether to gather.

    Args:
        entries: elements that a host sends of all parameters.
        value_bytes: of each value.
        places: the hosts.
    """
    received = (places.hosts - 1) * entries * (_PLACE + value_bytes) // places.shares
    return places.hosts <= 2 or received <= GATHERED
