"""How fast the Triton kernel reduces rows, beside a copy on the device that moves as many bytes.

Usage: python -m benchmarks.gpu.reduce [MIB]

Rows have MIB MiB (default 64), and a few elements. The kernel reads them and writes one. The copy
moves as many bytes: it reads half and writes half. Both are timed by events, in turns. Every
element of the result is compared with the oracle. Prints a line of JSON: microseconds, and the
copy's time over the kernel's.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pycollective import order, reference
from pycollective.dtypes import numpy_type
from pycollective.testing.inputs import portable_leaves
from pycollective.triton.formats import words

DIFFERENT = 1 << 16  # elements; the others repeat them
ROUNDS, WARMUP = 20, 3
ASLEEP = 4_000_000  # the device's cycles, about 2 ms
Reduce = Callable[..., None]


class Case(NamedTuple):
    """Leaves, how many, their type and the result's."""

    leaves: int
    dtype: str
    out: str

    def __str__(self) -> str:
        return f"{self.leaves} x {self.dtype}" + (
            f" to {self.out}" if self.out != self.dtype else ""
        )


CASES = [
    *(Case(leaves, "bfloat16", "bfloat16") for leaves in (2, 8, 64)),
    Case(8, "bfloat16", "float32"),
    Case(8, "float32", "float32"),
    Case(8, "float8_e4m3fn", "float8_e4m3fn"),
]


class Problem:
    """The leaves of a case on a device, and what must come of them.

    A row has `elements` of them and lies as far from the next one as 16 bytes allow.
    """

    def __init__(self, case: Case, elements: int, device: str) -> None:
        self.case, self._elements, self._device = case, elements, device
        different = portable_leaves(case.dtype, "avg", case.leaves, DIFFERENT)
        stride = -(-elements // 16) * 16
        kind = getattr(torch, case.dtype)
        room = torch.empty(case.leaves, stride, dtype=kind, device=device)
        self.rows = room[:, :elements]
        for row, leaf in zip(self.rows, different, strict=True):
            words(row).copy_(self._repeated(leaf))
        wide = [each.astype(numpy_type(case.out)) for each in different]
        with np.errstate(all="ignore"):
            self._want = self._repeated(reference.reduce(wide, "avg"))
        self.out = torch.empty(elements, dtype=getattr(torch, case.out), device=device)

    @property
    def moved(self) -> int:
        """Bytes that are read and written."""
        return (
            self.rows.numel() * self.rows.element_size()
            + self.out.numel() * self.out.element_size()
        )

    def run(self, reduce: Reduce) -> None:
        n = self.case.leaves
        recipe = order.recipe((0, n), [(i, i + 1) for i in range(n)])
        reduce(self.rows, self.out, "avg", recipe, n, self.rows.dtype, True)

    def wrong(self) -> int:
        """Elements of the result that have another bit than the oracle's."""
        return int((words(self.out) != self._want).sum())

    def _repeated(self, array: Any) -> torch.Tensor:
        signed = torch.from_numpy(array.view(f"i{array.itemsize}")).to(self._device)
        return signed.repeat(-(-self._elements // DIFFERENT))[: self._elements]


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each call on the current stream, which take turns: the device's time alone.

    A call is queued while the device sleeps, so that it does not wait for the host.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-WARMUP, ROUNDS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ASLEEP)
            start.record()
            call()
            end.record()
            end.synchronize()
            if i >= 0:
                times[name].append(1000 * start.elapsed_time(end))
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def measured(case: Case, row_bytes: int) -> dict[str, Any]:
    """One case."""
    from pycollective.triton.reduce import reduce

    problem = Problem(case, row_bytes // numpy_type(case.dtype).itemsize + 3, "cuda")
    half = torch.empty(problem.moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    took = microseconds({"us": lambda: problem.run(reduce), "copy_us": lambda: other.copy_(half)})
    share = round(took["copy_us"] / took["us"], 3)
    return {**took, "share_of_copy": share, "bytes": problem.moved, "wrong": problem.wrong()}


def main() -> None:
    """Measure all cases; status 1 where a bit is wrong."""
    row_bytes = int(sys.argv[1] if len(sys.argv) > 1 else 64) << 20
    found = {str(case): measured(case, row_bytes) for case in CASES}
    print(json.dumps(found))
    sys.exit(any(each["wrong"] for each in found.values()))


if __name__ == "__main__":
    main()
