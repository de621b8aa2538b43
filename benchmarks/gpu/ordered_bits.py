"""Are ordered calls on a GPU over NCCL right, bit for bit? Two ranks on one GPU.

Usage: python -m benchmarks.gpu.ordered_bits [MOST] [--cpu]

All-reduces and reduce-scatters of 1 to MOST (default 1 Mi, and an element) elements, a fifth of
which are any bits at all: NaNs, infinities, subnormals. Then lists, strided tensors, inputs that
are freed while their call is under way, two groups on two streams, and ranks that differ in the
operation. All is compared with the oracle. Prints a line of JSON: of each kind of case how many
there were, how many were wrong, and the first of these. If NCCL refuses, its words are the result.
``--cpu`` shows over Gloo that the program works. Status 1 where a case was wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.gpu.two_ranks import RANKS, of_two_ranks
from pycollective import CollectiveMismatch, reference
from pycollective.testing.inputs import portable_leaves
from pycollective.torch import ordered

# Each is a kernel that is compiled, which takes a second or two.
TYPES = {
    "bfloat16": ("sum", "avg", "prod", "min", "max"),
    "float32": ("sum", "avg"),
    **dict.fromkeys(("float16", "float64", "float8_e4m3fn", "float8_e5m2"), ("avg",)),
    **dict.fromkeys(("int32", "uint8"), ("sum",)),
}
COUNTS = (1, 3, 1000, 4099, 100_003)  # and MOST and one
DIFFERENT = 16_381  # a prime, so that no piece of an array is the same as one


class Inputs:
    """What the ranks have of a type, and what must come of it.

    Attributes:
        result: the oracle's, of the first elements; then it repeats itself.
    """

    def __init__(self, dtype: str, op: str, device: torch.device) -> None:
        self._dtype, self._device = getattr(torch, dtype), device
        self._leaves = portable_leaves(dtype, op, RANKS, DIFFERENT)
        self.result = reference.reduce(self._leaves, op)

    def mine(self, count: int) -> torch.Tensor:
        """This rank's: so many elements."""
        repeated = self._repeated(self._leaves[dist.get_rank()], count)
        signed = repeated.view(f"i{repeated.itemsize}")
        return torch.from_numpy(signed).view(self._dtype).to(self._device)

    def wrong(self, found: torch.Tensor, count: int, start: int = 0) -> bool:
        """Whether a bit of these is not the result's of `count` elements, from `start` on."""
        wanted = self._repeated(self.result, count)[start : start + found.numel()]
        got = found.contiguous().view(getattr(torch, f"int{8 * found.itemsize}"))
        return bool((got.cpu().numpy().view(wanted.dtype) != wanted).any())

    @staticmethod
    def _repeated(array: NDArray[Any], count: int) -> NDArray[Any]:
        return np.resize(array.view(f"u{array.itemsize}"), count)


def plain_cases(most: int, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Each type, operation and count, both calls: its name, and whether it is wrong."""
    for dtype, op in ((dtype, op) for dtype, ops in TYPES.items() for op in ops):
        inputs = Inputs(dtype, op, device)
        for count in (*(each for each in COUNTS if each < most), most + 1):
            x = inputs.mine(count)
            ordered.all_reduce(x, op)
            yield f"all_reduce {op} of {count} {dtype}", inputs.wrong(x, count)
            x = inputs.mine(RANKS * count)
            out = x.new_empty(count)
            ordered.reduce_scatter(out, x, op)
            at = dist.get_rank() * count
            wrong = inputs.wrong(out, RANKS * count, at)
            yield f"reduce_scatter {op} of {count} {dtype}", wrong


def shaped_cases(most: int, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Lists, strided tensors, and inputs that nobody holds any more."""
    bf16, fp32 = (Inputs(dtype, "avg", device) for dtype in ("bfloat16", "float32"))
    some = [bf16.mine(1000), fp32.mine(4099), bf16.mine(3)]
    ordered.all_reduce(some, "avg")
    # Those of one type travel together, and each has its own inputs and results.
    yield (
        "a list",
        any(
            kind.wrong(each, each.numel())
            for kind, each in zip((bf16, fp32, bf16), some, strict=True)
        ),
    )
    strided = torch.zeros(most, 2, device=device)
    strided[:, 0] = fp32.mine(most)
    ordered.all_reduce(strided[:, 0], "avg")
    yield "strided", fp32.wrong(strided[:, 0], most) or bool(strided[:, 1].any())
    outs, works = [], []
    for _ in range(8):
        out = torch.empty(most, device=device)
        works.append(ordered.reduce_scatter(out, fp32.mine(2 * most), "avg", async_op=True))
        outs.append(out)
        torch.full((2 * most,), 7.0, device=device)  # where the input was, if it is freed too soon
    for work in works:
        work.wait()
    at = dist.get_rank() * most
    yield "inputs freed under way", any(fp32.wrong(out, 2 * most, at) for out in outs)


def stream_cases(most: int, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Two groups, each on a stream of its own, ten calls that follow from each other."""
    fp32 = Inputs("float32", "max", device)  # max of max is the same again
    groups = [dist.new_group() for _ in range(2)]
    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream() if on_gpu else None for _ in groups]
    found = [fp32.mine(most) for _ in groups]
    if on_gpu:
        torch.cuda.synchronize()
    for _ in range(10):
        for x, group, stream in zip(found, groups, streams, strict=True):
            with torch.cuda.stream(stream) if on_gpu else nullcontext():
                ordered.all_reduce(x, "max", group)
                x.copy_(x.clone())
    if on_gpu:
        torch.cuda.synchronize()
    yield "two groups on two streams", any(fp32.wrong(x, most) for x in found)


def differing_cases(most: int, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Ranks that differ in the operation: NaN on a GPU, and the mismatch by name, there later."""
    group = dist.new_group()
    x = torch.ones(most, device=device)
    told, poisoned = "", True
    try:
        ordered.all_reduce(x, "avg" if dist.get_rank() == 0 else "max", group)
        poisoned = bool(x.isnan().all())
        ordered.all_reduce(torch.ones(most, device=device), "avg", group)
    except CollectiveMismatch as error:
        told = str(error)
    yield "ranks that differ", not (poisoned and "avg" in told and "max" in told)


KINDS: dict[str, Callable[[int, torch.device], Iterator[tuple[str, bool]]]] = {
    "types, operations and counts": plain_cases,
    "lists, strides, freed inputs": shaped_cases,
    "groups on streams": stream_cases,
    "ranks that differ": differing_cases,
}


def on_a_rank(most: int, device: torch.device) -> dict[str, Any]:
    """All cases; what is wrong on either rank is."""
    found = {}
    for kind, cases in KINDS.items():
        came = list(cases(most, device))
        wrong = [name for name, is_wrong in came if is_wrong]
        ranks: list[list[str]] = [[]] * RANKS
        dist.all_gather_object(ranks, wrong)
        bad = [name for name, _ in came if any(name in each for each in ranks)]
        found[kind] = {"cases": len(came), "wrong": len(bad), "first": bad[0] if bad else ""}
    return found


def main() -> None:
    """Start the ranks; print what was wrong on them, or what NCCL says."""
    found = of_two_ranks("benchmarks.gpu.ordered_bits", on_a_rank, 1 << 20)
    if found is not None:
        print(json.dumps(found))
        sys.exit("refused" not in found and any(row["wrong"] for row in found.values()))


if __name__ == "__main__":
    main()
