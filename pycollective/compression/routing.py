"""Which way top-k goes between hosts, by bytes alone, so that all ranks say the same.

A rank receives H - 1 payloads by gather, 2 (H - 1) / H by region: that saves (H - 1)(1 - 2 / H) of
them, nothing between two hosts, and takes two more collectives and a second selection. What these
cost is a link's affair: 0.3 ms, say, are worth 37 KiB at 1 Gbit/s, 370 at 10. The threshold lies
between: what is saved takes 1 ms at 1 Gbit/s, 0.1 ms at 10.

`benchmarks/gather_or_region.py` measures the price where bytes cost nothing, ranks of one machine
that play hosts. On two cores busy with other work region was 3 to 13 ms slower of 9 to 73 ms at 4
hosts and up to 373 KiB received by gather, 7 to 10 at 8 hosts and up to 218 KiB; at 8 hosts and
435 KiB to 3.4 MiB it was ahead in three of four sizes. So the threshold is a model's; no
measurement between real hosts has confirmed it.
"""

from __future__ import annotations

from pycollective.compression.placing import Places

# Where a rank would receive more bytes fewer by region than this, more than two hosts go by it.
SAVED = 128 << 10
_PLACE = 2  # bytes that one takes, about


def gathers(entries: int, value_bytes: int, places: Places) -> bool:
    """Whether to gather.

    Args:
        entries: elements that a host sends of all parameters.
        value_bytes: of each value.
        places: the hosts.
    """
    hosts = places.hosts
    received = (hosts - 1) * entries * (_PLACE + value_bytes) // places.shares
    return received * (hosts - 2) <= SAVED * hosts
