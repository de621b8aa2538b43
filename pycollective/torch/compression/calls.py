"""Compressed averages of one tensor, without DDP."""

from __future__ import annotations

import torch

from pycollective.torch.compression.state import OfTorch


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
