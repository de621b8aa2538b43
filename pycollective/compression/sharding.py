"""The shards of a parameter: reduce_scatter's items, one a rank that gets the average of it."""

from __future__ import annotations

from pycollective.compression.arrays import Item, Readable, Window
from pycollective.compression.placing import Places
from pycollective.errors import ConfigurationError


def shard_name(name: str, rank: int) -> str:
    """What is kept of the shard of a parameter that goes to a rank."""
    return f"{name}\0{rank}"  # as no parameter is called


def check_shards(name: str, count: int, places: Places) -> None:
    """Refuse a parameter of `count` elements that has no shards here.

    Raises:
        ConfigurationError: it cannot be shared out evenly, or hosts differ in numbers of ranks.
    """
    if count % places.ranks:
        raise ConfigurationError(
            f"reduce_scatter: the {count} elements of {name!r} cannot be shared out evenly among "
            f"{places.ranks} ranks"
        )
    if any(len(places.on(host)) != places.shares for host in range(places.hosts)):
        raise ConfigurationError(
            "reduce_scatter wants as many ranks on every host; between='ranks' takes every rank "
            "for a host"
        )


def items_of_shards(name: str, x: Readable, dense: bool, places: Places) -> list[Item]:
    """A parameter's shards, in the order of the ranks that get them."""
    count = x.count // places.ranks
    return [
        Item(
            shard_name(name, rank),
            Window(x, rank * count, (rank + 1) * count),
            dense,
            (places.share_of(rank), places.host_of[rank]),
        )
        for rank in range(places.ranks)
    ]
