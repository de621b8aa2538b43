"""The options of states, which ranks must give alike, and the codecs that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

from pycollective.compression.arrays import Flat, Item
from pycollective.compression.groups import Groups
from pycollective.compression.header import Agreement
from pycollective.compression.kernels import Kernels
from pycollective.compression.message import Call, Learning
from pycollective.compression.partition import Partition
from pycollective.compression.residuals import Residuals
from pycollective.errors import ConfigurationError

Shape = tuple[int, ...]
Compress = Callable[[str, Shape], bool]
# What decides the number of elements to a scale, or to a chunk that is picked from.
MOST_CHUNK = 1 << 16


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


class Codec(Protocol):
    """Averages the gradients of a call, and keeps in its residuals what it does not send.

    In each call `steps` is how many have counted since the dense ones at the start.

    Attributes:
        residuals: by kind, "worker" and perhaps "server".
    """

    residuals: Mapping[str, Residuals]

    def all_reduce(self, items: list[Item], agreement: Agreement, steps: int) -> Call:
        """Average the gradients over all ranks, in place; `commit` makes new residuals count.

        They hold anything where something is not finite.
        """
        ...

    def reduce_scatter(
        self, items: list[Item], agreement: Agreement, steps: int, out: Flat
    ) -> Call:
        """Average the gradients; `out` gets what this rank owns."""
        ...

    def commit(self) -> None:
        """Make the step's new residuals those that the next begins with."""
        ...


class Options(Protocol):
    """The options of a codec, which ranks must give alike; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

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

    def make(
        self, groups: Groups, partition: Partition, kernels: Kernels, learning: Learning
    ) -> Codec:
        """The codec."""
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
        if self.between not in ("hosts", "ranks"):
            raise ConfigurationError(f"between={self.between!r} is neither 'hosts' nor 'ranks'")
        check_steps("dense_steps", self.dense_steps)
        return {"between": self.between, "dense_steps": self.dense_steps}
