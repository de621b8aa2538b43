"""Compression of torch's gradients: states, hooks for DDP, and Adam's held moment."""

from pycollective.torch.compression.adam import hold_second_moment
from pycollective.torch.compression.hooks import (
    Int8State,
    OneBitState,
    TopKState,
    compressed_all_reduce,
    compressed_reduce_scatter,
    int8_hook,
    one_bit_hook,
    top_k_hook,
)

__all__ = [
    "Int8State",
    "OneBitState",
    "TopKState",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "hold_second_moment",
    "int8_hook",
    "one_bit_hook",
    "top_k_hook",
]
