"""What the contract's bits cost the host and the whole over NCCL: two ranks on one GPU.

Usage: python -m benchmarks.gpu.price [MIB] [--cpu]

Two tables, each timed in turns within one run; the slower rank's medians, in microseconds. `host`
is until the call has returned and its work was waited for, which on a GPU makes a stream wait and
not the host; `whole` is until the GPU is idle.

- calls: `ordered.all_reduce` beside the bare exchange of as many bytes, one all_to_all_single and
  one all_gather_into_tensor. 1 element, 2 MiB, MIB MiB (default 64), and a count that the ranks do
  not divide. `copy_us` is one pass of these bytes at the speed of the GPU's memory.
- DDP: forward and backward of 48 parameters (3.2 M elements, buckets of 4 MB), by DDP's own
  all-reduce, by `ordered.hook` and by each state of compression.

The ranks are two hosts to NCCL (two_ranks.py): messages go over sockets, and kernels take turns.
Every element of a call's last result is compared with the oracle; of DDP, the ranks' last gradients
with each other (ddp.py compares their bits). ``--cpu`` shows over Gloo that the program works.
Prints a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from benchmarks.gpu.reduce import microseconds
from benchmarks.gpu.two_ranks import RANKS, of_two_ranks
from pycollective import reference
from pycollective.dtypes import numpy_type
from pycollective.testing.inputs import portable_leaves
from pycollective.torch import ordered

ROUNDS, WARMUP, DIFFERENT = 15, 3, 1 << 16


class Case(NamedTuple):
    """What is reduced."""

    name: str
    dtype: str
    count: int


def cases(mib: int) -> list[Case]:
    """All of `calls`."""

    def of(dtype: str, size: int, more: int = 0) -> Case:
        also = " and an element" if more else ""
        count = (size << 20) // numpy_type(dtype).itemsize + more
        return Case(f"{size} MiB{also} of {dtype}", dtype, count)

    return [
        Case("1 element of float32", "float32", 1),
        of("bfloat16", 2),
        *(of(dtype, mib) for dtype in ("bfloat16", "float16", "float32")),
        of("bfloat16", mib, 1),
    ]


def in_turns(
    calls: dict[str, Callable[[], object]],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Each call's `_host_us` and `_whole_us`; `before` is called before each, untimed."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {}
    for turn in range(-WARMUP, ROUNDS):
        for name, call in calls.items():
            before()
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            call()
            host = time.perf_counter() - start
            synchronize()
            if turn >= 0:
                times.setdefault(f"{name}_host_us", []).append(1e6 * host)
                times.setdefault(f"{name}_whole_us", []).append(1e6 * (time.perf_counter() - start))
    mine = {name: statistics.median(each) for name, each in times.items()}
    ranks: list[dict[str, float]] = [{}] * RANKS
    dist.all_gather_object(ranks, mine)
    return {name: round(max(each[name] for each in ranks), 1) for name in mine}


def call_row(case: Case, device: torch.device) -> dict[str, Any]:
    """Ours, the bare exchange, and a copy."""
    kind = numpy_type(case.dtype)
    leaves = portable_leaves(case.dtype, "sum", RANKS, DIFFERENT)
    words = f"u{kind.itemsize}"
    bits = np.resize(leaves[dist.get_rank()].view(words), case.count)
    answer = np.resize(reference.reduce(leaves).view(words), case.count)
    mine = torch.from_numpy(bits.view(f"i{kind.itemsize}")).view(getattr(torch, case.dtype))
    mine = mine.to(device)
    x = torch.empty_like(mine)
    part = -(-case.count // RANKS) * kind.itemsize
    sent = torch.zeros(RANKS * part, dtype=torch.uint8, device=device)
    got, results = torch.empty_like(sent), torch.empty_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(got, sent)
        dist.all_gather_into_tensor(results, got[:part])

    calls = {"bare": exchange, "ordered": lambda: ordered.all_reduce(x)}
    row = in_turns(calls, device, lambda: x.copy_(mine))
    found = x.cpu().view(getattr(torch, f"int{8 * kind.itemsize}")).numpy().view(words)
    row |= {"bytes": x.nbytes, "wrong": int((found != answer).sum())}
    if device.type == "cuda":
        row["copy_us"] = microseconds({"copy_us": lambda: x.copy_(mine)})["copy_us"]
    return row


def ways() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """What makes DDP average its gradients: a state, a hook, and the state's options."""
    by_chunk = {"density": 0.01, "by": "chunk", "chunk": 512}
    return {
        "own": (None, None, {}),
        "ordered": (None, ordered.hook, {}),
        "1 bit": (pct.OneBitState, pct.one_bit_hook, {}),
        "8 bits": (pct.Int8State, pct.int8_hook, {}),
        "top-k by tensor": (pct.TopKState, pct.top_k_hook, {"density": 0.01}),
        "top-k by chunk": (pct.TopKState, pct.top_k_hook, by_chunk),
    }


def ddp_rows(device: torch.device) -> dict[str, Any]:
    """Forward and backward, in each way."""
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(64, 256, generator=random).to(device)
    models: dict[str, DistributedDataParallel] = {}
    for name, (state, hook, options) in ways().items():
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(12):
            layers += [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
        ddp = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=4)
        if hook is not None:
            made = state(ddp, between="ranks", **options) if state is not None else None
            ddp.register_comm_hook(made, hook)
        models[name] = ddp

    def step(ddp: DistributedDataParallel) -> None:
        ddp.zero_grad()
        ddp(x).square().mean().backward()

    took = in_turns({name: lambda at=ddp: step(at) for name, ddp in models.items()}, device)
    rows = {}
    for name, ddp in models.items():
        gradients = torch.cat([each.grad.flatten() for each in ddp.parameters()])
        digest = hashlib.sha256(gradients.cpu().numpy().tobytes()).hexdigest()
        digests = [""] * RANKS
        dist.all_gather_object(digests, digest)
        rows[name] = {
            "host_us": took[f"{name}_host_us"],
            "whole_us": took[f"{name}_whole_us"],
            "alike": len({*digests}) == 1 and bool(torch.isfinite(gradients).all()),
        }
    return rows


def on_a_rank(mib: int, device: torch.device) -> dict[str, Any]:
    """Both tables."""
    ordered.prepare(device=device)
    found: dict[str, Any] = {case.name: call_row(case, device) for case in cases(mib)}
    try:
        ddp = ddp_rows(device)
    except Exception as error:  # the calls' times stay
        traceback.print_exc()
        ddp = {"refused": str(error)[:200]}
    return {"backend": "nccl" if device.type == "cuda" else "gloo", "calls": found, "DDP": ddp}


def main() -> None:
    """Start the ranks; print what they measured, or what NCCL says."""
    found = of_two_ranks("benchmarks.gpu.price", on_a_rank, 64)
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
