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
from pycollective.torch.states import Int8State, OneBitState, State, TopKState

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
    return _run(state, OneBitState, bucket)


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 8 bits an element between hosts; else as `one_bit_hook`."""
    return _run(state, Int8State, bucket)


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, the largest elements alone; else as `one_bit_hook`."""
    return _run(state, TopKState, bucket)
