"""How fast Triton kernels select, pack and average, beside a copy on the device and torch.topk.

Usage: python -m benchmarks.gpu.sparse [MIB]

Gradients have MIB MiB of fp32 (default 256), and a few elements; residuals are added, and a
hundredth is taken. The copy moves as many bytes as a case must: it reads half and writes half.
Torch selects a tensor's by its own operations, with the residual, in fewer promises: of equal
elements it may take any. All are timed by events, in turns. Every place, value and residual, each
byte of tails and each average is compared with the CPU's kernels. Prints a line of
JSON: microseconds, and how many times as long the copy and torch take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.quantized import nothing_found, table_of
from benchmarks.gpu.reduce import microseconds
from pycollective import _core, segments

CHUNK = 4096
RANKS = 2.0


def wrong_bytes(tensor: torch.Tensor, wanted: Any) -> int:
    """How many bytes differ, or are missing."""
    found = tensor.contiguous().view(torch.uint8).cpu().numpy()
    bytes_ = np.ascontiguousarray(wanted).view(np.uint8)
    if found.size != bytes_.size:
        return abs(found.size - bytes_.size)
    return int((found != bytes_).sum())


class Selecting:
    """A gradient and a residual on a device, and what is taken of them.

    Attributes:
        left: the residual that is written.
        places, values: of what is taken.
    """

    def __init__(self, chunk: int, elements: int, device: str, kernels: Any) -> None:
        """`chunk` is 0 for a selection by tensor; `kernels` has what `triton.top_k` has."""
        random = torch.Generator().manual_seed(1)
        x, held = (torch.randn(elements, generator=random) for _ in range(2))
        self._chunk, self._k = chunk, round((chunk or elements) / 100)
        whole, rest = divmod(elements, chunk or elements)
        most = whole * self._k - (-self._k * rest // (chunk or elements))
        self._left = torch.empty(elements)
        self._places, self._values = torch.empty(most, dtype=torch.int32), torch.empty(most)
        self._messages, found = torch.empty(0, dtype=torch.uint8), nothing_found()
        wanted = table_of(x, self._k, held=held, left=self._left)
        entries = self._places.numpy().view(np.uint32), self._values
        _core.top_k(wanted, chunk, *entries, self._messages, found)
        self.x, self.held = x.to(device), held.to(device)
        self.left, self.values = torch.empty_like(self.x), torch.empty(most, device=device)
        self.places = torch.empty(most, dtype=torch.int32, device=device)
        self._messages = self._messages.to(device)
        self._found = nothing_found().to(device)
        self._table = table_of(self.x, self._k, held=self.held, left=self.left)
        self._tables = kernels.Tables(self.x.device)

    @property
    def moved(self) -> int:
        """Bytes that must be read and written."""
        return 12 * self.x.numel() + 8 * len(self._places)

    def run(self, kernels: Any) -> None:
        """Call `pycollective.triton.top_k`, or what stands for it."""
        given = self.places, self.values, self._messages, self._found, self._tables
        kernels.top_k(self._table, self._chunk, *given)

    def run_torch(self) -> None:
        """The same by torch's operations."""
        torch.add(self.x, self.held, out=self.left)
        places = self.left.abs().topk(self._k, sorted=False).indices.sort().values
        self.left[places].clone()  # the values
        self.left.index_fill_(0, places, 0)

    def wrong(self) -> int:
        """Bytes that are not the CPU's, and the flag where it is set."""
        return (
            wrong_bytes(self.places, self._places)
            + wrong_bytes(self.values, self._values)
            + wrong_bytes(self.left, self._left)
            + int(self._found[segments.BAD])
        )


