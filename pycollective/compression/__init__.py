"""Compression with error feedback between hosts: top-k, 1-bit, 8-bit (compression.md)."""

from pycollective.compression.states import (
    Int8State,
    OneBitState,
    State,
    TopKState,
    compressed_all_reduce,
    compressed_reduce_scatter,
)

__all__ = [
    "CODECS",
    "Int8State",
    "OneBitState",
    "State",
    "TopKState",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
]

#: The state of each codec, by its name. Torch's face has one called the same, and its hook.
CODECS: dict[str, type[State]] = {
    state.codec: state for state in (OneBitState, Int8State, TopKState)
}
