"""What the contract's bits cost over NCCL, beside NCCL's own all-reduce: two ranks on one GPU.

Usage: python -m benchmarks.gpu.ordered [MIB] [--cpu]

NCCL lets ranks share a GPU with NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30). Their kernels take turns, so
these are no times of a GPU of one's own. Tensors of MIB MiB (default 64), and of 1 MiB. The last
result of `pycollective.torch.ordered` is compared with the oracle. NCCL promises nothing: of its
own it is counted how many elements differ. If NCCL refuses, its words are the result.
``--cpu`` shows over Gloo that the program works. Prints lines of JSON, the last of which counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from pycollective import reference
from pycollective.dtypes import numpy_type
from pycollective.testing.inputs import portable_leaves

RANKS, ROUNDS, WARMUP, DIFFERENT = 2, 12, 3, 1 << 16
TIMEOUT = 100.0  # seconds
_WIDTH = 200  # of what NCCL says


def on_a_rank(mib: int, device_type: str, port: int) -> dict[str, Any]:
    """Time both, for each type and size; the slower rank's medians."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from pycollective.torch import ordered

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, wait_for_workers=False)
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )

    def microseconds(call: Any, x: torch.Tensor, mine: torch.Tensor) -> float:
        times = []
        for i in range(-WARMUP, ROUNDS):
            x.copy_(mine)
            dist.barrier()
            start = time.perf_counter()
            call(x)
            if device_type == "cuda":
                torch.cuda.synchronize()
            took = torch.tensor([time.perf_counter() - start], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 0:
                times.append(took.item() * 1e6)
        return statistics.median(times)

    measured: dict[str, Any] = {"backend": backend}
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
    dist.destroy_process_group()
    return measured


def main() -> None:
    """Start the ranks; print what rank 0 measured, or what NCCL says."""
    if "RANK" in os.environ and "--rank" in sys.argv:
        mib, device_type, port = sys.argv[2:5]
        measured = on_a_rank(int(mib), device_type, int(port))
        if os.environ["RANK"] == "0":
            print(json.dumps(measured), flush=True)
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [each for each in sys.argv[1:] if each != "--cpu"]
    device_type = "cpu" if "--cpu" in sys.argv else "cuda"
    command = [sys.executable, "-m", "benchmarks.gpu.ordered", "--rank"]
    command += [arguments[0] if arguments else "64", device_type, str(port)]
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if any(each.returncode for each in ranks):
        lines = [line for _, err in said for line in err.splitlines() if "rror" in line]
        print(json.dumps({"refused": (lines or ["no words"])[-1][:_WIDTH]}))
        return
    print(said[0][0].strip())


if __name__ == "__main__":
    main()
