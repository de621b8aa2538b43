"""What ordered calls do to one memory: lay out messages, reduce what came, and compare headers.

Native on CPUs, Triton or torch's own operations on devices. All give the same bits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from pycollective import _core, order
from pycollective.dtypes import TRAITS
from pycollective.errors import ConfigurationError
from pycollective.torch.ordered import plain
from pycollective.triton.formats import FORMATS, name_of
from pycollective.triton.header_check import Check

__all__ = ["Check", "lay_out", "narrowed", "node_dtype", "reduce"]

_MOST_ROWS = 64  # of the Triton kernel, and headers


def node_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """In which sums of leaves of `dtype` travel and add up."""
    traits = TRAITS[name_of(dtype)]
    wide = traits.numbers == "float" and op in ("sum", "avg", "prod")
    return torch.float32 if wide and traits.accumulator > traits.size else dtype


def lay_out(
    leaves: torch.Tensor,
    step: int,
    size: int,
    rows: torch.Tensor,
    header: Sequence[int],
    number: torch.Tensor,
    own: torch.Tensor,
    fits: torch.Tensor | None = None,
) -> None:
    """Write a message for each of some ranks: a header of 64 bytes, and a part of the leaves.

    Args:
        leaves: flat and contiguous.
        step: row i has the leaves from element ``i * step`` on;
        size: so many, or those that are left. Of the rest of a row any bytes may be written.
        rows: uint8, ``(n, bytes)``, contiguous, of a multiple of 64 bytes each; they begin at
            multiples of 8 bytes.
        header: its 8 words, of 64 bits. The second is not used: ``number + 1`` is written.
        number: int64, ``(1,)``, on the device of all tensors: how many calls have ended.
        own: int64, ``(8,)``, there: becomes the header, which the call's reductions compare.
        fits: int64, ``(1,)``, there: the header's last word. None: that of `header`.
    """
    kernels = _triton("rows", rows.device.type) or plain
    kernels.lay_out(leaves, step, size, rows, header, number, own, fits)


def narrowed(leaves: torch.Tensor, out: torch.Tensor, fits: torch.Tensor) -> None:
    """Cast fp32 leaves to a narrow type, and see whether they are the same numbers.

    Args:
        leaves: flat and contiguous.
        out: as long, of float16, bfloat16 or a float of 8 bits. Numbers are rounded to nearest,
            ties to even; a NaN becomes the contract's.
        fits: int64, ``(1,)``, becomes 1 if each leaf has exactly a value of `out`'s type, with its
            sign, or is a NaN; else 0.
    """
    kernels = _triton("rows", out.device.type) or plain
    kernels.narrowed(leaves, out, fits)


def reduce(
    terms: Sequence[torch.Tensor] | torch.Tensor,
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    divisor: float | torch.Tensor,
    dtype: torch.dtype,
    finish: bool,
    check: Check | None = None,
    compiles: bool = True,
) -> None:
    """Combine leaves of `dtype` and nodes, ascending, into a node or the result.

    Args:
        terms: flat and contiguous, as long as `out`, of `dtype` or `node_dtype`; or the rows of a
            matrix.
        out: of `node_dtype`, or for a result of `dtype`. It may be one of the terms on a CPU, and
            overlaps none on a device.
        op: as the contract names it.
        recipe: which are combined, as `pycollective.order.recipe` has it.
        divisor: `avg` divides by it. On a device the leaves of the whole order, or, of floats, a
            tensor there, of float64, ``(1,)``: any positive number, or NaN, which makes all NaN.
        finish: whether `out` is the result.
        check: headers to compare by the way, see `Check`; also of an empty `out`.
        compiles: whether a kernel for this recipe is worth its compiling, which takes seconds.

    Raises:
        ConfigurationError: a tensor shall divide integers.
    """
    if isinstance(divisor, torch.Tensor) and dtype not in FORMATS:
        raise ConfigurationError(f"a tensor divides averages of floats, not of {dtype}")
    device_type = out.device.type
    kernels = _triton("reduce", device_type)
    if kernels is None and device_type == "cpu":
        _reduce_here(list(terms), out, op, recipe, float(divisor), dtype, finish)
        if check is not None:
            plain.compare(out, check)
    elif len(terms) == 1 and not finish and check is None:
        out.copy_(terms[0])
    else:
        rows = _rows(terms)
        # The host does not ask what a tensor has: it would wait for the device.
        leaves = divisor if isinstance(divisor, torch.Tensor) else int(divisor)
        if compiles and len(terms) <= _MOST_ROWS and kernels is not None:
            many = check is not None and len(check.rows) > _MOST_ROWS
            given = rows, out, op, recipe, leaves, dtype, finish
            kernels.reduce(*given, None if many else check)
            if check is not None and many:
                plain.compare(out, check)
        else:
            plain.reduce(rows, out, op, recipe, leaves, dtype, finish, check)


def _reduce_here(
    terms: Sequence[torch.Tensor],
    out: torch.Tensor,
    op: str,
    recipe: Sequence[int],
    divisor: float,
    dtype: torch.dtype,
    finish: bool,
) -> None:
    """By the native kernels, in the host's memory."""
    if out.numel() == 0:
        return
    if len(terms) == 1 and not finish:
        out.copy_(terms[0])
        return
    all_alike = all(each.dtype == out.dtype for each in terms)
    if finish and all_alike and len(terms) == divisor and _is_of_leaves(recipe, len(terms)):
        _core.reduce_into(terms, op, out)
    else:
        _core.combine_into(terms, recipe, divisor, op, name_of(dtype), out, finish)


def _is_of_leaves(recipe: Sequence[int], terms: int) -> bool:
    """Whether a recipe is that of as many leaves: nodes may be combined otherwise."""
    return tuple(recipe) == _of_leaves(terms)


@functools.lru_cache(maxsize=64)
def _of_leaves(leaves: int) -> tuple[int, ...]:
    return tuple(order.recipe((0, leaves), [(i, i + 1) for i in range(leaves)]))


def _rows(terms: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The terms as rows of one matrix: as they lie, if they do, or a copy."""
    if isinstance(terms, torch.Tensor):
        return terms
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
def _triton(name: str, device_type: str) -> Any:
    """A module of Triton's kernels; None where devices of such a type have none."""
    if device_type not in ("cuda", "xpu") or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"pycollective.triton.{name}")
