"""How long a small all-reduce takes by PyTorch's symmetric memory, and by this library.

Usage: python -m benchmarks.gpu.symmetric_memory [CALLS]

Two processes share the first GPU. 4 Ki float32, each call with the end of its stream, by the host's
clock, after a barrier: contexts take turns, so it is no latency of a GPU of one's own. Each call
has other numbers, and what it makes of them is compared with the oracle. PyTorch refuses ranks that
share a GPU unless it is told not to (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES); if it still does,
its words are the result. Prints lines of JSON, the last of which counts: medians, in microseconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pycollective as pc
from pycollective import reference
from pycollective.config import ENV_RANK
from pycollective.testing.inputs import leaves

COUNT = 4096  # elements
WARMUP = 5
TIMEOUT = 40.0  # seconds
_WIDTH = 160  # of what PyTorch says


class Numbers:
    """What the ranks have in each call, and what must come of it: no two calls' are alike."""

    def __init__(self, comm: pc.Communicator, torch: Any) -> None:
        inputs = leaves("float32", "sum", comm.size, COUNT, 1)
        self._torch, self._mine, self._sums = torch, inputs[comm.rank], reference.reduce(inputs)

    def put(self, x: Any, call: int) -> None:
        """Those of this rank."""
        x.copy_(self._torch.from_numpy(np.roll(self._mine, call)))

    def check(self, out: Any, call: int) -> None:
        """Raise where a bit is wrong."""
        if out.cpu().numpy().tobytes() != np.roll(self._sums, call).tobytes():
            raise RuntimeError("the sum is wrong")


def microseconds(
    comm: pc.Communicator, calls: int, x: Any, numbers: Numbers, call: Callable[[], Any]
) -> float:
    """The median of so many; `call` adds up `x`, and ends with its stream."""
    times = []
    for i in range(-WARMUP, calls):
        comm.barrier()  # nobody reads the last call's any more
        numbers.put(x, i)
        comm.barrier()
        started = time.perf_counter()
        out = call()
        if i >= 0:
            times.append(1e6 * (time.perf_counter() - started))
        numbers.check(out, i)
    return round(statistics.median(times), 2)


def by_us(comm: pc.Communicator, torch: Any, calls: int) -> float:
    """By kernels; where a sum is wrong, nothing."""
    x = torch.empty(COUNT, device="cuda")
    out = torch.empty_like(x)

    def call() -> Any:
        comm.all_reduce(x, out=out)
        return out

    return microseconds(comm, calls, x, Numbers(comm, torch), call)


def by_torch(comm: pc.Communicator, torch: Any, calls: int, rendezvous: str) -> float:
    """By its one-shot; whatever it says against it is raised."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    store = dist.FileStore(rendezvous, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    x = symmetric.empty(COUNT, dtype=torch.float32, device="cuda:0")
    symmetric.rendezvous(x, dist.group.WORLD)
    name = dist.group.WORLD.group_name

    def call() -> Any:
        out = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)
        torch.cuda.synchronize()
        return out

    return microseconds(comm, calls, x, Numbers(comm, torch), call)


def rank(calls: int, rendezvous: str) -> None:
    """Of the launch."""
    import torch

    torch.cuda.set_device(0)
    comm = pc.init(device="cuda", timeout=TIMEOUT)
    found: dict[str, Any] = {"ours_us": by_us(comm, torch, calls), "torch": "ended the process"}
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    try:
        found["torch_us"] = by_torch(comm, torch, calls, rendezvous)
        found["torch"] = torch.__version__
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        found["torch"] = f"{type(error).__name__}: {' '.join(str(error).split())[:_WIDTH]}"
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # after an error on one rank the other may wait in a kernel for good


def main() -> None:
    """Start the ranks; status 1 where this library's part did not come through."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    if ENV_RANK in os.environ:
        return rank(calls, sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        run = ["pycollective", "run", "--no-tag-output", "-n", "2"]
        command = [sys.executable, "-m", *run, "-m", __spec__.name]
        env = {
            **os.environ,
            "PYCOLLECTIVE_DEVICE_PATH": "peer",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        done = subprocess.run(
            [*command, str(calls), str(Path(folder) / "store")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
    print(done.stdout, end="")
    if '"ours_us"' not in done.stdout:
        sys.exit(done.returncode or 1)


if __name__ == "__main__":
    main()
