"""The options of states: what can be, checked before any rank makes or sends anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pycollective.compression.domain import VALUES
from pycollective.compression.placing import check_between
from pycollective.compression.selection import check_density
from pycollective.errors import ConfigurationError

Shape = tuple[int, ...]
# Of parameters, by name; a face may look them up when the ranks compare them.
Shapes = Mapping[str, Sequence[int]] | Callable[[], Mapping[str, Sequence[int]]]
Compress = Callable[[str, Shape], bool]

# What decides the number of elements to a scale, or to a chunk that is picked from.
MOST_CHUNK = 1 << 16


class Options(Protocol):
    """Some options that ranks must give alike."""

    def checked(self) -> dict[str, Any]:
        """By name, as JSON can say.

        Raises:
            ConfigurationError: one of them cannot be.
        """
        ...


@dataclass(frozen=True)
class Common:
    """Those of all codecs; see `OneBitState`."""

    between: str
    compress: Compress | None
    dense_steps: int

    def checked(self) -> dict[str, Any]:
        """See `Options`. What `compress` says is told by parameter."""
        check_between(self.between)
        _check_steps("dense_steps", self.dense_steps)
        return {"between": self.between, "dense_steps": self.dense_steps}


@dataclass(frozen=True)
class QuantizedOptions:
    """Those of quantized codecs."""

    chunk: int

    def checked(self) -> dict[str, Any]:
        """See `Options`."""
        _check_chunk(self.chunk)
        return {"chunk": self.chunk}


@dataclass(frozen=True)
class SparseOptions:
    """Those of top-k; see `TopKState`."""

    density: float
    by: str
    chunk: int
    values: str
    exchange: str
    warm_up: int
    decay: float

    def checked(self) -> dict[str, Any]:
        """See `Options`."""
        if not (isinstance(self.density, float | int) and 1e-4 <= self.density <= 1):
            raise ConfigurationError(f"density={self.density!r} is not between 0.0001 and 1")
        _check_one_of("by", self.by, ("tensor", "chunk"))
        _check_one_of("values", self.values, tuple(VALUES))
        _check_one_of("exchange", self.exchange, ("gather", "region", "auto"))
        _check_steps("warm_up", self.warm_up)
        if not (isinstance(self.decay, float | int) and 0 <= self.decay <= 1):
            raise ConfigurationError(f"decay={self.decay!r} is not between 0 and 1")
        _check_chunk(self.chunk)
        check_density(self.density, self.by, self.chunk)
        return {
            "density": float(self.density),
            **{"by": self.by, "chunk": self.chunk, "values": self.values},
            **{"exchange": self.exchange, "warm_up": self.warm_up, "decay": float(self.decay)},
        }


def _check_chunk(chunk: int) -> None:
    if not isinstance(chunk, int) or not 64 <= chunk <= MOST_CHUNK or chunk % 64:
        raise ConfigurationError(
            f"chunk={chunk!r} is not a multiple of 64 between 64 and {MOST_CHUNK}"
        )


def _check_steps(name: str, steps: int) -> None:
    if not (isinstance(steps, int) and steps >= 0):
        raise ConfigurationError(f"{name}={steps!r} is not a number of steps")


def _check_one_of(name: str, value: str, of: Sequence[str]) -> None:
    if value not in of:
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(of)}")
