"""LeafSync on a GPU: one digest of the weights with 1, 2 and 3 ranks, and what a step costs.

Usage: python -m benchmarks.gpu.leaves [STEPS] [--cpu]

Ranks share the GPU, and NCCL carries. Each training has 6 leaves a step of a byte-level GPT with
dropout, under autocast in bfloat16, and ends with the digest of its weights. Beside it stand DDP's
digests, whose order follows from the number of ranks. Steps with a leaf a rank, without dropout,
are timed in turns with DDP's with `ordered.hook`. A launch that adds a leaf is timed beside a copy
on the device that moves as many bytes. Prints a line of JSON. If NCCL refuses, its words are the
result. ``--cpu`` has the CPU and Gloo, and times no launch. Status 1 where a digest differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.two_ranks import of_two_ranks
from benchmarks.gradients import Gpt, Size, corpus, loss_of
from pycollective.torch import LeafSync, ordered

LEAVES, ROWS = 6, 4
RANKS = (1, 2, 3)
STEPS = 10
TIMED = 2  # ranks of the trainings that are timed
ADDED = 25 << 20  # bytes of a bucket's gradients, whose launch is timed
Step = Callable[[int], None]


def digest(model: torch.nn.Module) -> str:
    """Of all bits of the weights."""
    weights = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


class Learner:
    """A GPT, and the loss of a leaf of a step."""

    def __init__(self, device: torch.device, dropout: float) -> None:
        torch.manual_seed(0)
        size = Size(width=384, heads=6, layers=4, context=128, dropout=dropout)
        if device.type == "cpu":
            size = Size(width=48, heads=2, layers=2, context=32, dropout=dropout)
        self.model = Gpt(size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._device, self._context = device, size.context
        self._text = torch.from_numpy(corpus().astype(np.int64))

    def loss(self, run: torch.nn.Module, step: int, leaf: int) -> torch.Tensor:
        """Of a micro-batch that follows from both numbers."""
        drawn = torch.Generator().manual_seed(1000 * step + leaf)
        starts = torch.randint(len(self._text) - self._context - 1, (ROWS,), generator=drawn)
        batch = torch.stack([self._text[at : at + self._context + 1] for at in starts.tolist()])
        with torch.autocast(self._device.type, torch.bfloat16):
            return loss_of(run, batch.to(self._device, non_blocking=True))


def by_leaves(device: torch.device, leaves: int, dropout: float) -> tuple[Learner, Step]:
    """What trains under LeafSync."""
    learner = Learner(device, dropout)
    sync = LeafSync(learner.model, leaves)

    def step(number: int) -> None:
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                learner.loss(learner.model, number, leaf).backward()
        sync.finish()
        learner.optimizer.step()

    return learner, step


def by_ddp(device: torch.device, leaves: int, hook: Any, dropout: float) -> tuple[Learner, Step]:
    """What trains under DDP, with the same micro-batches."""
    learner = Learner(device, dropout)
    ddp = DistributedDataParallel(learner.model)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    mine = np.array_split(np.arange(leaves), dist.get_world_size())[dist.get_rank()].tolist()

    def step(number: int) -> None:
        learner.optimizer.zero_grad()
        torch.manual_seed(1000 * number + dist.get_rank())
        for leaf in mine[:-1]:
            with ddp.no_sync():
                (learner.loss(ddp, number, leaf) / len(mine)).backward()
        (learner.loss(ddp, number, mine[-1]) / len(mine)).backward()
        learner.optimizer.step()

    return learner, step


def milliseconds(steps: dict[str, Step], number: int, device: torch.device) -> dict[str, float]:
    """The median of a step each way, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-3, number):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step(turn + 3)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 0:
                times[name].append(1000 * (time.perf_counter() - begin))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def on_a_rank(steps: int, device: torch.device) -> dict[str, Any]:
    """Train; where ranks are as many as are timed, time steps too."""
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    for name, (learner, step) in (
        ("LeafSync", by_leaves(device, LEAVES, 0.1)),
        ("DDP", by_ddp(device, LEAVES, None, 0.1)),
    ):
        for number in range(steps):
            step(number)
        digests = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest(learner.model))
        found[name] = " and ".join(sorted({*digests}))
    if dist.get_world_size() == TIMED:
        ways = {
            "LeafSync": by_leaves(device, TIMED, 0.0)[1],
            "DDP with ordered.hook": by_ddp(device, TIMED, ordered.hook, 0.0)[1],
        }
        found["step_ms"] = milliseconds(ways, steps, device)
    return found


def launch(dtype: torch.dtype, terms: int) -> dict[str, Any]:
    """A launch that adds a leaf of 16 gradients to so many rows, beside a copy of as many bytes."""
    from benchmarks.gpu.reduce import microseconds
    from pycollective.triton.accumulate import Places, accumulate

    device = torch.device("cuda")
    count = ADDED // dtype.itemsize // 16
    gradients = [torch.randn(count, device=device).to(dtype) for _ in range(16)]
    begins = [i * (-(-count // 16) * 16) for i in range(17)]
    places = Places(begins[:-1], [count] * 16, device)
    rows = [torch.randn(begins[-1], device=device) for _ in range(terms + 1)]
    out = rows[0]
    moved = 16 * count * (dtype.itemsize + 4 * (terms + 1))
    half = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    kept = [each.clone() for each in rows]
    accumulate(places, gradients, rows[1:], out)
    wrong = 0
    for gradient, (begin, end) in zip(gradients, pairwise(begins), strict=True):
        value = gradient.float()
        for term in kept[1:]:
            value = value + term[begin : begin + count]
        wrong += int((out[begin:end][:count].view(torch.int32) != value.view(torch.int32)).sum())
    took = microseconds(
        {
            "us": lambda: accumulate(places, gradients, rows[1:], out),
            "copy_us": lambda: other.copy_(half),
        }
    )
    share = round(took["copy_us"] / took["us"], 3)
    return {**took, "share_of_copy": share, "bytes": moved, "wrong": wrong}


def main() -> None:
    """Start the ranks; print what they found, or what NCCL says."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found: dict[str, Any] = {}
    for ranks in RANKS:
        of_ranks = of_two_ranks("benchmarks.gpu.leaves", on_a_rank, STEPS, ranks)
        if of_ranks is None:
            return
        found[f"{ranks} ranks" if ranks > 1 else "1 rank"] = of_ranks
    if "--cpu" not in sys.argv:
        for dtype in (torch.float32, torch.bfloat16):
            for terms in (0, 1, 3):
                found[f"a leaf of {dtype} to {terms} rows"] = launch(dtype, terms)
    print(json.dumps(found))
    digests = {each.get("LeafSync") for each in found.values()} - {None}
    sys.exit(len(digests) > 1 or any(each.get("wrong") for each in found.values()))


if __name__ == "__main__":
    main()
