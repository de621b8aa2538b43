"""What the states of quantized codecs share."""

from __future__ import annotations

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.ends import Among, Ends
from pycollective.compression.options import Common, QuantizedOptions, Shapes
from pycollective.compression.quantized import QuantizedExchange
from pycollective.compression.state import State


class QuantizedState(State):
    """Two phases of a quantized codec, each with its residual, as `OneBitState` has them.

    A subclass says which: its `codec` is the kernels' name for it.
    """

    def __init__(
        self,
        parameters: Shapes,
        ranks: Communicator | Ends | Among,
        options: QuantizedOptions,
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
