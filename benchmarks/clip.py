"""What does clipping take, beside `torch.nn.utils.clip_grad_norm_`?

The gradients of a byte-level GPT of 25 M parameters, in one process, with one thread and with as
many as there are cores. Both clip copies of the same gradients, in turns: once by a norm that is
always above `max_norm`, and once by one that never is. The norm is compared with the reference
before anything is timed, and must be torch's up to rounding. A figure is the median of the rounds'
milliseconds, a ratio the median of the rounds' ratios. The goal is 1.

Usage: python -m benchmarks.clip [--out DIR] [--rounds N]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.gradients import Gpt, Size
from pycollective import reference
from pycollective.torch import ordered

SIZE = Size(width=512, heads=8, layers=8, context=512)
Clip = Callable[[list[torch.Tensor], float], torch.Tensor]


def parameters_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """With gradients of many sizes."""
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    for each in Gpt(SIZE).parameters():
        parameter = torch.nn.Parameter(torch.empty_like(each, dtype=dtype))
        sizes = torch.randn_like(each).mul_(2).exp_()
        parameter.grad = torch.randn_like(each).mul_(sizes).mul_(1e-4).to(dtype)
        found.append(parameter)
    return found


def check(parameters: list[torch.Tensor]) -> None:
    """Raise if the norm is not what it must be."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = ordered.clip_grad_norm_(parameters, 1e9).item()
    if norm != reference.norm([each.double().numpy() for each in gradients]):
        raise AssertionError("the norm is not the reference's")
    theirs = torch.nn.utils.get_total_norm(gradients).item()
    if abs(theirs - norm) > 0.02 * norm:
        raise AssertionError(f"the norm is {norm}, and torch's {theirs}")


def times_of(dtype: torch.dtype, clips: bool, rounds: int) -> Record:
    """Milliseconds of both."""
    calls: dict[str, Clip] = {
        "torch": torch.nn.utils.clip_grad_norm_,
        "pycollective": ordered.clip_grad_norm_,
    }
    of_each = {name: parameters_of(dtype) for name in calls}
    check(of_each["pycollective"])
    times: dict[str, list[float]] = {name: [] for name in calls}
    limits = {name: calls[name](of_each[name], 1e9).item() for name in calls}
    for _ in range(rounds):
        for name, clip in calls.items():
            limits[name] *= 0.99 if clips else 1
            start = time.perf_counter()
            clip(of_each[name], limits[name] if clips else 1e9)
            times[name].append(1e3 * (time.perf_counter() - start))
    both = zip(times["pycollective"], times["torch"], strict=True)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clips": clips,
        "ms": {name: statistics.median(each) for name, each in times.items()},
        "ratio": statistics.median(ours / theirs for ours, theirs in both),
    }


def measure(run: Run) -> Record:
    """Each type, with one thread and with all."""
    load, rows = os.getloadavg(), []
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for clips in (True, False):
                row = times_of(dtype, clips, run.rounds)
                rows.append(row)
                print(
                    f"{row['dtype']}, {threads} thread(s), {'clips' if clips else 'does not clip'}:"
                    f" {row['ms']['pycollective']:.2f} ms, torch {row['ms']['torch']:.2f}: "
                    f"{row['ratio']:.2f}, {'met' if row['ratio'] <= 1 else 'MISSED'}"
                )
    parameters = sum(each.numel() for each in Gpt(SIZE).parameters())
    return {"load average": load, "parameters": parameters, "rows": rows}


if __name__ == "__main__":
    Benchmark("clip", __doc__, measure, rounds=25).main()
