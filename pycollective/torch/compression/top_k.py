"""Top-k: its state and its hook.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import torch
import torch.distributed as dist

from pycollective import compression
from pycollective.compression.options import Compress
from pycollective.torch.compression.state import OfTorch, Parameters, run_hook
from pycollective.typing import Between, By, Exchange, Values


class TopKState(OfTorch, compression.TopKState):
    """The largest elements; see `pycollective.compression.TopKState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        density: float,
        group: dist.ProcessGroup | None = None,
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
        """Collective over the group.

        Args:
            parameters: see `OneBitState`, also for `group`, `between`, `compress` and
                `dense_steps`, and for what is raised.
            density: how much of each parameter a host sends, 0.0001 to 1: by tensor
                max(1, round(density x elements)) of them; by chunk round(density x chunk) of each
                chunk, and at least one, so density x chunk must be 1 or more.
            group: see there.
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
        super().__init__(
            parameters,
            group,
            density=density,
            by=by,
            chunk=chunk,
            values=values,
            exchange=exchange,
            warm_up=warm_up,
            decay=decay,
            between=between,
            compress=compress,
            dense_steps=dense_steps,
        )


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, the largest elements alone; else as `one_bit_hook`."""
    return run_hook(state, TopKState, bucket)
