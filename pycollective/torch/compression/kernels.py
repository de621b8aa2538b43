"""Triton's kernels and a device's tensors, for the state machine of `pycollective.compression`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycollective import order
from pycollective.compression.arrays import Flat, Floats, Numbers, whole
from pycollective.compression.header import Agreement
from pycollective.compression.kernels import Read
from pycollective.errors import ConfigurationError
from pycollective.segments import DIFFERS, zero_at
from pycollective.torch.ordered import reduction

# Of a call about segments that are not compressed.
_NO_CODEC = "one_bit", 64
_ALIGNED = 16  # bytes: what a message begins at a multiple of


def load(name: str) -> Any:
    """A module of `pycollective.triton`, which a machine without a device need not have.

    Raises:
        ConfigurationError: there is no Triton.
    """
    try:
        return importlib.import_module(f"pycollective.triton.{name}")
    except ImportError as error:
        raise ConfigurationError(
            "compression of tensors on devices is done by Triton, which cannot be imported "
            f"({error}); install triton, or keep the gradients on CPUs"
        ) from error


class TritonKernels:
    """Kernels on a device's current stream; the host waits for none.

    Args:
        device: where all tensors are.
    """

    most_hosts = 64  # whose entries a kernel adds up

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._finite, self._headers, self._quantize = map(load, ("finite", "headers", "quantize"))
        self._top_k, self._packing, self._sums = map(
            load, ("top_k", "index_packing", "sparse_sums")
        )
        tables = load("tables")
        self._tables, self._upload = tables.Tables(device), tables.upload

    # Memory.

    def memory(self, words: int, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
        every = [-(-size // _ALIGNED) * _ALIGNED for size in (4 * words, *sizes)]
        cut = torch.zeros(sum(every), dtype=torch.uint8, device=self._device).split(every)
        found = cut[0][: 4 * words].view(torch.int32)
        return found, [part[:size] for part, size in zip(cut[1:], sizes, strict=True)]

    def floats(self, count: int) -> Any:
        return torch.empty(count, dtype=torch.float32, device=self._device)

    def entries(self, capacity: int, values: str) -> tuple[Any, Any]:
        places = torch.empty(capacity, dtype=torch.int32, device=self._device)
        return places, torch.empty(capacity, dtype=getattr(torch, values), device=self._device)

    def numbers(self, array: Numbers) -> Any:
        return self._tables.numbers(array)

    def address(self, array: Any) -> int:
        address: int = array.data_ptr()
        return address

    # Residuals.

    def scaled(self, values: Any, factor: float) -> Any:
        if 2.0**-126 <= factor < 2.0**128:  # so it is fp32, which rounds the product once, too
            return values * factor
        return (values.to(torch.float64) * factor).to(torch.float32)

    def to_host(self, values: Any) -> Floats:
        array: Floats = values.cpu().numpy()
        return array

    def from_host(self, values: Floats) -> Any:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def add_error(self, flat: Flat, error: Floats, found: Any, unused: int) -> None:
        part = flat.array
        there = self._upload(np.ascontiguousarray(error), self._device)
        total = torch.empty_like(part)
        put(total, part.to(torch.float32) + there)
        if unused:
            zero = ~part.any()
            found[unused] = zero
            total = torch.where(zero, part, total)
        part.copy_(total)
        self.check_finite(whole([flat]), found)

    # All codecs.

    def headers(
        self, found: Any, agreement: Agreement, reads: Sequence[Read], write: Any, means: bool
    ) -> None:
        self._headers.headers(found, agreement, reads, write, means, self._tables)

    def copy(self, table: Any, messages: Any, found: Any, agreement: Agreement) -> None:
        # So that it does not note what is not zero: that is found of sums. None is skipped yet.
        zeros = zero_at(agreement.items)
        self._quantize.quantize(
            *(*_NO_CODEC, table, messages.view(-1), found, zeros, self._tables),
            header=(agreement, len(messages)),
        )

    def average_copies(self, table: Any, messages: Any, divisor: int, found: Any) -> None:
        self.dequantize(*_NO_CODEC, table, messages, divisor, found)
        self.check_finite(table, found)

    def sum(self, rows: Any, first: int, count: int) -> Any:
        out = self.floats(count)
        if count:
            numbers = rows.view(torch.float32)[:, first // 4 : first // 4 + count]
            ranks = len(rows)
            recipe = order.recipe((0, ranks), [(i, i + 1) for i in range(ranks)])
            reduction.reduce(list(numbers), out, "sum", recipe, 1, torch.float32, finish=False)
        return out

    def fill_nan(self, table: Any, found: Any) -> None:
        self._finite.fill_nan(table, found, self._tables)

    def check_finite(self, table: Any, found: Any) -> None:
        self._finite.check_finite(table, found, self._tables)

    def verdict(self, found: Any) -> Any:
        return found[: DIFFERS + 1].view(torch.uint8)

    def join(self, found: Any, verdicts: Any, at: int = 0) -> None:
        words = verdicts.reshape(-1).view(torch.int32)
        if at:
            found[at : at + words.numel()] = words
        found[: DIFFERS + 1] |= words.view(-1, 2).amax(0)

    # 1 bit and 8 bits.

    def quantize(
        self, codec: str, chunk: int, table: Any, messages: Any, found: Any, zeros: int = 0
    ) -> None:
        self._quantize.quantize(codec, chunk, table, messages, found, zeros, self._tables)

    def dequantize(
        self,
        codec: str,
        chunk: int,
        table: Any,
        messages: Any,
        divisor: int,
        found: Any,
        zeros: int = 0,
    ) -> None:
        self._quantize.dequantize(
            codec, chunk, table, messages, float(divisor), found, zeros, self._tables
        )

    # Top-k.

    def top_k(
        self, table: Any, chunk: int, places: Any, values: Any, messages: Any, found: Any
    ) -> None:
        self._top_k.top_k(table, chunk, places, values, messages, found, self._tables)

    def add(self, table: Any, messages: Any, found: Any) -> None:
        self._top_k.sparse_add(table, messages, found, self._tables)

    def histogram(self, table: Any, shift: int, bits: int, prefixes: Any, bins: Any) -> None:
        rows = bins.view(torch.int32).view(-1, 1 << bits)
        self._top_k.sparse_histogram(table, shift, bits, prefixes, rows, self._tables)

    def merge(self, came: Any, bits: int, wanted: Any, begins: Numbers, rank: int) -> Any:
        histograms = came.view(torch.int32).view(len(came), -1, 1 << bits)
        told = self._top_k.merge(histograms, wanted, begins, rank, self._tables)
        return told.view(-1).view(torch.uint8)

    def take(self, heard: Any, bits: int, prefixes: Any, rank: int) -> tuple[Any, Any, Any]:
        told = heard.view(torch.int64).view(len(heard), 2 + len(heard), -1)
        found: tuple[Any, Any, Any] = self._top_k.take(told, bits, prefixes, rank)
        return found

    def select(self, table: Any, keys: Any, ties: Any, places: Any, values: Any) -> Any:
        return self._top_k.sparse_select(table, keys, ties, places, values, self._tables)

    def pack(
        self, places: Any, values: Any, parts: Numbers, counts: Any, messages: Any, found: Any
    ) -> None:
        self._packing.pack(places, values, parts, counts, messages, found, self._tables)

    def average(
        self, came: Any, parts: Numbers, values: str, table: Any, divisor: int, found: Any
    ) -> None:
        self._sums.average(
            *(came, parts, getattr(torch, values), table, float(divisor), found, self._tables)
        )


def put(out: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a gradient, flat, by fp32 numbers, each rounded once."""
    if out.dtype == torch.float32:
        out.copy_(values)
    elif out.numel():  # not by a cast, which may do otherwise on a device
        reduction.reduce([values], out, "sum", [order.TAKE], 1, out.dtype, finish=True)
