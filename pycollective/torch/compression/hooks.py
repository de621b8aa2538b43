"""The states of the codecs for torch, and their hooks for DDP.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import torch
import torch.distributed as dist

from pycollective.compression.options import Common, Compress
from pycollective.compression.quantized import QuantizedOptions
from pycollective.compression.sparse import SparseOptions
from pycollective.torch.compression.state import Parameters, State, run_hook
from pycollective.typing import Between, By, Exchange, Values


class OneBitState(State):
    """A sign an element and a scale a chunk; as `pycollective.compression.OneBitState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "one_bit"

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
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, group, options, Common(between, compress, dense_steps))


class Int8State(State):
    """8 bits an element; as `pycollective.compression.Int8State`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "int8"

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
        """Collective over the group; the arguments are those of `OneBitState`."""
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, group, options, Common(between, compress, dense_steps))


class TopKState(State):
    """The largest elements; as `pycollective.compression.TopKState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "top_k"

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
        """Collective over the group; arguments that are not told here as `OneBitState`'s.

        Args:
            parameters: see there.
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
        self._options = SparseOptions(density, by, chunk, values, exchange, warm_up, decay)
        common = Common(between, compress, dense_steps)
        super().__init__(parameters, group, self._options, common)

    @property
    def density(self) -> float:
        """The density of the step under way, or of the next."""
        return self._options.density_after(self._feedback.steps_since_start)


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


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, 8 bits an element between hosts; else as `one_bit_hook`."""
    return run_hook(state, Int8State, bucket)


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, the largest elements alone; else as `one_bit_hook`."""
    return run_hook(state, TopKState, bucket)


def compressed_all_reduce(tensor: torch.Tensor, state: State, key: str) -> bool:
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
    out: torch.Tensor, tensor: torch.Tensor, state: State, key: str
) -> bool:
    """Average `tensor` over all ranks, compressed, this rank's shard to `out`.

    The same as ``state.reduce_scatter(out, tensor, key)``.
    """
    return state.reduce_scatter(out, tensor, key)
