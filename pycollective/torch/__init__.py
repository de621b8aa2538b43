"""The torch.distributed face: importing it registers the backend ``pycollective``::

    import pycollective.torch
    torch.distributed.init_process_group("pycollective")     # then DDP, FSDP2, DTensor as usual
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    pycollective.torch.LeafSync(model, leaves=24)            # the same bits on any number of ranks
    pycollective.torch.stats()                               # what was sent to other hosts
    pycollective.torch.empty(1000, dtype=torch.bfloat16)     # a tensor that peers read in place

The hooks, `pycollective.torch.ordered`, LeafSync and states of compression work over any other
backend, too. They need no part compiled for torch.
"""

from __future__ import annotations

from typing import Any

from pycollective.config import INSTALL_TORCH
from pycollective.shim import loading

try:
    import torch.distributed as dist
except ImportError as error:
    raise ImportError(f"pycollective.torch needs PyTorch: {INSTALL_TORCH}") from error

from pycollective.torch import ordered
from pycollective.torch.compression.adam import hold_second_moment
from pycollective.torch.compression.fsdp import CompressedReduceScatter, fsdp_parameters
from pycollective.torch.compression.hooks import int8_hook, one_bit_hook, top_k_hook
from pycollective.torch.compression.states import (
    Int8State,
    OneBitState,
    TopKState,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from pycollective.torch.leaves import LeafSampler, LeafSync
from pycollective.torch.ordered.hooks import all_reduce_hook, in_order
from pycollective.torch.ordered.ledger_state import LedgerState

try:
    loading.load()
except ImportError as error:
    _missing = str(error)

    def __getattr__(name: str) -> Any:
        if name in ("empty", "stats"):
            raise ImportError(_missing)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def _refuse(*options: object) -> Any:
        raise ImportError(_missing)

    if "pycollective" not in dist.Backend.backend_list:
        dist.Backend.register_backend("pycollective", _refuse, devices=["cpu", "cuda"])
else:
    from pycollective.torch.backend import empty, register, stats

    register()

__all__ = [
    "CompressedReduceScatter",
    "Int8State",
    "LeafSampler",
    "LeafSync",
    "LedgerState",
    "OneBitState",
    "TopKState",
    "all_reduce_hook",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "empty",
    "fsdp_parameters",
    "hold_second_moment",
    "in_order",
    "int8_hook",
    "one_bit_hook",
    "ordered",
    "stats",
    "top_k_hook",
]
