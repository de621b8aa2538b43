"""Communication hooks for DistributedDataParallel.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pycollective import _torch
from pycollective.errors import ConfigurationError

_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def all_reduce_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients by the contract: the hook that gives DDP the same bits always.

    The gradients are added in the contract's order in fp32 (fp64 for fp64), divided once by the
    number of ranks, and rounded once, so the result depends neither on ``bucket_cap_mb`` nor on
    anything else but the gradients. Without a hook, DDP multiplies each gradient by 1/N in its own
    dtype before any backend sees it, which rounds once more and, where N is not a power of two,
    rounds 1/N itself.

    Args:
        state: the process group of the backend ``pycollective`` to average over; None for the
            default group. Pass it as the first argument of ``register_comm_hook``.
        bucket: DDP's; its buffer is averaged in place.

    Returns:
        A future of the bucket's buffer. It carries the operation's `CollectiveError`, which
        ``loss.backward()`` then raises.

    Raises:
        ConfigurationError: there is no process group.
        ValueError: another backend serves the buffer's device.
        NotImplementedError: the gradients are sparse.
    """
    group = state if state is not None else dist.group.WORLD
    if group is None:
        raise ConfigurationError("all_reduce_hook: call init_process_group first")
    return _torch.average(group, bucket.buffer())


def in_order(hook: _Hook) -> _Hook:
    """Wrap a hook that issues collectives from callbacks, such as PowerSGD's.

    Callbacks run when a bucket's first collective is done, at another moment on each rank, while
    backward issues the next bucket's; so with two buckets or more the ranks call their collectives
    in different orders, which raises `CollectiveMismatch`. Wrapped, each bucket's collectives end
    before the next bucket's begin, at the price of their overlap with backward.
    """

    @functools.wraps(hook)
    def run(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return run
