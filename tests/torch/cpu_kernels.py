"""The CPU's kernels on tensors, in place of `pycollective.triton`'s, whose bits are the same.

Triton's interpreter takes some 50 ms for a launch, these next to nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from pycollective.compression.header import Agreement
from pycollective.compression.kernels import CpuKernels
from pycollective.triton.tables import Tables, upload

_AS_NUMPY = {torch.bfloat16: torch.int16}
_OF = CpuKernels()
_OF.ends_are_told = False  # messages of devices end in zeros


def arrays(each):
    """Tensors, in tuples and lists too, as arrays of the same memory."""
    if isinstance(each, torch.Tensor):
        return each.view(_AS_NUMPY.get(each.dtype, each.dtype)).numpy()
    if type(each) in (tuple, list):
        return type(each)(map(arrays, each))
    return each


def on_arrays(name):
    """A kernel that takes tensors, and tables of the device behind everything else."""

    def launch(*args):
        *given, _ = arrays(args)
        getattr(_OF, name)(*given)

    return launch


def headers(found, mine, reads, write, means, tables):
    _OF.headers(*arrays((found, Agreement(*mine), reads, write)), means)


def quantize(codec, chunk, table, messages, found, zero_at, tables, header=None):
    if header is not None:
        mine, rows = header
        head = Agreement(*mine).plain()
        arrays(messages).reshape(rows, -1)[:, : head.size] = head
    _OF.quantize(codec, chunk, table, *arrays((messages, found)), zero_at)


def dequantize(codec, chunk, table, messages, divisor, found, zero_at, tables):
    _OF.dequantize(codec, chunk, table, arrays(messages), int(divisor), arrays(found), zero_at)


def sparse_histogram(table, shift, bits, prefixes, bins, tables):
    _OF.histogram(table, shift, bits, *arrays((prefixes, bins)))


def merge(histograms, wanted, begins, rank, tables):
    came = arrays(histograms)
    bits = came.shape[2].bit_length() - 1
    told = _OF.merge(came.view(np.uint8), bits, arrays(wanted), begins, rank)
    return torch.from_numpy(told.view(np.int64)).view(2 + len(came), -1)


def take(told, bits, prefixes, rank):
    heard = arrays(told).reshape(len(told), -1).view(np.uint8)
    found = _OF.take(heard, bits, arrays(prefixes), rank)
    return tuple(map(torch.from_numpy, found))


def sparse_select(table, keys, ties, places, values, tables):
    return torch.from_numpy(_OF.select(table, *arrays((keys, ties, places, values))))


def average(came, parts, values, table, divisor, found, tables):
    name = str(values).removeprefix("torch.")
    _OF.average(arrays(came), parts, name, table, int(divisor), arrays(found))


_MODULES = {
    "tables": SimpleNamespace(Tables=Tables, upload=upload),
    "finite": SimpleNamespace(
        fill_nan=on_arrays("fill_nan"), check_finite=on_arrays("check_finite")
    ),
    "headers": SimpleNamespace(headers=headers),
    "quantize": SimpleNamespace(quantize=quantize, dequantize=dequantize),
    "top_k": SimpleNamespace(
        top_k=on_arrays("top_k"),
        sparse_add=on_arrays("add"),
        sparse_histogram=sparse_histogram,
        merge=merge,
        take=take,
        sparse_select=sparse_select,
    ),
    "index_packing": SimpleNamespace(pack=on_arrays("pack")),
    "sparse_sums": SimpleNamespace(average=average),
}


def module(name):
    """In place of `pycollective.triton.<name>`."""
    return _MODULES[name]
