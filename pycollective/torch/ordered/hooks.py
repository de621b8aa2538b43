"""Communication hooks for DistributedDataParallel.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pycollective.config import ENV_LEDGER
from pycollective.errors import ConfigurationError
from pycollective.shim import loading
from pycollective.torch.ordered.calls import (
    all_reduce_over,
    check,
    checked_group,
    ordered_over,
)
from pycollective.torch.ordered.ledger_state import LedgerState
from pycollective.torch.tensor_ledger import folder_of

_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def average(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.futures.Future[torch.Tensor]:
    """Start the contract's average of a tensor over a group of any backend, in place.

    Args:
        tensor: one that `ordered.all_reduce` accepts, or, if the backend is pycollective, one that
            `dist.all_reduce` accepts.
        group: None for the default group.

    Returns:
        A future of the tensor. It carries the call's error.
    """
    found = checked_group(group)
    ordered = ordered_over(found, tensor.device)
    if ordered is None:
        future: torch.futures.Future[torch.Tensor] = loading.loaded().average(found, tensor)
        return future
    check([tensor], "avg")
    work = all_reduce_over(ordered, tensor, "avg", async_op=True)
    assert work is not None
    return work.get_future()


def all_reduce_hook(
    state: dist.ProcessGroup | LedgerState | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients by the contract: the hook that gives DDP the same bits always.

    The gradients are added in the contract's order in fp32 (fp64 for fp64), divided once by the
    number of ranks, and rounded once, so the result depends neither on ``bucket_cap_mb`` nor on the
    backend, but on the gradients alone. Without a hook, DDP multiplies each gradient by 1/N in its
    own dtype before any backend sees it, which rounds once more and, where N is not a power of two,
    rounds 1/N itself.

    Args:
        state: the process group to average over, of any backend; None for the default group. Pass
            it as the first argument of ``register_comm_hook``. A `pycollective.torch.LedgerState`
            notes the averages.
        bucket: DDP's; its buffer is averaged in place.

    Returns:
        A future of the bucket's buffer. It carries the operation's `pycollective.CollectiveError`,
        which ``loss.backward()`` then raises.

    Raises:
        ConfigurationError: there is no process group; or the gradients are sparse, over another
            backend than pycollective; or PYCOLLECTIVE_LEDGER asks for a ledger, and the state is no
            `pycollective.torch.LedgerState`.
    """
    if isinstance(state, LedgerState):
        return state.noted(bucket, average(bucket.buffer(), state.group))
    if folder_of(None) is not None and bucket.index() == 0:
        raise ConfigurationError(
            f"{ENV_LEDGER} is set, and the hook does not know the parameters' names: "
            "ddp.register_comm_hook(LedgerState(ddp), all_reduce_hook)"
        )
    return average(bucket.buffer(), state)


hook = all_reduce_hook  # its other name, which pickled DDP models may have


def in_order(hook: _Hook) -> _Hook:
    """Wrap a hook that issues collectives from callbacks, such as PowerSGD's.

    Callbacks run when a bucket's first collective is done, at another moment on each rank, while
    backward issues the next bucket's; so with two buckets or more the ranks call their collectives
    in different orders, which raises `pycollective.CollectiveMismatch`. Wrapped, each bucket's
    collectives end before the next bucket's begin, at the price of their overlap with backward.
    """

    @functools.wraps(hook)
    def run(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return run
