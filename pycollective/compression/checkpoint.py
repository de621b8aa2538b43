"""Checkpoints: residuals are gathered from all ranks, checked, and cut up again for any world.

Worker residuals are per host: (hosts, elements) of each parameter. The server's, where there are
any, are one for all: (elements,). Both are by element of the parameter, so that any number of ranks
on a host finds its part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.groups import Groups
from pycollective.compression.partition import Partition, Range, scattered_name
from pycollective.compression.residuals import Residuals
from pycollective.errors import ConfigurationError

_PARTS = {"steps", "loss_scale", "ranks", "hosts", "residuals", "undelivered", "whole", "sharded"}


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter.

    Attributes:
        rank: the rank.
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
        groups: Groups,
        partition: Partition,
        sizes: Mapping[str, int],
        residuals: Mapping[str, Residuals],
        scale: float,
        sharded: Collection[str],
    ) -> None:
        self._groups, self._partition = groups, partition
        self._hosts = partition.hosts
        self._sizes = sizes
        self._residuals = residuals
        self._scale = scale  # what is gathered, handed out or loaded is in this
        self._sharded = sharded

    def _parts(self, kind: str, name: str) -> Iterator[Part]:
        """Every part of a parameter's residual."""
        if name in self._sharded:
            if kind == "worker":
                yield from self._shards(name)
            return
        for number, local in enumerate(self._partition.local_shards(name, self._sizes[name])):
            owned = self._partition.host_shards(name, local)
            for host, rank in enumerate(self._hosts.across(number)):
                yield Part(rank, host, local if kind == "worker" else owned[host], name)

    def _shards(self, name: str) -> Iterator[Part]:
        """The parts of a parameter that was scattered among the ranks."""
        hosts = self._hosts
        count = self._sizes[name] // hosts.ranks
        for to in range(hosts.ranks):
            elements = (to * count, (to + 1) * count)
            for host, rank in enumerate(hosts.across(hosts.shard_of(to))):
                yield Part(rank, host, elements, scattered_name(name, to))

    def gather(self) -> dict[str, dict[str, Floats]]:
        """Every kind's residuals by parameter; the same on all ranks."""
        names = sorted(self._sizes)
        return {kind: {name: self._whole(kind, name) for name in names} for kind in self._residuals}

    def _whole(self, kind: str, name: str) -> Floats:
        """One parameter's residual of a kind: (hosts, elements), or the server's."""
        hosts = self._hosts
        of: list[list[Part]] = [[] for _ in range(hosts.ranks)]
        for part in self._parts(kind, name):
            of[part.rank].append(part)
        worker = kind == "worker"
        whole = np.zeros((hosts.count if worker else 1, self._sizes[name]), np.float32)
        row = np.zeros(max(sum(part.count for part in parts) for parts in of), np.float32)
        at = 0
        for part in of[hosts.rank]:
            held = self._residuals[kind].saved(part.name, self._scale)
            if held is not None:
                row[at : at + part.count] = held
            at += part.count
        rows = self._groups.all.all_gather(row.view(np.uint8)).view(np.float32)
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
        of = {kind: {name: self._whole(kind, name)} for kind in self._residuals}
        return mean_of(of, self._hosts.ranks)[name]

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
        if set(arrays) != set(self._residuals):
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
        here = self._hosts
        arrays = self.fitting(residuals, hosts)
        if (ranks, hosts) != (here.ranks, here.count):
            mean = mean_of(arrays, ranks)
            part_of_host = np.float32(here.ranks) / np.float32(here.count)
            arrays = {
                kind: {
                    name: np.broadcast_to(each * part_of_host, (here.count, each.size))
                    if kind == "worker"
                    else np.zeros_like(each)
                    for name, each in mean.items()
                }
                for kind in arrays
            }
        for kind, of in arrays.items():
            self._residuals[kind].clear()
            for name, whole in of.items():
                for part in self._parts(kind, name):
                    if part.rank == here.rank:
                        row = whole[part.host] if kind == "worker" else whole
                        values = row[slice(*part.elements)]
                        self._residuals[kind].set(part.name, values, self._scale)


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


class SavedByStateDict:
    """Cannot be pickled or copied as it is."""

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            f"{type(self).__name__} belongs to this process's groups, and cannot be pickled or "
            "copied: save its state_dict(), which every rank calls, and load that into a new state"
        )


