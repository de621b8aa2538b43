"""What does it take to add up micro-batches in the contract's order, beside `e += g`?

16 leaves, an aligned run in sequence, each a gradient of its own; one thread. Time a leaf, of the
whole sequence: where gradients are copied, where they are donated (fp32 is then kept as it is), and
beside them, in the same rounds, in-place additions of as many gradients to one array of fp32:
NumPy's of fp32, twice (how far these two are apart is what the machine adds), torch's of fp32 and
of bf16. Arrays are NumPy's, or torch's for the same memory, so that all have the same pages.

A time is the thread's time on a core; a figure the median of the rounds' ratios to NumPy's two
additions of the same round. Each sum is compared with the reference.

Usage: python -m benchmarks.accumulator [--out DIR] [--rounds N]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.driver import Benchmark, Record, Run
from pycollective import Accumulator, reference
from pycollective.dtypes import numpy_type
from pycollective.testing.inputs import leaves

LEAVES = 16
COUNTS = [1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
BEYOND_CACHE = 1 << 22  # elements: 16 MiB a row
# Beyond cache each is to take no longer than an addition of the same elements.
PEERS = {
    "fp32": "torch, e += g of fp32",
    "fp32, donated": "torch, e += g of fp32",
    "bf16": "torch, e += g of bf16",
}
Gradients = list[NDArray[Any]]


def accumulation(gradients: Gradients, donate: bool) -> Callable[[], None]:
    """A sequence, after one whose sum was compared with the reference."""
    accumulator = Accumulator(gradients[0].shape, leaves=LEAVES)

    def run() -> None:
        accumulator.reset()
        for leaf, gradient in enumerate(gradients):
            accumulator.add(leaf, gradient, donate)

    run()
    for begin in range(0, len(gradients[0]), BEYOND_CACHE):
        part = slice(begin, begin + BEYOND_CACHE)
        want = reference.reduce([each[part] for each in gradients], dtype=np.float32)
        if accumulator.rows()[0][part].tobytes() != want.tobytes():
            raise AssertionError("the sum is not the reference's")
    return run


def additions(gradients: list[Any], into: Any, add: Callable[[Any, Any], object]) -> Any:
    """A sequence of in-place additions."""

    def run() -> None:
        for gradient in gradients:
            add(into, gradient)

    return run


def as_torch(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of the same memory."""
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def ratios(count: int, rounds: int) -> Record:
    """Microseconds of `e += g`, and the ratios of all others to it."""
    narrow = numpy_type("bfloat16")
    wide = leaves("bfloat16", "sum", LEAVES, min(count, 1 << 20), count)
    fp32 = [np.resize(each.astype(np.float32), count) for each in wide]
    bf16 = [each.astype(narrow) for each in fp32]
    e = np.zeros(count, np.float32)

    def numpy_add(into: NDArray[Any], gradient: NDArray[Any]) -> None:
        np.add(into, gradient, out=into)

    calls = {
        "e += g": additions(fp32, e, numpy_add),
        "fp32": accumulation(fp32, donate=False),
        "fp32, donated": accumulation(fp32, donate=True),
        "bf16": accumulation(bf16, donate=False),
        "torch, e += g of fp32": additions(
            [*map(as_torch, fp32)], torch.from_numpy(e), torch.Tensor.add_
        ),
        "torch, e += g of bf16": additions(
            [*map(as_torch, bf16)], torch.from_numpy(e), torch.Tensor.add_
        ),
        "e += g, again": additions(fp32, e, numpy_add),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, (1 << 19) // count)
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # warm
            start = time.thread_time()
            for _ in range(repeats):
                call()
            times[name].append((time.thread_time() - start) / repeats / LEAVES)
            e[:] = 0
    both = zip(times["e += g"], times["e += g, again"], strict=True)
    base = [(first + second) / 2 for first, second in both]
    of_base = {
        name: statistics.median(t / b for t, b in zip(taken, base, strict=True))
        for name, taken in times.items()
    }
    return {"elements": count, "e += g, us": 1e6 * statistics.median(base), "ratios": of_base}


def measure(run: Run) -> Record:
    """Each size."""
    torch.set_num_threads(1)
    load, sizes = os.getloadavg(), []
    for count in COUNTS:
        size = ratios(count, run.rounds)
        sizes.append(size)
        print(f"{count} elements, e += g: {size['e += g, us']:.1f} us a leaf")
        for name, ratio in size["ratios"].items():
            verdict = ""
            if count >= BEYOND_CACHE and (peer := PEERS.get(name)):
                most = size["ratios"][peer]
                verdict = f"  {'met' if ratio <= most else 'MISSED'}: {most:.3f}, {peer}"
            print(f"{ratio:8.3f}  {name}{verdict}")
    return {"load average": load, "leaves": LEAVES, "sizes": sizes}


if __name__ == "__main__":
    Benchmark("accumulator", __doc__, measure, rounds=7).main()
