"""Residuals of all ranks put together, and cut up again: for checkpoints, flushing, other worlds.

Worker residuals are per host: (hosts, elements) of each parameter. The server's, where there are
any, are one for all: (elements,). Both are by element of the parameter, so that any number of ranks
on a host finds its part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.ends import Ends
from pycollective.compression.placing import Range, regions_of, shares_of
from pycollective.compression.residuals import Residuals
from pycollective.compression.sharding import shard_name
from pycollective.errors import ConfigurationError


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter.

    Attributes:
        rank: who does.
        host: its host.
        elements: of the parameter.
        name: what it is kept by.
    """

    rank: int
    host: int
    elements: Range
    name: str

    @property
    def count(self) -> int:
        """How many elements."""
        return self.elements[1] - self.elements[0]


class Keeper:
    """Gathers and hands out the residuals of a state's compressed parameters."""

    def __init__(
        self,
        ends: Ends,
        shapes: Mapping[str, tuple[int, ...]],
        dense: Mapping[str, bool],
        kinds: Mapping[str, Residuals],
        scale: float,
        chunk: int,
        sharded: Collection[str],
    ) -> None:
        self._ends = ends
        self._sizes = {n: math.prod(shape) for n, shape in shapes.items() if not dense[n]}
        self._kinds = kinds
        self._scale = scale  # what is gathered, handed out or loaded is in this
        self._chunk = chunk
        self._sharded = sharded

    def _parts(self, kind: str, name: str) -> Iterator[Part]:
        """Every part of a parameter's residual."""
        places = self._ends.places
        if name in self._sharded:
            if kind == "worker":
                yield from self._shards(name)
            return
        for number, share in enumerate(shares_of(name, self._sizes[name], self._chunk, places)):
            regions = regions_of(name, share, self._chunk, places)
            for host, rank in enumerate(places.across(number)):
                yield Part(rank, host, share if kind == "worker" else regions[host], name)

    def _shards(self, name: str) -> Iterator[Part]:
        """The same where shards of the parameter went to their ranks."""
        places = self._ends.places
        count = self._sizes[name] // places.ranks
        for to in range(places.ranks):
            elements = (to * count, (to + 1) * count)
            for host, rank in enumerate(places.across(places.share_of(to))):
                yield Part(rank, host, elements, shard_name(name, to))

    def gather(self) -> dict[str, dict[str, Floats]]:
        """Every kind's residuals by parameter; the same on all ranks."""
        return {kind: self._gather(kind) for kind in self._kinds}

    def _gather(self, kind: str) -> dict[str, Floats]:
        return {name: self._whole(kind, name) for name in sorted(self._sizes)}

    def _whole(self, kind: str, name: str) -> Floats:
        """One parameter's residual of a kind: (hosts, elements), or the server's."""
        places = self._ends.places
        of: list[list[Part]] = [[] for _ in range(places.ranks)]
        for part in self._parts(kind, name):
            of[part.rank].append(part)
        worker = kind == "worker"
        whole = np.zeros((places.hosts if worker else 1, self._sizes[name]), np.float32)
        row = np.zeros(max(sum(part.count for part in parts) for parts in of), np.float32)
        at = 0
        for part in of[places.rank]:
            held = self._kinds[kind].get(part.name, self._scale)
            if held is not None:
                row[at : at + part.count] = held
            at += part.count
        rows = self._ends.all.all_gather(row.view(np.uint8)).view(np.float32)
        for parts, row in zip(of, rows, strict=True):
            at = 0
            for part in parts:
                host = part.host if worker else 0
                whole[host, slice(*part.elements)] = row[at : at + part.count]
                at += part.count
        return whole if worker else whole[0]

    def mean(self) -> dict[str, Floats]:
        """By parameter: what all that is held adds to the average.

        One parameter after another: all hosts' residuals of a model at once are many times what a
        rank has room for.
        """
        return {name: self._mean(name) for name in sorted(self._sizes)}

    def _mean(self, name: str) -> Floats:
        of = {kind: {name: self._whole(kind, name)} for kind in self._kinds}
        return mean_of(of, self._ends.places.ranks)[name]

    def fitting(
        self, residuals: Mapping[str, Mapping[str, Any]], hosts: int
    ) -> dict[str, dict[str, Floats]]:
        """What `gather` gave in a world of so many hosts, as arrays.

        Raises:
            ConfigurationError: it is of other kinds or parameters.
        """
        arrays = {
            kind: {name: np.asarray(each, np.float32) for name, each in of.items()}
            for kind, of in residuals.items()
        }
        if set(arrays) != set(self._kinds):
            raise ConfigurationError(f"a state of other residuals: {sorted(arrays)}")
        for kind, of in arrays.items():
            shapes = {name: each.shape for name, each in of.items()}
            wants = {
                name: (hosts, size) if kind == "worker" else (size,)
                for name, size in self._sizes.items()
            }
            if shapes != wants:
                differ = sorted({name for name, _ in shapes.items() ^ wants.items()})
                raise ConfigurationError(f"a state of other parameters ({kind}): {differ}")
        return arrays

    def load(self, residuals: Mapping[str, Mapping[str, Any]], ranks: int, hosts: int) -> None:
        """Hold what `gather` gave in a world of so many ranks and hosts."""
        places = self._ends.places
        arrays = self.fitting(residuals, hosts)
        if (ranks, hosts) != (places.ranks, places.hosts):
            mean = mean_of(arrays, ranks)
            share = np.float32(places.ranks) / np.float32(places.hosts)
            arrays = {
                kind: {
                    name: np.broadcast_to(each * share, (places.hosts, each.size))
                    if kind == "worker"
                    else np.zeros_like(each)
                    for name, each in mean.items()
                }
                for kind in arrays
            }
        for kind, of in arrays.items():
            self._kinds[kind].clear()
            for name, whole in of.items():
                for part in self._parts(kind, name):
                    if part.rank == self._ends.places.rank:
                        row = whole[part.host] if kind == "worker" else whole
                        values = row[slice(*part.elements)]
                        self._kinds[kind].set(part.name, values, self._scale)


def mean_of(residuals: Mapping[str, Mapping[str, Floats]], ranks: int) -> dict[str, Floats]:
    """The hosts' residuals added up in the contract's order, divided; plus the server's."""
    found = {}
    for name, hosts in residuals["worker"].items():
        total = np.empty(hosts.shape[1], np.float32)
        _core.reduce_into([np.ascontiguousarray(row) for row in hosts], "sum", total)
        total /= np.float32(ranks)
        if "server" in residuals:
            total += residuals["server"][name]
        found[name] = total
    return found
