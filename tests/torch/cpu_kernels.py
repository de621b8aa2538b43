"""The CPU's kernels of top-k in place of those of `pycollective.triton`, whose bits are the same.

Triton's interpreter takes some 50 ms for a launch, these next to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pycollective import _core
from pycollective.compression.sparse_layout import Sparse, sum_of, widened
from pycollective.errors import ConfigurationError
from pycollective.triton.index_packing import tail_bound
from pycollective.triton.top_k import Entries

__all__ = ["Entries", "Rows", "tail_bound"]


class Rows(NamedTuple):
    """Entries of some ranks: of each row those in use."""

    places: list[np.ndarray]
    values: torch.Tensor
    size: int


def array(tensor):
    """A tensor's memory, as NumPy has its type."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def in_use(entries):
    count = int(entries.count)
    return Sparse(array(entries.places)[:count].view(np.uint32), array(entries.values)[:count])


def append(entries, places, values):
    at = int(entries.count)
    array(entries.places)[at : at + len(places)] = places.astype(np.uint32).view(np.int32)
    array(entries.values)[at : at + len(places)] = values
    entries.count.add_(len(places))


def taken(left, indices, entries, place):
    values = np.empty(len(indices), array(entries.values).dtype)
    _core.sparse_take(left.numpy(), indices, values)
    append(entries, indices.astype(np.int64) + place, values)


def numpy_or_none(tensor):
    return None if tensor is None else tensor.numpy()


# pycollective.triton.top_k.


def top_k(x, held, left, k, entries, bad, place=0):
    indices = np.empty(k, np.uint32)
    if len(x) and _core.top_k(x, numpy_or_none(held), left.numpy(), k, indices) < 0:
        bad |= 1
        entries.count.add_(k)
    elif len(x):
        taken(left, indices, entries, place)


def top_k_chunks(x, held, left, k, chunk, entries, bad, place=0):
    indices = np.empty(-(-len(x) // chunk) * k, np.uint32)
    found = _core.top_k_chunks(x, numpy_or_none(held), left.numpy(), k, chunk, indices)
    if found < 0:
        bad |= 1
        entries.count.add_(len(x) // chunk * k + -(-(len(x) % chunk) * k // chunk))
    else:
        taken(left, indices[:found], entries, place)


def add(x, held, left, bad):
    if len(x) and not _core.sparse_add(x, numpy_or_none(held), left.numpy()):
        bad |= 1


def histogram(left, shift, bits, prefix, bins):
    _core.sparse_histogram(left.numpy(), shift, bits, int(prefix), bins.numpy())


def select(left, key, ties, entries, place=0):
    if len(left):
        indices = np.empty(len(left), np.uint32)
        most = min(int(ties), len(left))
        found = _core.sparse_select(left.numpy(), int(key), most, indices)
        room = entries.places.numel() - int(entries.count)
        taken(left, indices[: min(found, room)], entries, place)


# pycollective.triton.index_packing.


def write(entries, size, tail, length):
    chosen = in_use(entries)
    places, values = chosen.places, chosen.values
    stream = np.empty(_core.pack_indices_bound(len(places), size), np.uint8)
    stream = stream[: _core.pack_indices(places, size, stream)]
    lengths = np.array([len(places), len(stream)], np.uint32).view(np.uint8)
    whole = np.concatenate([lengths, stream, values.view(np.uint8)])
    array(tail)[: len(whole)] = whole
    length.fill_(len(whole))


def read(tail, length, size, values, entries, bad):
    row, whole = array(tail), int(length)
    entries.count.zero_()
    if whole <= len(row):
        count, stream = (int(each) for each in row[:8].copy().view(np.uint32))
        if whole == 8 + stream + count * values.itemsize and count <= entries.places.numel():
            places = np.empty(count, np.uint32)
            try:
                _core.unpack_indices(row[8 : 8 + stream], size, places)
            except ConfigurationError:
                bad |= 1
                return
            narrow = array(torch.empty(0, dtype=values)).dtype
            append(entries, places, widened(row[8 + stream : whole].copy().view(narrow)))
            return
    bad |= 1


# pycollective.triton.sparse_sums.


def mark(entries, size):
    return Rows(
        [in_use(each).places for each in entries], torch.stack([e.values for e in entries]), size
    )


def average(rows, out, divisor):
    every = zip(rows.places, rows.values.numpy(), strict=True)
    found = sum_of([Sparse(places, values[: len(places)].copy()) for places, values in every])
    _core.sparse_scatter(found.places, found.values, out, int(divisor))
