"""What a codec is, and the options of states: checked before any rank sends anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.groups import Groups
from pycollective.compression.partition import Partition, check_between
from pycollective.compression.residuals import Residuals
from pycollective.errors import ConfigurationError

Shape = tuple[int, ...]
# Of parameters, by name; a face may look them up when the ranks compare them.
Shapes = Mapping[str, Sequence[int]] | Callable[[], Mapping[str, Sequence[int]]]
Compress = Callable[[str, Shape], bool]

# What decides the number of elements to a scale, or to a chunk that is picked from.
MOST_CHUNK = 1 << 16


class Codec(Protocol):
    """Averages the gradients of a call, and keeps in its residuals what it does not send.

    In each call `steps` is how many have counted since the dense ones at the start.

    Attributes:
        residuals: by kind, "worker" and perhaps "server".
    """

    residuals: Mapping[str, Residuals]

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Outcome:
        """Average the gradients over all ranks, in place; what is held is not committed."""
        ...

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Outcome:
        """Average the gradients; `out` gets what this rank owns, which may not be finite."""
        ...

    def commit(self) -> None:
        """Make what the step left what is held."""
        ...


class Options(Protocol):
    """The options of a codec, which ranks must give alike."""

    @property
    def codec(self) -> str:
        """Its name."""
        ...

    @property
    def chunk(self) -> int:
        """How many elements of a parameter are never parted."""
        ...

    def checked(self) -> dict[str, Any]:
        """By name, as JSON can say.

        Raises:
            ConfigurationError: one of them cannot be.
        """
        ...

    def make(self, groups: Groups, partition: Partition, sizes: Sequence[int]) -> Codec:
        """The codec. `sizes`: the elements of each parameter that is compressed."""
        ...


@dataclass(frozen=True)
class Common:
    """The options of all states; see `OneBitState`."""

    between: str
    compress: Compress | None
    dense_steps: int

    def checked(self) -> dict[str, Any]:
        """By name, as JSON can say. What `compress` says is told by parameter.

        Raises:
            ConfigurationError: one of them cannot be.
        """
        check_between(self.between)
        check_steps("dense_steps", self.dense_steps)
        return {"between": self.between, "dense_steps": self.dense_steps}


def check_chunk(chunk: int) -> None:
    """Refuse a number of elements that no chunk can have."""
    if not isinstance(chunk, int) or not 64 <= chunk <= MOST_CHUNK or chunk % 64:
        raise ConfigurationError(
            f"chunk={chunk!r} is not a multiple of 64 between 64 and {MOST_CHUNK}"
        )


def check_steps(name: str, steps: int) -> None:
    """Refuse what is no number of steps."""
    if not (isinstance(steps, int) and steps >= 0):
        raise ConfigurationError(f"{name}={steps!r} is not a number of steps")


def check_one_of(name: str, value: str, of: Sequence[str]) -> None:
    """Refuse a word that an option does not have."""
    if value not in of:
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(of)}")
