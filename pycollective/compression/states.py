"""What the states of several codecs share, and calls of one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.groups import Among, Ends
from pycollective.compression.options import Common, Quantized
from pycollective.compression.quantized import QuantizedExchange
from pycollective.compression.state import State

# By name; a face may look them up when the ranks compare them.
Shapes = Mapping[str, Sequence[int]] | Callable[[], Mapping[str, Sequence[int]]]


class QuantizedState(State):
    """Two phases of a quantized codec, each with its residual, as `OneBitState` has them.

    A subclass says which: its `codec` is the kernels' name for it.
    """

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
