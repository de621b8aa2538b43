"""Compressed averages of one array."""

from __future__ import annotations

from typing import Any

from pycollective.compression.state import State


def compressed_all_reduce(tensor: Any, state: State, key: str) -> bool:
    """Average one NumPy array over all ranks, compressed: ``state.all_reduce({key: tensor})``.

    Args:
        tensor: fp32, fp16 or bf16, C-contiguous; averaged in place.
        state: what holds the error of `key`.
        key: the parameter's name.

    Returns:
        Whether all ranks' were finite; if not, `tensor` is NaN.
    """
    return state.all_reduce({key: tensor})


def compressed_reduce_scatter(out: Any, tensor: Any, state: State, key: str) -> bool:
    """Average `tensor` over all ranks, compressed, this rank's shard to `out`.

    ``state.reduce_scatter(out, tensor, key)``, which see.
    """
    return state.reduce_scatter(out, tensor, key)
