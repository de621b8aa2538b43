"""DDP on a GPU over NCCL ends with the weights that CPUs over Gloo give: two ranks on one GPU.

Usage: python -m benchmarks.gpu.ddp [STEPS] [--cpu]

Each rank is given the same gradients on the GPU and on the CPU, so all that differs is who averages
them: `pycollective.torch.ordered`, and each state of compression, between two hosts of a rank each.
In one step a rank has an infinity, so all skip it. Prints a line of JSON: of each hook the digests
of the weights, and the median milliseconds of a step (`own` is DDP without a hook). If NCCL
refuses, its words are the result. ``--cpu`` has CPU tensors and Gloo for both. Status 1 where
weights differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from benchmarks.gpu.two_ranks import of_two_ranks
from pycollective.torch import ordered

SHAPES = ((1000, 64), (64,), (700, 333), (1, 5), (129, 1024), (3,))
DTYPES = ("float32", "bfloat16")
STEPS, BAD_STEP = 12, 3


def hooks() -> dict[str, Callable[[DistributedDataParallel], None]]:
    """What makes DDP average its gradients in each way."""

    def of(state: type, hook: Any, **options: Any) -> Any:
        return lambda ddp: ddp.register_comm_hook(state(ddp, **options), hook)

    return {
        "own": lambda ddp: None,
        "ordered": lambda ddp: ddp.register_comm_hook(None, ordered.hook),
        "1 bit": of(pct.OneBitState, pct.one_bit_hook),
        "8 bits": of(pct.Int8State, pct.int8_hook),
        "top-k by tensor": of(pct.TopKState, pct.top_k_hook, density=0.01),
        "top-k by chunk": of(pct.TopKState, pct.top_k_hook, density=0.01, by="chunk", chunk=512),
    }


def train(device: torch.device, dtype: torch.dtype, register: Any, steps: int) -> tuple[str, float]:
    """The weights' digest after some steps, and the median milliseconds of a step."""

    class Given(torch.nn.Module):
        """A model whose gradients are what its input says."""

        def __init__(self) -> None:
            super().__init__()
            self.all = torch.nn.ParameterList(
                torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES
            )

        def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
            return sum((p * g).sum() for p, g in zip(self.all, gradients, strict=True))

    random = torch.Generator().manual_seed(dist.get_rank())
    model = Given().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-4)  # exact times a gradient
    times = []
    for step in range(steps):
        gradients = [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]
        if step == BAD_STEP and dist.get_rank() == 1:
            gradients[2][5, 7] = torch.inf
        there = [each.to(device) for each in gradients]
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(there).backward()
        finite = all(bool(torch.isfinite(each.grad).all()) for each in model.all)
        times.append(1000 * (time.perf_counter() - start))
        if finite != (step != BAD_STEP):
            raise SystemExit(f"step {step}: finite gradients: {finite}")
        if finite:
            optimizer.step()
    weights = torch.cat([each.detach().flatten().cpu() for each in model.all])
    digest = hashlib.sha256(weights.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return digest, round(statistics.median(times), 3)


def on_a_rank(steps: int, device: torch.device) -> dict[str, Any]:
    """Train in each way on both."""
    cpu = torch.device("cpu")
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, register in hooks().items():
            row: dict[str, Any] = {}
            of = getattr(torch, dtype), register, steps
            try:
                row["digest"], row["ms"] = train(device, *of)
                row["cpu_digest"], row["cpu_ms"] = train(cpu, *of)
            except Exception as error:  # ranks may stand at different collectives: no more of them
                traceback.print_exc()
                return {**found, f"{name}, {dtype}": {"refused": str(error)[:200]}}
            digests: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(digests, row["digest"])
            row["digest"] = " and ".join(sorted({*digests}))
            found[f"{name}, {dtype}"] = row
    return found


def main() -> None:
    """Start the ranks; print what rank 0 found, or what NCCL says."""
    os.environ["PYCOLLECTIVE_TOPOLOGY"] = "2x1"
    found = of_two_ranks("benchmarks.gpu.ddp", on_a_rank, STEPS)
    if found is None:
        return
    print(json.dumps(found))
    if "refused" not in found:
        held = [row for name, row in found.items() if not name.startswith("own")]
        sys.exit(any("refused" in r or r["digest"] != r["cpu_digest"] for r in held))


if __name__ == "__main__":
    main()
