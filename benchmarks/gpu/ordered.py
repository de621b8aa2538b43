"""What the contract's bits cost over NCCL, beside NCCL's own all-reduce: two ranks on one GPU.

Usage: python -m benchmarks.gpu.ordered [MIB] [--cpu]

They are two hosts to NCCL (two_ranks.py): messages go over sockets, and kernels take turns, so
these are no times of a GPU of one's own. Tensors of MIB MiB (default 64), and of 1 MiB. The last
result of `pycollective.torch.ordered` is compared with the oracle. NCCL promises nothing: of its
own it is counted how many elements differ. If NCCL refuses, its words are the result.
``--cpu`` shows over Gloo that the program works. Prints lines of JSON, the last of which counts.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.two_ranks import RANKS, of_two_ranks
from pycollective import reference
from pycollective.dtypes import numpy_type
from pycollective.testing.inputs import portable_leaves
from pycollective.torch import ordered

ROUNDS, WARMUP, DIFFERENT = 12, 3, 1 << 16


def on_a_rank(mib: int, device: torch.device) -> dict[str, Any]:
    """Time both, for each type and size; the slower rank's medians."""
    rank = dist.get_rank()

    def microseconds(call: Any, x: torch.Tensor, mine: torch.Tensor) -> float:
        times = []
        for i in range(-WARMUP, ROUNDS):
            x.copy_(mine)
            dist.barrier()
            start = time.perf_counter()
            call(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = torch.tensor([time.perf_counter() - start], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 0:
                times.append(took.item() * 1e6)
        return statistics.median(times)

    measured: dict[str, Any] = {"backend": "nccl" if device.type == "cuda" else "gloo"}
    for dtype in ("bfloat16", "float16", "float32"):
        kind = numpy_type(dtype)
        leaves = portable_leaves(dtype, "sum", RANKS, DIFFERENT)
        words = f"u{kind.itemsize}"
        for size in (1 << 20, mib << 20):
            count = size // kind.itemsize + 1  # an odd one
            bits = np.resize(leaves[rank].view(words), count)
            answer = np.resize(reference.reduce(leaves).view(words), count)
            torchs = torch.from_numpy(bits.view(f"i{kind.itemsize}"))
            mine = torchs.view(getattr(torch, dtype)).to(device)
            x = torch.empty_like(mine)
            row: dict[str, Any] = {}
            for name, call in (("ordered", ordered.all_reduce), ("own", dist.all_reduce)):
                row[f"{name}_us"] = microseconds(call, x, mine)
                found = x.cpu().view(getattr(torch, f"int{8 * kind.itemsize}")).numpy().view(words)
                row["wrong" if name == "ordered" else "own_differ"] = int((found != answer).sum())
            measured[f"{dtype} {size >> 20} MiB"] = row
    return measured


def main() -> None:
    """Start the ranks; print what rank 0 measured, or what NCCL says."""
    found = of_two_ranks("benchmarks.gpu.ordered", on_a_rank, 64)
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
