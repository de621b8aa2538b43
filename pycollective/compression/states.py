"""The three ways to compress, for NumPy arrays and a `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.groups import Among, Ends
from pycollective.compression.options import Common, Compress, Quantized, Sparse
from pycollective.compression.quantized import QuantizedExchange
from pycollective.compression.sparse import SparseExchange
from pycollective.compression.state import State

# By name; a face may look them up when the ranks compare them.
Shapes = Mapping[str, Sequence[int]] | Callable[[], Mapping[str, Sequence[int]]]


class QuantizedState(State):
    """What `OneBitState` and `Int8State` have in common."""

    def __init__(
        self,
        parameters: Shapes,
        ranks: Communicator | Ends | Among,
        options: Quantized,
        common: Common,
    ) -> None:
        super().__init__(parameters, ranks, options, common)
        self._chunk = options.chunk
        self._exchanged = QuantizedExchange(self._ends, self.codec, self._chunk)
        self._kinds = {"worker": self._exchanged.worker, "server": self._exchanged.server}

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        return self._exchanged(items, agreement)

    def _exchange_shards(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        return self._exchanged.scatter(items, agreement, out)


class OneBitState(QuantizedState):
    """A sign an element and a scale a chunk: 31 times fewer bytes than fp32.

    The scale is the mean magnitude. Two residuals: of what this rank's share was (worker), of what
    the average of the region that it owns was (server); 8 bytes each an element of either, for a
    step's old and new ones. Nothing is compressed where all ranks are on one host, unless made with
    ``between="ranks"``.
    """

    codec = "one_bit"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Ends | Among,
        *,
        chunk: int = 1024,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
        dense_steps: int = 0,
    ) -> None:
        """Collective over the communicator, which it splits once all ranks have agreed.

        Args:
            parameters: the shape of each by name, such as ``{"w": w.shape}``.
            communicator: of the ranks that average.
            chunk: elements to a scale, a multiple of 64.
            between: "hosts": dense and exact within a host, compressed between hosts. "ranks":
                compressed between all.
            compress: whether a parameter of this name and shape is compressed; None for those of
                two dimensions or more and at least 4,096 elements.
            when: "always"; or "auto", where it is faster than dense, by a measurement (`choice`).
            dense_steps: the first so many steps that count are dense, and nothing is held. "auto"
                measures after them.

        Raises:
            ConfigurationError: an option cannot be.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        common = Common(between, compress, when, dense_steps)
        super().__init__(parameters, communicator, Quantized(chunk), common)


class Int8State(QuantizedState):
    """8 bits an element and a scale for 256 of them: 3.9 times fewer bytes than fp32.

    As `OneBitState`; an element is off by half a 127th of its chunk's largest, at most.
    """

    codec = "int8"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Ends | Among,
        *,
        chunk: int = 256,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
        dense_steps: int = 0,
    ) -> None:
        """See `OneBitState`."""
        common = Common(between, compress, when, dense_steps)
        super().__init__(parameters, communicator, Quantized(chunk), common)


class TopKState(State):
    """The elements of the largest magnitude, as places and values.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "top_k"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Ends | Among,
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
        dense_steps: int = 0,
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
            warm_up: so many steps after `dense_steps` the density falls from nearly 1 to its value,
                by equal ratios.
            decay: what is held is multiplied by it each step.
            between: see there.
            compress: see there.
            when: see there.
            dense_steps: see there.
        """
        options = Sparse(density, by, chunk, values, exchange, warm_up, decay)
        common = Common(between, compress, when, dense_steps)
        super().__init__(parameters, communicator, options, common)
        self._density, self._warm_up, self._decay = float(density), warm_up, float(decay)
        self._chunk = chunk
        sizes = list(self._sizes().values())
        self._exchanged = SparseExchange(self._ends, by, chunk, values, exchange, sizes)
        self._kinds = {"worker": self._exchanged.worker}

    @property
    def density(self) -> float:
        """Of the step under way, or of the next."""
        steps = self._choice.steps_since_start
        if steps >= self._warm_up:
            return self._density
        return self._density ** ((steps + 1) / (self._warm_up + 1))

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        return self._exchanged(items, agreement, self.density)

    def _exchange_shards(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        return self._exchanged.scatter(items, agreement, self.density, out)

    def _commit(self) -> None:
        self._exchanged.worker.commit(self._decay)


def compressed_all_reduce(tensor: Any, state: State, key: str) -> bool:
    """Average one NumPy array over all ranks, compressed: ``state.all_reduce({key: tensor})``.

    Args:
        tensor: fp32, fp16 or bf16, C-contiguous; averaged in place.
        state: what holds the error of `key`.
        key: the parameter's name.

    Returns:
        Whether all ranks' were finite; if not, `tensor` is NaN.
    """
    return state.all_reduce({key: tensor})


def compressed_reduce_scatter(out: Any, tensor: Any, state: State, key: str) -> bool:
    """Average `tensor` over all ranks, compressed, this rank's shard to `out`.

    ``state.reduce_scatter(out, tensor, key)``, which see.
    """
    return state.reduce_scatter(out, tensor, key)
