"""The torch.distributed face: importing it registers the backend ``pycollective``.

import pycollective.torch
torch.distributed.init_process_group("pycollective")     # then DDP, FSDP2, DTensor as usual
ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
pycollective.torch.stats()                               # what was sent to other hosts
"""

from pycollective.config import INSTALL_TORCH
from pycollective.shim import loading

try:
    import torch.distributed  # noqa: F401
except ImportError as error:
    raise ImportError(f"pycollective.torch needs PyTorch: {INSTALL_TORCH}") from error
else:
    loading.load()

from pycollective.torch.backend import register, stats
from pycollective.torch.compression.adam import hold_second_moment
from pycollective.torch.compression.hooks import int8_hook, one_bit_hook, top_k_hook
from pycollective.torch.compression.states import (
    Int8State,
    OneBitState,
    TopKState,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from pycollective.torch.hooks import all_reduce_hook, in_order

__all__ = [
    "Int8State",
    "OneBitState",
    "TopKState",
    "all_reduce_hook",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "hold_second_moment",
    "in_order",
    "int8_hook",
    "one_bit_hook",
    "stats",
    "top_k_hook",
]

register()
