"""The three ways to compress, for NumPy arrays and a `Communicator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.domain import VALUES
from pycollective.compression.groups import Ends, ends_of_communicator
from pycollective.compression.quantized import QuantizedExchange
from pycollective.compression.selection import check_density
from pycollective.compression.sparse import SparseExchange
from pycollective.compression.state import Shape, State
from pycollective.errors import ConfigurationError

# What decides the number of elements to a scale, or to a chunk that is picked from.
MOST_CHUNK = 1 << 16

Compress = Callable[[str, Shape], bool]


def check_chunk(chunk: int) -> int:
    """A chunk's elements.

    Raises:
        ConfigurationError: not a multiple of 64 up to `MOST_CHUNK`.
    """
    if not isinstance(chunk, int) or not 64 <= chunk <= MOST_CHUNK or chunk % 64:
        raise ConfigurationError(
            f"chunk={chunk!r} is not a multiple of 64 between 64 and {MOST_CHUNK}"
        )
    return chunk


class QuantizedState(State):
    """What `OneBitState` and `Int8State` have in common."""

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        ends: Ends,
        chunk: int,
        compress: Compress | None,
        when: str,
    ) -> None:
        self.chunk = check_chunk(chunk)
        super().__init__(parameters, ends, {"chunk": chunk}, compress, when)
        self._exchanged = QuantizedExchange(ends, self.codec, self.chunk)
        self.kinds = {"worker": self._exchanged.worker, "server": self._exchanged.server}

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        return self._exchanged(items, agreement)

    def _scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        return self._exchanged.scatter(items, agreement, out)


class OneBitState(QuantizedState):
    """A sign an element and a scale a chunk: 31 times fewer bytes than fp32.

    The scale is the mean magnitude. Two residuals: of what this rank's share was (worker), of what
    the average of the region that it owns was (server); 8 bytes each an element of either, for a
    step's old and new ones.
    """

    codec = "one_bit"

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        communicator: Communicator | Ends,
        *,
        chunk: int = 1024,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
    ) -> None:
        """Collective over the communicator, which it splits; see `State` for what is raised.

        Args:
            parameters: the shape of each by name, such as ``{"w": w.shape}``.
            communicator: of the ranks that average.
            chunk: elements to a scale, a multiple of 64.
            between: "hosts": dense and exact within a host, compressed between hosts. "ranks":
                compressed between all.
            compress: whether a parameter of this name and shape is compressed; None for those of
                two dimensions or more and at least 4,096 elements.
            when: "always"; or "auto", where it is faster than dense, by a measurement (`choice`).
        """
        super().__init__(parameters, _ends(communicator, between), chunk, compress, when)


class Int8State(QuantizedState):
    """8 bits an element and a scale for 256 of them: 3.9 times fewer bytes than fp32.

    As `OneBitState`; an element is off by half a 127th of its chunk's largest, at most.
    """

    codec = "int8"

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        communicator: Communicator | Ends,
        *,
        chunk: int = 256,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
    ) -> None:
        """See `OneBitState`."""
        super().__init__(parameters, _ends(communicator, between), chunk, compress, when)


class TopKState(State):
    """The elements of the largest magnitude, as places and values."""

    codec = "top_k"

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        communicator: Communicator | Ends,
        *,
        density: float,
        by: str = "tensor",
        chunk: int = 4096,
        values: str = "bfloat16",
        exchange: str = "auto",
        warm_up: int = 0,
        decay: float = 1.0,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
    ) -> None:
        """See `OneBitState`.

        Args:
            parameters: see there.
            communicator: see there.
            density: how much of each parameter a host sends, 0.0001 to 1: by tensor
                max(1, round(density x elements)) of them; by chunk round(density x chunk) of each
                chunk, and at least one, so density x chunk must be 1 or more.
            by: "tensor", the largest of the whole parameter, or "chunk", of each chunk.
            chunk: elements of a chunk, a multiple of 64.
            values: how they travel: "float32", "bfloat16" or "float16". What rounding drops stays
                in the residual.
            exchange: "gather", "region" or "auto" (`sparse`).
            warm_up: so many steps the density falls from nearly 1 to its value, by equal ratios.
            decay: what is held is multiplied by it each step.
            between: see there.
            compress: see there.
            when: see there.
        """
        if not (isinstance(density, float | int) and 1e-4 <= density <= 1):
            raise ConfigurationError(f"density={density!r} is not between 0.0001 and 1")
        for name, value, of in (
            ("by", by, ("tensor", "chunk")),
            ("values", values, tuple(VALUES)),
            ("exchange", exchange, ("gather", "region", "auto")),
        ):
            if value not in of:
                raise ConfigurationError(f"{name}={value!r} is none of {', '.join(of)}")
        if not (isinstance(warm_up, int) and warm_up >= 0):
            raise ConfigurationError(f"warm_up={warm_up!r} is not a number of steps")
        if not 0 <= decay <= 1:
            raise ConfigurationError(f"decay={decay!r} is not between 0 and 1")
        self.chunk = check_chunk(chunk)
        check_density(density, by, self.chunk)
        self._density, self._warm_up, self._decay = float(density), warm_up, float(decay)
        options = {
            "density": self._density,
            **{"by": by, "chunk": chunk, "values": values, "exchange": exchange},
            **{"warm_up": warm_up, "decay": self._decay},
        }
        ends = _ends(communicator, between)
        super().__init__(parameters, ends, options, compress, when)
        sizes = [math.prod(shape) for name, shape in self.shapes.items() if not self._dense[name]]
        self._exchanged = SparseExchange(ends, by, chunk, values, exchange, sizes)
        self.kinds = {"worker": self._exchanged.worker}

    @property
    def density(self) -> float:
        """Of the step under way, or of the next."""
        if self._steps >= self._warm_up:
            return self._density
        return self._density ** ((self._steps + 1) / (self._warm_up + 1))

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        return self._exchanged(items, agreement, self.density)

    def _scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        return self._exchanged.scatter(items, agreement, self.density, out)

    def _commit(self) -> None:
        self._exchanged.worker.commit(self._decay)


def _ends(communicator: Communicator | Ends, between: str) -> Ends:
    if isinstance(communicator, Ends):
        return communicator
    return ends_of_communicator(communicator, between)


def compressed_all_reduce(x: Any, state: State, key: str) -> bool:
    """Average one NumPy array over all ranks, compressed, in place: ``state.all_reduce({key: x})``.

    Args:
        x: fp32, fp16 or bf16, C-contiguous.
        state: what holds the error of `key`.
        key: the parameter's name.

    Returns:
        Whether all ranks' were finite; if not, `x` is NaN.
    """
    return state.all_reduce({key: x})


def compressed_reduce_scatter(out: Any, x: Any, state: State, key: str) -> bool:
    """Average `x` over all ranks, compressed, this rank's shard to `out`.

    ``state.reduce_scatter(out, x, key)``, which see.
    """
    return state.reduce_scatter(out, x, key)
