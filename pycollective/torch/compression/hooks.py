"""DDP communication hooks for the states of compression.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import ConfigurationError
from pycollective.torch.compression.states import Int8State, OneBitState, State, TopKState


def _run(
    state: Any, kind: type[State], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket for a hook whose state must be of that kind."""
    if not isinstance(state, kind):
        raise ConfigurationError(
            f"the hook's state is a {kind.__name__}, not a {type(state).__name__}: "
            f"ddp.register_comm_hook({kind.__name__}(ddp), ...)"
        )
    return state._hook(bucket)


def one_bit_hook(state: OneBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 1 bit an element between hosts, with error feedback.

    ``ddp.register_comm_hook(OneBitState(ddp), one_bit_hook)``. For each bucket:

    1. The ranks of a host add up their gradients, exactly.
    2. A rank adds the residual to its shard of that sum, quantizes it, and keeps the difference as
       the new residual (error feedback).
    3. Hosts exchange the quantized shards: all-to-all, sum, quantize again, all-gather.
    4. Every rank decodes the averages into the bucket.

    The gradients of one backward are a step: if any is not finite on any rank, its bucket is NaN on
    all, and no residual changes. Where all ranks are on one host nothing is compressed, unless the
    state was made with ``between="ranks"``.

    Args:
        state: made of the same model.
        bucket: DDP's; its buffer is averaged in place.

    Returns:
        A future of the bucket's buffer.

    Raises:
        ConfigurationError: a parameter that the state does not know, or a type or device that
            cannot be compressed.
    """
    return _run(state, OneBitState, bucket)


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 8 bits an element between hosts; else as `one_bit_hook`."""
    return _run(state, Int8State, bucket)


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, the largest elements alone; else as `one_bit_hook`."""
    return _run(state, TopKState, bucket)
