"""The CPU's kernels on tensors, in place of `pycollective.triton`'s, whose bits are the same.

Triton's interpreter takes some 50 ms for a launch, these next to nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from pycollective.compression.kernels import CpuKernels

_AS_NUMPY = {torch.bfloat16: torch.int16}
_AS_TORCH = {np.dtype(np.uint32): np.int32}


def arrays(each):
    """Tensors, in tuples and lists too, as arrays of the same memory."""
    if isinstance(each, torch.Tensor):
        return each.view(_AS_NUMPY.get(each.dtype, each.dtype)).numpy()
    if type(each) in (tuple, list):
        return type(each)(map(arrays, each))
    return each


def tensors(each):
    """Arrays, in tuples and lists too, as tensors of the same memory."""
    if isinstance(each, np.ndarray):
        return torch.from_numpy(each.view(_AS_TORCH.get(each.dtype, each.dtype)))
    if type(each) in (tuple, list):
        return type(each)(map(tensors, each))
    return each


class KernelsOnTensors:
    """`CpuKernels` that take and give tensors, as a device's do.

    Attributes:
        most_hosts: of top-k.
    """

    most_hosts = 64

    def __init__(self, device: torch.device) -> None:
        self._of = CpuKernels()

    def __getattr__(self, name):
        call = getattr(self._of, name)

        def called(*args):
            with torch._C.DisableTorchFunction():
                return tensors(call(*arrays(args)))

        return called

    def entries(self, capacity, values):
        places = torch.empty(capacity, dtype=torch.int32)
        return places, torch.empty(capacity, dtype=getattr(torch, values))

    def address(self, array):
        return array.data_ptr()

    def to_host(self, values):
        return values.numpy()

    def pack(self, *args):
        """Tells the host no lengths."""
        self.__getattr__("pack")(*args)
