"""How fast Triton kernels select, pack and decode, beside a copy on the device and torch.topk.

Usage: python -m benchmarks.gpu.sparse [MIB]

Gradients have MIB MiB of fp32 (default 256), and a few elements; residuals are added, and a
hundredth is taken. The copy moves as many bytes as a case must: it reads half and writes half.
Torch selects a tensor's by its own operations, with the residual, in fewer promises: of equal
elements it may take any. All are timed by events, in turns. Every place, value and residual, each
byte of tails and each element that is decoded is compared with the CPU's kernels. Prints a line of
JSON: microseconds, and how many times as long the copy and torch take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
        random = np.random.default_rng(1)
        x, held = (random.standard_normal(elements, np.float32) for _ in range(2))
        self._chunk, self._k = chunk, round((chunk or elements) / 100)
        self._left = np.empty(elements, np.float32)
        given, places = (x, held, self._left, self._k), np.empty(elements, np.uint32)
        most = _core.top_k_chunks(*given, chunk, places) if chunk else _core.top_k(*given, places)
        self._places, self._values = places[:most], np.empty(most, np.float32)
        _core.sparse_take(self._left, self._places, self._values)
        self.x, self.held = (torch.from_numpy(each).to(device) for each in (x, held))
        self.left = torch.empty_like(self.x)
        self.places = torch.empty(most, dtype=torch.int32, device=device)
        self.values = torch.empty(most, device=device)
        self._messages = torch.empty(0, dtype=torch.uint8, device=device)
        self._found = torch.zeros(segments.NONZERO + 1, dtype=torch.int32, device=device)
        self._table = np.zeros((1, segments.COLUMNS), np.int64)
        self._table[0, [segments.ADDRESS, segments.HELD, segments.LEFT]] = [
            each.data_ptr() for each in (self.x, self.held, self.left)
        ]
        self._table[0, [segments.COUNT, segments.K]] = elements, self._k
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
    """Entries on a device, the tail of a message about them, and what it decodes to.

    Attributes:
        tail: that is written.
        out: the dense tensor.
    """

    def __init__(self, elements: int, device: str, kernels: Any) -> None:
        """`kernels` has what `triton.index_packing` has."""
        random = np.random.default_rng(2)
        places = np.flatnonzero(random.random(elements) < 0.01).astype(np.uint32)
        values = random.standard_normal(places.size).astype(np.float32)
        stream = np.empty(_core.pack_indices_bound(places.size, elements), np.uint8)
        stream = stream[: _core.pack_indices(places, elements, stream)]
        head = np.array([places.size, stream.size], np.uint32).view(np.uint8)
        self._tail = np.concatenate([head, stream, values.view(np.uint8)])
        self._out = np.empty(elements, np.float32)
        _core.sparse_scatter(places, values, self._out, RANKS)
        self._entries = kernels.Entries(
            torch.from_numpy(places.view(np.int32)).to(device),
            torch.from_numpy(values).to(device),
            torch.full((1,), places.size, dtype=torch.int64, device=device),
        )
        room = kernels.tail_bound(places.size, elements, torch.float32)
        self.tail = torch.zeros(room, dtype=torch.uint8, device=device)
        self._given = self.tail.clone()
        self._given[: self._tail.size] = torch.from_numpy(self._tail).to(device)
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._whole = torch.full_like(self._length, self._tail.size)
        self.out = torch.empty(elements, device=device)
        self._bad = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def written(self) -> int:
        """Bytes that must be read and written to make the tail."""
        return self._tail.size + 8 * len(self._entries.places)

    @property
    def decoded(self) -> int:
        """Bytes that must be read and written to decode it."""
        return self._tail.size + self.out.nbytes

    def write(self, kernels: Any) -> None:
        """Call `pycollective.triton.index_packing`, or what stands for it."""
        kernels.write(self._entries, len(self.out), self.tail, self._length)

    def decode(self, kernels: Any) -> None:
        """Call `pycollective.triton.index_packing`, or what stands for it."""
        given = self._given, self._whole, len(self._entries.places), torch.float32
        kernels.decode(*given, self.out, RANKS, self._bad)

    def wrong(self) -> int:
        """Bytes that are not the CPU's, and the flag where it is set."""
        return (
            wrong_bytes(self.tail[: int(self._length)], self._tail)
            + wrong_bytes(self.out, self._out)
            + int(self._bad)
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
    from pycollective.triton import index_packing, top_k

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
    for name, moved, call in (
        ("write", exchange.written, exchange.write),
        ("decode", exchange.decoded, exchange.decode),
    ):
        found[name] = beside_copy(moved, lambda call=call: call(index_packing))
    found["decode"]["wrong"] = exchange.wrong()
    return found


def main() -> None:
    """Measure all cases; status 1 where a byte is wrong."""
    elements = (int(sys.argv[1] if len(sys.argv) > 1 else 256) << 18) + 3
    found = measured(elements)
    print(json.dumps(found))
    sys.exit(any(each.get("wrong", 0) for each in found.values()))


if __name__ == "__main__":
    main()