def check_saved(state: Mapping[str, Any], codec: str) -> None:
    """Refuse what no state of this codec has saved; `Saved.of` checks the rest.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"no state of {codec}, but a {type(state).__name__}")
    described = state.get("codec")
    version, of = state.get("version"), None
    if isinstance(described, Mapping):
        of = described.get("codec")
    missing = sorted(_PARTS - set(state))
    if version != 1 or of != codec or missing:
        raise ConfigurationError(
            f"no state of {codec}: version {version}, codec {of!r}"
            + (f", without {', '.join(missing)}" if missing else "")
        )
    for way in ("whole", "sharded"):
        if not (isinstance(state[way], list) and all(isinstance(n, str) for n in state[way])):
            raise ConfigurationError(f"a state whose {way} parameters are no list of names")
    residuals = state["residuals"]
    for kind, of in (
        *(residuals.items() if isinstance(residuals, Mapping) else [("residuals", residuals)]),
        ("undelivered", state["undelivered"]),
    ):
        if not isinstance(of, Mapping):
            raise ConfigurationError(f"a state whose {kind} are no mapping of names")
        for name, each in of.items():
            _check_errors(kind, name, each)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a state can hold.

    Attributes:
        steps: that had counted.
        loss_scale: of what was held.
        ranks, hosts: of the world it was.
        residuals: by kind and parameter.
        undelivered: by parameter.
        whole, sharded: the parameters that had gone by all_reduce, and by reduce_scatter.
    """

    steps: int
    loss_scale: float
    ranks: int
    hosts: int
    residuals: Mapping[str, Mapping[str, Floats]]
    undelivered: Mapping[str, Floats]
    whole: Sequence[str]
    sharded: Sequence[str]

    @classmethod
    def of(cls, state: Mapping[str, Any], sizes: Mapping[str, int], keeper: Keeper) -> Saved:
        """Read one that `check_saved` has accepted.

        Args:
            state: what was saved.
            sizes: the elements of each parameter that is compressed.
            keeper: of the state that is to hold it.

        Raises:
            ConfigurationError: it is of other parameters, or of no world or scale.
        """
        steps, ranks, hosts = (_whole(state, name) for name in ("steps", "ranks", "hosts"))
        scale = _number(state, "loss_scale")
        if steps < 0 or not 1 <= hosts <= ranks or not (scale > 0 and math.isfinite(scale)):
            raise ConfigurationError(
                f"no state of a world: {steps} steps, {ranks} ranks, {hosts} hosts, loss scale "
                f"{scale}"
            )
        undelivered = {name: np.array(each) for name, each in state["undelivered"].items()}
        wants = {name: (size,) for name, size in sizes.items()}
        shapes = {name: error.shape for name, error in undelivered.items()}
        if shapes != wants:
            differ = sorted({name for name, _ in shapes.items() ^ wants.items()})
            raise ConfigurationError(f"a state of other parameters (undelivered): {differ}")
        return cls(
            steps,
            scale,
            ranks,
            hosts,
            keeper.fitting(state["residuals"], hosts),
            undelivered,
            sorted(state["whole"]),
            sorted(state["sharded"]),
        )

    def digest(self) -> int:
        """64 bits of all of it."""
        found = blake2b(digest_size=8)
        plain = [self.steps, self.loss_scale, self.ranks, self.hosts]
        found.update(json.dumps([plain, list(self.whole), list(self.sharded)]).encode())
        for kind, of in sorted([*self.residuals.items(), ("undelivered", self.undelivered)]):
            for name, each in sorted(of.items()):
                found.update(f"{kind}\0{name}\0{each.shape}".encode())
                found.update(np.ascontiguousarray(each).view(np.uint8).data)
        return int.from_bytes(found.digest(), "little")


def _number(state: Mapping[str, Any], what: str) -> float:
    try:
        return float(state[what])
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"a state of {state[what]!r} {what}") from error


def _whole(state: Mapping[str, Any], what: str) -> int:
    number = _number(state, what)
    if not number.is_integer():
        raise ConfigurationError(f"a state of {state[what]!r} {what}")
    return int(number)


def _check_errors(kind: str, name: str, each: Any) -> None:
    """Errors are finite fp32: whatever else would be rounded, or be in every later step."""
    dtype = str(getattr(each, "dtype", type(each).__name__)).removeprefix("torch.")
    if dtype != "float32":
        raise ConfigurationError(f"a state whose errors of {name!r} ({kind}) are {dtype}")
    try:
        errors = np.asarray(each)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"a state whose errors of {name!r} ({kind}) are no dense array: {error}"
        ) from error
    if not np.isfinite(errors).all():
        raise ConfigurationError(f"a state whose errors of {name!r} ({kind}) are not finite")
