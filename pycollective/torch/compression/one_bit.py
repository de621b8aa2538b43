"""1-bit: its state and its hook.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import torch
import torch.distributed as dist

from pycollective import compression
from pycollective.compression.options import Compress
from pycollective.torch.compression.state import OfTorch, Parameters, run_hook
from pycollective.typing import Between


class OneBitState(OfTorch, compression.OneBitState):
    """A sign an element and a scale a chunk; see `pycollective.compression.OneBitState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        group: dist.ProcessGroup | None = None,
        chunk: int = 1024,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the group.

        Args:
            parameters: the model, DDP's or the one in it, or its ``named_parameters()``.
            group: whose ranks average, of any backend with CPU tensors; None for the default one.
            chunk: elements to a scale, a multiple of 64.
            between: "hosts": dense and exact within a host, compressed between hosts. "ranks":
                compressed between all.
            compress: whether a parameter of this name and shape is compressed; None for those of
                two dimensions or more and at least 4,096 elements.
            dense_steps: the first so many steps that count are dense, and nothing is held.

        Raises:
            ConfigurationError: a parameter or an option cannot be; there is no such group.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        super().__init__(
            parameters,
            group,
            chunk=chunk,
            between=between,
            compress=compress,
            dense_steps=dense_steps,
        )


def one_bit_hook(state: OneBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 1 bit an element between hosts, with error feedback.

    ``ddp.register_comm_hook(OneBitState(ddp), one_bit_hook)``. The gradients of one backward are a
    step: if any is not finite on any rank, its bucket is NaN on all, and no residual changes.

    Args:
        state: made of the same model.
        bucket: DDP's; its buffer is averaged in place.

    Returns:
        A future of the bucket's buffer.

    Raises:
        ConfigurationError: a parameter that the state does not know, or a type or device that
            cannot be compressed.
    """
    return run_hook(state, OneBitState, bucket)
