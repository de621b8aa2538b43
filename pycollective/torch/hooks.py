"""The old name of `pycollective.torch.ordered.hooks`, for one release.

DDP models that were pickled with a hook name this module.
"""

from pycollective.torch.ordered.hooks import all_reduce_hook, in_order

__all__ = ["all_reduce_hook", "in_order"]
