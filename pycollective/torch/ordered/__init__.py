"""The contract's bits over any process group of torch: Gloo, NCCL, and others::

    from pycollective.torch import ordered
    ordered.all_reduce(tensor, "avg")                       # in place, over the default group
    ddp.register_comm_hook(None, ordered.hook)              # DistributedDataParallel
    module.set_custom_reduce_scatter(ordered.ReduceScatter())  # FSDP2
    ordered.clip_grad_norm_(model.parameters(), 1.0)        # sharded or not

ordered.md says what is supported where, and what it costs.
"""

from pycollective.torch.norm import clip_grad_norm_
from pycollective.torch.ordered.calls import all_reduce, prepare, reduce_scatter, stats
from pycollective.torch.ordered.fsdp import ReduceScatter
from pycollective.torch.ordered.hooks import hook
from pycollective.torch.ordered.work import Work

__all__ = [
    "ReduceScatter",
    "Work",
    "all_reduce",
    "clip_grad_norm_",
    "hook",
    "prepare",
    "reduce_scatter",
    "stats",
]
