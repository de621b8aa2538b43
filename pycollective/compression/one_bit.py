"""1-bit: signs and mean magnitudes."""

from __future__ import annotations

from pycollective.communicator import Communicator
from pycollective.compression.ends import Among, Ends
from pycollective.compression.options import Common, Compress, QuantizedOptions, Shapes
from pycollective.compression.quantized_state import QuantizedState
from pycollective.typing import Between


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
        between: Between = "hosts",
        compress: Compress | None = None,
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
            dense_steps: the first so many steps that count are dense, and nothing is held.

        Raises:
            ConfigurationError: an option cannot be.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        common = Common(between, compress, dense_steps)
        super().__init__(parameters, communicator, QuantizedOptions(chunk), common)
