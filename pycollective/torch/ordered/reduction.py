"""The reduction of what lies in one memory: native on CPUs, Triton or torch's own operations on
devices. All give the same bits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from pycollective import _core
from pycollective.dtypes import TRAITS
from pycollective.torch.ordered import plain
from pycollective.triton.formats import name_of

_MOST_ROWS = 64  # of the Triton kernel


def node_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """In which sums of leaves of `dtype` travel and add up."""
    traits = TRAITS[name_of(dtype)]
    wide = traits.numbers == "float" and op in ("sum", "avg", "prod")
    return torch.float32 if wide and traits.accumulator > traits.size else dtype


def reduce(
    terms: Sequence[torch.Tensor],
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
    finish: bool,
) -> None:
    """Combine leaves of `dtype` and nodes, ascending, into a node or the result.

    Args:
        terms: flat and contiguous, as long as `out`, of `dtype` or `node_dtype`.
        out: of `node_dtype`, or for a result of `dtype`. It may be one of the terms on a CPU, and
            overlaps none on a device.
        op: as the contract names it.
        recipe: which are combined, as `pycollective.order.recipe` has it.
        leaves: of the whole order; `avg` divides by it.
        finish: whether `out` is the result.
    """
    if len(terms) == 1 and not finish:
        out.copy_(terms[0])
    elif out.device.type == "cpu":
        if finish and len(terms) == leaves and all(each.dtype == out.dtype for each in terms):
            _core.reduce_into(terms, op, out)
        else:
            _core.combine_into(terms, recipe, leaves, op, name_of(dtype), out, finish)
    else:
        rows = _rows(terms)
        if len(terms) <= _MOST_ROWS and _has_triton(out.device.type):
            from pycollective.triton import reduce as kernel

            kernel.reduce(rows, out, op, recipe, leaves, dtype, finish)
        else:
            plain.reduce(rows, out, op, recipe, leaves, dtype, finish)


def _rows(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The terms as rows of one matrix: as they lie, if they do, or a copy."""
    first = terms[0]
    if len(terms) == 1:
        return first.view(1, -1)
    stride = terms[1].storage_offset() - first.storage_offset()
    if stride >= first.numel() and all(
        each.dtype == first.dtype
        and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and each.storage_offset() == first.storage_offset() + i * stride
        for i, each in enumerate(terms)
    ):
        return first.as_strided((len(terms), first.numel()), (stride, 1))
    widest = max((each.dtype for each in terms), key=lambda each: each.itemsize)
    return torch.stack([each.to(widest) for each in terms])


@functools.cache
def _has_triton(device_type: str) -> bool:
    return device_type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None
