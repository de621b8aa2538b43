"""Compression with error feedback for torch: DDP's hooks, and tensors without DDP.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

from typing import Any

import torch
import torch.distributed as dist

from pycollective import compression
from pycollective.compression.options import Compress
from pycollective.errors import ConfigurationError
from pycollective.torch.groups import among_group
from pycollective.torch.state import Named, OfTorch, Parameters


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
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
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
            when: "always"; or "auto", where it is faster than dense, by a measurement (`choice`).
            dense_steps: the first so many steps that count are dense, and nothing is held. "auto"
                measures after them.

        Raises:
            ConfigurationError: a parameter or an option cannot be; there is no such group.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        of = Named(parameters)
        super().__init__(
            of,
            among_group(group),
            chunk=chunk,
            between=between,
            compress=compress,
            when=when,
            dense_steps=dense_steps,
        )
        self._listen(of.tensors)


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
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
        dense_steps: int = 0,
    ) -> None:
        """See `OneBitState`."""
        of = Named(parameters)
        super().__init__(
            of,
            among_group(group),
            chunk=chunk,
            between=between,
            compress=compress,
            when=when,
            dense_steps=dense_steps,
        )
        self._listen(of.tensors)


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
        by: str = "tensor",
        chunk: int = 4096,
        values: str = "bfloat16",
        exchange: str = "auto",
        warm_up: int = 0,
        decay: float = 1.0,
        between: str = "hosts",
        compress: Compress | None = None,
        when: str = "always",
        dense_steps: int = 0,
    ) -> None:
        """Collective over the group.

        Args:
            parameters: see `OneBitState`, also for `group`, `between`, `compress`, `when` and
                `dense_steps`, and for what is raised.
            density: how much of each parameter a host sends, 0.0001 to 1; at least one element.
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
            when: see there.
            dense_steps: see there.
        """
        of = Named(parameters)
        super().__init__(
            of,
            among_group(group),
            density=density,
            by=by,
            chunk=chunk,
            values=values,
            exchange=exchange,
            warm_up=warm_up,
            decay=decay,
            between=between,
            compress=compress,
            when=when,
            dense_steps=dense_steps,
        )
        self._listen(of.tensors)


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
    """The same with 8 bits an element; see `one_bit_hook`."""
    return _run(state, Int8State, bucket)


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The same with the largest elements alone; see `one_bit_hook`."""
    return _run(state, TopKState, bucket)


def _run(
    state: Any, kind: type[OfTorch], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, kind):
        raise ConfigurationError(
            f"the hook's state is a {kind.__name__}, not a {type(state).__name__}: "
            f"ddp.register_comm_hook({kind.__name__}(ddp), ...)"
        )
    return state._hook(bucket)


def compressed_all_reduce(tensor: torch.Tensor, state: OfTorch, key: str) -> bool:
    """Average one tensor over all ranks, compressed, in place: ``state.all_reduce({key: tensor})``.

    Args:
        tensor: dense contiguous CPU tensor of fp32, fp16 or bf16.
        state: what holds the error of `key`.
        key: the parameter's name.

    Returns:
        Whether all ranks' were finite; if not, `tensor` is NaN.
    """
    return state.all_reduce({key: tensor})


def compressed_reduce_scatter(
    out: torch.Tensor, tensor: torch.Tensor, state: OfTorch, key: str
) -> bool:
    """Average `tensor` over all ranks, compressed, this rank's shard to `out`.

    ``state.reduce_scatter(out, tensor, key)``, which see.
    """
    return state.reduce_scatter(out, tensor, key)
