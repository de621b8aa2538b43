"""The hook for DistributedDataParallel.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import torch
import torch.distributed as dist

from pycollective.torch.ordered.calls import all_reduce


def hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients by the contract, over a group of any backend.

    ``ddp.register_comm_hook(None, ordered.hook)``. The result depends neither on ``bucket_cap_mb``
    nor on the backend, and is that of `pycollective.torch.all_reduce_hook`.

    Args:
        state: the process group to average over; None for the default group.
        bucket: DDP's; its buffer is averaged in place.

    Returns:
        A future of the bucket's buffer. It carries the call's error, which ``loss.backward()``
        then raises.

    Raises:
        ConfigurationError: there is no process group, or the gradients are sparse.
    """
    buffer = bucket.buffer()
    work = all_reduce(buffer, "avg", state, async_op=True)
    assert work is not None
    return work.get_future()
