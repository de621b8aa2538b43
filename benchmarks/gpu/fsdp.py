"""FSDP2 on a GPU over NCCL ends with the weights that CPUs over Gloo give: two ranks on one GPU.

Usage: python -m benchmarks.gpu.fsdp [STEPS] [--cpu]

Gradients are given, the same on both, so all that differs is who reduces them:
`ordered.ReduceScatter`. Where they are exactly bf16 on all ranks they travel as bf16. In the case
of fp32 one element of one rank's is not in one step, and all travel as fp32. Prints a line of JSON:
of each case the digests of the weights, and the median milliseconds of a step (`own` is torch's
reduce-scatter, which promises nothing). If NCCL refuses, its words are the result. ``--cpu`` has
CPU tensors and Gloo for both. Status 1 where weights differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.two_ranks import RANKS, of_two_ranks
from pycollective.torch import ordered

SHAPES = ((1001, 64), (1,), (700, 333), (1, 5), (129, 1024), (3,))  # of each of two layers
STEPS, ODD_STEP = 8, 3
# The type of parameters and gradients; reductions are in fp32.
CASES = {
    "own, bf16": (torch.bfloat16, None),
    "ordered, bf16": (torch.bfloat16, ordered.ReduceScatter),
    "ordered, fp32": (torch.float32, ordered.ReduceScatter),
}


class Given(torch.autograd.Function):
    """A parameter's gradient is what it is given, whatever comes back."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return parameter.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class Layer(torch.nn.Module):
    """Parameters whose gradients are its input."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(s)) for s in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum(Given.apply(p, g) for p, g in zip(self.all, gradients, strict=True))


def train(device: torch.device, dtype: torch.dtype, made: Any, steps: int) -> tuple[str, float]:
    """The weights' digest after some steps, and the median milliseconds of a step."""
    mesh = init_device_mesh(device.type, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [Layer().to(device) for _ in range(2)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        if made is not None:
            layer.set_custom_reduce_scatter(made())
    parameters = [each for layer in layers for each in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=2.0**-4)  # exact times a gradient
    random = torch.Generator().manual_seed(dist.get_rank())
    times = []
    for step in range(steps):
        drawn = [[torch.randn(s, generator=random).bfloat16() for s in SHAPES] for _ in layers]
        given = [[each.to(dtype) for each in of] for of in drawn]
        if step == ODD_STEP and dist.get_rank() == 1:
            given[0][2][5, 7] = 1 + 2.0**-12  # which bf16 has not, and which the weight shows
        given = [[each.to(device) for each in of] for of in given]
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        sum(layer(of) for layer, of in zip(layers, given, strict=True)).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    weights = torch.cat([each.detach().full_tensor().flatten().cpu() for each in parameters])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    return digest, round(statistics.median(times), 3)


def on_a_rank(steps: int, device: torch.device) -> dict[str, Any]:
    """Train in each case on both."""
    found: dict[str, Any] = {}
    for name, (dtype, made) in CASES.items():
        row: dict[str, Any] = {}
        try:
            row["digest"], row["ms"] = train(device, dtype, made, steps)
            row["cpu_digest"], row["cpu_ms"] = train(torch.device("cpu"), dtype, made, steps)
        except Exception as error:  # ranks may stand at different collectives: no more of them
            traceback.print_exc()
            return {**found, name: {"refused": str(error)[:200]}}
        digests: list[str] = [""] * RANKS
        dist.all_gather_object(digests, row["digest"])
        row["digest"] = " and ".join(sorted({*digests}))
        found[name] = row
    return found


def main() -> None:
    """Start the ranks; print what rank 0 found, or what NCCL says."""
    os.environ["PYCOLLECTIVE_TOPOLOGY"] = "2x1"
    found = of_two_ranks("benchmarks.gpu.fsdp", on_a_rank, STEPS)
    if found is None:
        return
    print(json.dumps(found))
    if "refused" not in found:
        held = [row for name, row in found.items() if not name.startswith("own")]
        sys.exit(any("refused" in r or r["digest"] != r["cpu_digest"] for r in held))


if __name__ == "__main__":
    main()
