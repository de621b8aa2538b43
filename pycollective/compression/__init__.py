"""Compression with error feedback between hosts: top-k, 1-bit, 8-bit (docs/compression.md)."""

from pycollective.compression.state import State
from pycollective.compression.states import (
    Int8State,
    OneBitState,
    TopKState,
    compressed_all_reduce,
    compressed_reduce_scatter,
)

__all__ = [
    "Int8State",
    "OneBitState",
    "State",
    "TopKState",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
]
