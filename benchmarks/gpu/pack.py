"""How fast the Triton kernels pack and unpack, beside a copy on the device.

Usage: python -m benchmarks.gpu.pack [MIB]

There are MIB MiB of elements (default 64), and a few: Gaussian leaves, or fp32 sums of four bf16
ones. The copy reads and writes as many bytes as elements and payload have together. Both are timed
by events, in turns. Every byte of a payload, and every element that comes of it, is compared with
the CPU's codec. Prints a line of JSON: microseconds, GB/s of elements, and bits an element packed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.reduce import microseconds
from benchmarks.native_parts import pack_into
from pycollective.dtypes import numpy_type
from pycollective.triton.formats import words


class Case(NamedTuple):
    """What is called, with elements of which type: sums of how many leaves."""

    call: str
    dtype: str
    leaves: int = 1

    def __str__(self) -> str:
        of = f", sums of {self.leaves} bfloat16" if self.leaves > 1 else ""
        return f"{self.call} {self.dtype}{of}"


CASES = [
    Case(call, *kind)
    for call in ("pack", "unpack")
    for kind in (("bfloat16",), ("float16",), ("float32",), ("float32", 4))
]


class Problem:
    """Elements and their payload on a device, and what must come of each."""

    def __init__(self, case: Case, elements: int, device: str) -> None:
        self._case = case
        random = torch.Generator().manual_seed(1)
        x = torch.randn(elements, generator=random)
        if case.leaves > 1:
            x = x.bfloat16().float()
            for _ in range(case.leaves - 1):
                x += torch.randn(elements, generator=random).bfloat16()
        self._x = x.to(getattr(torch, case.dtype))
        room = np.empty(self._x.nbytes, np.uint8)
        size = pack_into(words(self._x).numpy().view(numpy_type(case.dtype)), room)
        self._payload = torch.from_numpy(room[:size])
        packs = case.call == "pack"
        self._given = (self._x if packs else torch.from_numpy(room)).to(device)
        self.out = torch.empty_like(torch.from_numpy(room) if packs else self._x, device=device)
        self.length = torch.tensor([0 if packs else size], device=device)
        self._refused = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def moved(self) -> int:
        """Bytes of the elements and of the payload."""
        return self._x.nbytes + self._payload.nbytes

    @property
    def elements(self) -> torch.Tensor:
        """What is packed."""
        return self._x

    @property
    def bits(self) -> float:
        """Bits an element that the payload has."""
        return 8 * self._payload.nbytes / self._x.numel()

    def run(self, kernels: Any) -> None:
        """Call `pycollective.triton.pack`, or what stands for it."""
        if self._case.call == "pack":
            kernels.pack(self._given, self.out, self.length)
        else:
            kernels.unpack(self._given, self.length, self.out, self._refused)

    def wrong(self) -> int:
        """Bytes of the payload, or elements, that are not the CPU's; and a length, or a flag."""
        if self._case.call == "unpack":
            return int((words(self.out).cpu() != words(self._x)).sum() + self._refused.cpu().sum())
        size = self._payload.numel()
        return int((self.out[:size].cpu() != self._payload).sum()) + (int(self.length) != size)


def measured(case: Case, mib: int) -> dict[str, Any]:
    """One case."""
    from pycollective.triton import pack

    problem = Problem(case, (mib << 20) // numpy_type(case.dtype).itemsize + 3, "cuda")
    half = torch.empty(problem.moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    took = microseconds({"us": lambda: problem.run(pack), "copy_us": lambda: other.copy_(half)})
    return {
        **took,
        "gb_s": round(problem.elements.nbytes / took["us"] / 1000, 1),
        "bits": round(problem.bits, 2),
        "bytes": problem.elements.nbytes,
        "wrong": problem.wrong(),
    }


def main() -> None:
    """Measure all cases; status 1 where a byte is wrong."""
    mib = int(sys.argv[1] if len(sys.argv) > 1 else 64)
    found = {str(case): measured(case, mib) for case in CASES}
    print(json.dumps(found))
    sys.exit(any(each["wrong"] for each in found.values()))


if __name__ == "__main__":
    main()