class Exchanging:
    """Entries on a device, a message about them, and the average of what it says.

    Attributes:
        message: that is written.
        out: the average.
    """

    TAIL = 25  # bytes before it: a header of one parameter

    def __init__(self, elements: int, device: str, kernels: Any) -> None:
        """`kernels` has what `triton.index_packing` has."""
        random = np.random.default_rng(2)
        places = np.flatnonzero(random.random(elements) < 0.01).astype(np.uint32)
        values = random.standard_normal(places.size).astype(np.float32)
        stream = np.empty(_core.pack_indices_bound(places.size, elements), np.uint8)
        stream = stream[: _core.pack_indices(places, elements, stream)]
        words = np.array([places.size, stream.size], np.uint32).view(np.uint8)
        room = kernels.tail_bound(places.size, elements, torch.float32)
        self._message = np.zeros(self.TAIL + room, np.uint8)
        tail = np.concatenate([words, stream, values.view(np.uint8)])
        self._message[self.TAIL : self.TAIL + tail.size] = tail
        self._out, found = torch.empty(elements), nothing_found()
        _core.sparse_scatter(
            *(table_of(self._out), places, values, RANKS, found, np.zeros(1, np.uint8))
        )
        self._places = torch.from_numpy(places.view(np.int32)).to(device)
        self._values = torch.from_numpy(values).to(device)
        self._given = torch.from_numpy(self._message).to(device, copy=True)
        self.message = torch.zeros_like(self._given)
        self.out = torch.empty(elements, device=device)
        self._packed = np.array([[0, places.size, elements, self.TAIL]])
        self._came = np.array([[0, self.TAIL, room, elements, places.size, 0]])
        self._table = table_of(self.out)
        self._found = nothing_found().to(device)
        self._tables = kernels.Tables(self.out.device)
        self._tail = tail.size

    @property
    def packed(self) -> int:
        """Bytes that must be read and written to make the tail."""
        return self._tail + 8 * len(self._places)

    @property
    def averaged(self) -> int:
        """Bytes that must be read and written to average it."""
        return self._tail + self.out.nbytes

    def pack(self, kernels: Any) -> None:
        """Call `pycollective.triton.index_packing`, or what stands for it."""
        given = self._places, self._values, self._packed, None
        kernels.pack(*given, self.message, self._found, self._tables)

    def average(self, kernels: Any) -> None:
        """Call `pycollective.triton.sparse_sums`, or what stands for it."""
        given = self._given, self._came, torch.float32, self._table, RANKS
        kernels.average(*given, self._found, self._tables)

    def wrong(self) -> int:
        """Bytes that are not the CPU's, and what is found."""
        return (
            wrong_bytes(self.message, self._message)
            + wrong_bytes(self.out, self._out)
            + int(self._found.any())
        )


def beside_copy(
    moved: int, call: Callable[[], object], **others: Callable[[], object]
) -> dict[str, Any]:
    """How long a call takes, a copy of as many bytes, and the others."""
    half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    took = microseconds({"us": call, "copy_us": lambda: other.copy_(half), **others})
    return {**took, "share_of_copy": round(took["copy_us"] / took["us"], 3), "bytes": moved}


def measured(elements: int) -> dict[str, Any]:
    """All cases."""
    from pycollective.triton import index_packing, sparse_sums, top_k

    found = {}
    for name, chunk in (("by chunk", CHUNK), ("by tensor", 0)):
        problem = Selecting(chunk, elements, "cuda", top_k)
        others = {} if chunk else {"torch_us": problem.run_torch}
        # Torch's residual is not ours: its turn comes last, and ours once more.
        row = beside_copy(problem.moved, lambda at=problem: at.run(top_k), **others)
        problem.run(top_k)
        if others:
            row["torch_over_ours"] = round(row["torch_us"] / row["us"], 2)
        found[name] = {**row, "wrong": problem.wrong()}
    exchange = Exchanging(elements, "cuda", index_packing)
    found["pack"] = beside_copy(exchange.packed, partial(exchange.pack, index_packing))
    found["average"] = beside_copy(exchange.averaged, partial(exchange.average, sparse_sums))
    found["average"]["wrong"] = exchange.wrong()
    return found


def main() -> None:
    """Measure all cases; status 1 where a byte is wrong."""
    elements = (int(sys.argv[1] if len(sys.argv) > 1 else 256) << 18) + 3
    found = measured(elements)
    print(json.dumps(found))
    sys.exit(any(each.get("wrong", 0) for each in found.values()))


if __name__ == "__main__":
    main()
