"""8-bit: its state and its hook.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import torch
import torch.distributed as dist

from pycollective import compression
from pycollective.compression.options import Compress
from pycollective.torch.compression.state import OfTorch, Parameters, run_hook
from pycollective.typing import Between


class Int8State(OfTorch, compression.Int8State):
    """8 bits an element; see `pycollective.compression.Int8State`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        group: dist.ProcessGroup | None = None,
        chunk: int = 256,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """See `OneBitState`."""
        super().__init__(
            parameters,
            group,
            chunk=chunk,
            between=between,
            compress=compress,
            dense_steps=dense_steps,
        )


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 8 bits an element between hosts; else as `one_bit_hook`."""
    return run_hook(state, Int8State, bucket)
