"""How fast the Triton kernels quantize and dequantize, beside a copy on the device.

Usage: python -m benchmarks.gpu.quantized [MIB]

Gradients have MIB MiB of fp32 (default 64), and a few elements; residuals are added. The copy moves
as many bytes: it reads half and writes half. Both are timed by events, in turns. Every byte of
payloads and residuals, and every element of sums, is compared with the CPU's kernels. Prints a line
of JSON: microseconds, and the copy's time over the kernel's.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.reduce import microseconds
from pycollective import _core, segments
from pycollective.triton.tables import Tables

CHUNK = {"one_bit": 1024, "int8": 256}
AT = 29  # where a payload begins in its message: behind a header of 5 bytes of bits


def table_of(
    x: torch.Tensor,
    k: int = 1,
    *,
    at: int = 0,
    held: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
) -> NDArray[np.int64]:
    """A table of one segment. The caller keeps the tensors, which are contiguous."""
    columns = {segments.ADDRESS: x, segments.HELD: held, segments.LEFT: left}
    table = np.zeros((1, segments.COLUMNS), np.int64)
    for column, tensor in columns.items():
        table[0, column] = 0 if tensor is None else tensor.data_ptr()
    table[0, segments.DTYPE] = segments.DTYPES.index(str(x.dtype).removeprefix("torch."))
    table[0, [segments.COUNT, segments.AT, segments.K]] = x.numel(), at, k
    return table


def nothing_found() -> torch.Tensor:
    """What a call about one parameter has found before its first kernel."""
    return torch.zeros(segments.heads_at(1) // 4, dtype=torch.int32)


class Case(NamedTuple):
    """What is called, of which codec; of sums how many payloads."""

    call: str
    codec: str
    dtype: str
    rows: int = 1

    def __str__(self) -> str:
        of = f" of {self.rows}" if self.rows > 1 else ""
        return f"{self.call}{of} {self.codec} {self.dtype}"


CASES = [
    *(Case("quantize", codec, dtype) for codec in CHUNK for dtype in ("float32", "bfloat16")),
    *(Case("dequantize", codec, "float32", rows) for codec in CHUNK for rows in (1, 8)),
]


class Quantizing:
    """A gradient and a residual on a device, and what must come of them."""

    def __init__(self, case: Case, elements: int, device: str) -> None:
        self._case, self._chunk = case, CHUNK[case.codec]
        self._tables = Tables(torch.device(device))
        dtype = getattr(torch, case.dtype)
        x = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype)
        held = torch.randn(elements, generator=torch.Generator().manual_seed(2))
        size = AT + _core.quantized_bytes(case.codec, self._chunk, elements)
        left, message = torch.empty(elements), torch.empty(size, dtype=torch.uint8)
        self._wanted = message[AT:], left, nothing_found()
        wanted = table_of(x, at=AT, held=held, left=left)
        _core.quantize(case.codec, self._chunk, wanted, message, self._wanted[2])
        self._x, self._held = x.to(device), held.to(device)
        self.left = torch.empty(elements, device=device)
        self._message = torch.empty(size, dtype=torch.uint8, device=device)
        self.payload = self._message[AT:]
        self._found = torch.zeros_like(self._wanted[2], device=device)
        self._table = table_of(self._x, at=AT, held=self._held, left=self.left)

    @property
    def moved(self) -> int:
        """Bytes that are read and written."""
        return sum(each.nbytes for each in (self._x, self._held, self.left, self.payload))

    def run(self, kernels: Any) -> None:
        """Call `pycollective.triton.quantize`, or what stands for it."""
        kernels.quantize(
            *(self._case.codec, self._chunk, self._table, self._message, self._found, 0),
            self._tables,
        )

    def wrong(self) -> int:
        """Bytes that are not the CPU's, and words of what was found."""
        payload, left, found = self._wanted
        errors = self.left.view(torch.int32).cpu() != left.view(torch.int32)
        finds = self._found.cpu() != found
        return int((self.payload.cpu() != payload).sum() + errors.sum() + finds.sum())


class Dequantizing:
    """Messages of some ranks on a device, and their mean."""

    def __init__(self, case: Case, elements: int, device: str) -> None:
        self._case, self._chunk = case, CHUNK[case.codec]
        self._tables = Tables(torch.device(device))
        size = _core.quantized_bytes(case.codec, self._chunk, elements)
        messages = torch.empty(case.rows, AT + size, dtype=torch.uint8)
        left = torch.empty(elements)
        for rank, row in enumerate(messages):
            x = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
            table = table_of(x, at=AT, left=left)
            _core.quantize(case.codec, self._chunk, table, row, nothing_found())
        self._wanted = torch.empty(elements, dtype=getattr(torch, case.dtype))
        wanted = table_of(self._wanted, at=AT)
        _core.dequantize(
            case.codec, self._chunk, wanted, messages, float(case.rows), nothing_found()
        )
        self._messages = messages.to(device)
        self.out = torch.empty_like(self._wanted, device=device)
        self._found = nothing_found().to(device)
        self._table = table_of(self.out, at=AT)

    @property
    def moved(self) -> int:
        """Bytes that are read and written."""
        return self._messages.nbytes - AT * self._case.rows + self.out.nbytes

    def run(self, kernels: Any) -> None:
        """Call `pycollective.triton.quantize`, or what stands for it."""
        kernels.dequantize(
            *(self._case.codec, self._chunk, self._table, self._messages),
            *(float(self._case.rows), self._found, 0, self._tables),
        )

    def wrong(self) -> int:
        """Elements of the mean that have another bit than the CPU's."""
        return int((self.out.view(torch.int32).cpu() != self._wanted.view(torch.int32)).sum())


def problem_of(case: Case, elements: int, device: str) -> Quantizing | Dequantizing:
    """What a case calls, and with what."""
    kind = Quantizing if case.call == "quantize" else Dequantizing
    return kind(case, elements, device)


def measured(case: Case, elements: int) -> dict[str, Any]:
    """One case."""
    from pycollective.triton import quantize

    problem = problem_of(case, elements, "cuda")
    half = torch.empty(problem.moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    calls = {"us": lambda: problem.run(quantize), "copy_us": lambda: other.copy_(half)}
    took = microseconds(calls)
    share = round(took["copy_us"] / took["us"], 3)
    return {**took, "share_of_copy": share, "bytes": problem.moved, "wrong": problem.wrong()}


def main() -> None:
    """Measure all cases; status 1 where a byte is wrong."""
    elements = (int(sys.argv[1] if len(sys.argv) > 1 else 64) << 18) + 3
    found = {str(case): measured(case, elements) for case in CASES}
    print(json.dumps(found))
    sys.exit(any(each["wrong"] for each in found.values()))


if __name__ == "__main__":
    main()
