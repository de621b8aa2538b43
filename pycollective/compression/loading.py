"""What a state has saved, looked through before any of it is held."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from pycollective.compression.arrays import Floats
from pycollective.compression.saving import Keeper
from pycollective.errors import ConfigurationError

_PARTS = {"steps", "loss_scale", "ranks", "hosts", "residuals", "undelivered", "whole", "sharded"}


def check_saved(state: Mapping[str, Any], codec: str) -> None:
    """Look whether it is what a state of this codec has saved, as far as that goes.

    Raises:
        ConfigurationError: it is not.
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
    """What `state_dict` gave, as it can be held.

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
    if not np.isfinite(np.asarray(each)).all():
        raise ConfigurationError(f"a state whose errors of {name!r} ({kind}) are not finite")
