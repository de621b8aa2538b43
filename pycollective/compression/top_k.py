"""Top-k: the largest elements alone."""

from __future__ import annotations

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.ends import Among, Ends
from pycollective.compression.options import Common, Compress, Shapes, SparseOptions
from pycollective.compression.sparse import SparseExchange
from pycollective.compression.state import State
from pycollective.typing import Between, By, Exchange, Values


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
        by: By = "tensor",
        chunk: int = 4096,
        values: Values = "bfloat16",
        exchange: Exchange = "auto",
        warm_up: int = 0,
        decay: float = 1.0,
        between: Between = "hosts",
        compress: Compress | None = None,
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
            exchange: "gather", "region" or "auto": between two hosts, and up to a size, gather.
            warm_up: so many steps after `dense_steps` the density falls from nearly 1 to its value,
                by equal ratios.
            decay: what is held is multiplied by it each step.
            between: see there.
            compress: see there.
            dense_steps: see there.
        """
        options = SparseOptions(density, by, chunk, values, exchange, warm_up, decay)
        common = Common(between, compress, dense_steps)
        super().__init__(parameters, communicator, options, common)
        self._density, self._warm_up, self._decay = float(density), warm_up, float(decay)
        self._chunk = chunk
        sizes = list(self._sizes().values())
        self._exchanged = SparseExchange(self._ends, by, chunk, values, exchange, sizes)
        self._kinds = {"worker": self._exchanged.worker}

    @property
    def density(self) -> float:
        """Of the step under way, or of the next."""
        steps = self._steps_since_start
        if steps >= self._warm_up:
            return self._density
        return self._density ** ((steps + 1) / (self._warm_up + 1))

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        return self._exchanged(items, agreement, self.density)

    def _exchange_shards(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        return self._exchanged.scatter(items, agreement, self.density, out)

    def _commit(self) -> None:
        self._exchanged.worker.commit(self._decay)
