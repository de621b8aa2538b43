"""Is the backend pycollective right on a GPU? Two ranks on one GPU, over NCCL.

Usage: python -m benchmarks.gpu.backend [KI] [--cpu]

A group of the backend is made beside the default one. Through it go `torch.distributed`'s
reductions, synchronous and asynchronous, of KI Ki (default 1024) elements and of two; moves;
coalesced calls; objects and barriers; DDP with the hook; FSDP2 without a reduce-scatter of its own;
DTensor; functional collectives, also compiled; ranks that differ in the operation. Reductions are
compared with the oracle. Prints a line of JSON: of each kind of case how many there were, how many
were wrong, and the first of these; and the microseconds of the host for a small all-reduce, of the
backend and of NCCL alone. If NCCL refuses, its words are the result. ``--cpu`` has Gloo in NCCL's
place, and CPU tensors. Status 1 where a case was wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.two_ranks import RANKS, of_two_ranks
from pycollective import CollectiveMismatch, reference
from pycollective.testing.inputs import portable_leaves
from pycollective.torch import backend, ordered
from pycollective.torch.device_side import DeviceSide

Cases = Iterator[tuple[str, bool]]
Group = dist.ProcessGroup
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
# Each is a kernel that is compiled, which takes a second or two; NCCL's own has the integers'.
TYPES = {
    "bfloat16": ("sum", "avg", "max"),
    **dict.fromkeys(("float16", "float32", "float64"), ("avg",)),
    "int64": ("sum",),
}
ROUNDS = 200


class GlooInside(DeviceSide):
    """What serves CPU tensors as those of a device."""

    device_type, backend_type, takes_cpu = "cpu", dist.ProcessGroup.BackendType.GLOO, True


def _with_gloo(options: Any, _: Any) -> Any:
    where = options.store, options.group_rank, options.group_size, options.timeout
    side = GlooInside(*where, options.global_ranks_in_group, dist.ProcessGroupGloo)
    return backend.create(*where, device_side=side)


class Inputs:
    """This rank's elements, and what must come of all ranks'."""

    def __init__(self, dtype: str, op: str, count: int, device: torch.device) -> None:
        leaves = portable_leaves(dtype, op, RANKS, min(count, 16_381))
        self.dtype, self._count, self._device = getattr(torch, dtype), count, device
        self._mine, self._wanted = leaves[dist.get_rank()], reference.reduce(leaves, op)

    def _whole(self, array: Any) -> torch.Tensor:
        words = np.resize(array.view(f"i{array.itemsize}"), self._count)
        return torch.from_numpy(words)

    @property
    def mine(self) -> torch.Tensor:
        """A new tensor each time."""
        return self._whole(self._mine).view(self.dtype).to(self._device)

    def wrong(self, found: torch.Tensor, start: int = 0) -> bool:
        """Whether a bit of these is not the oracle's, from `start` on."""
        wanted = self._whole(self._wanted)[start : start + found.numel()]
        return not torch.equal(found.detach().flatten().cpu().view(wanted.dtype), wanted)


def reductions(group: Group, count: int, device: torch.device) -> Cases:
    """Each call, type and operation."""
    rank = dist.get_rank()
    for dtype, ops in TYPES.items():
        for op, torchs in ((op, OPS[op]) for op in ops):
            for size in (2, count // RANKS * RANKS):
                inputs, name = Inputs(dtype, op, size, device), f"{op} of {size} {dtype}"
                x = inputs.mine
                dist.all_reduce(x, torchs, group=group)
                yield f"all_reduce {name}", inputs.wrong(x)
                x = inputs.mine
                work = dist.all_reduce(x, torchs, group=group, async_op=True)
                work.wait()
                yield f"asynchronous all_reduce {name}", inputs.wrong(x)
                out = x.new_empty(size // RANKS)
                dist.reduce_scatter_tensor(out, inputs.mine, torchs, group=group)
                yield f"reduce_scatter_tensor {name}", inputs.wrong(out, rank * out.numel())
                parts = list(inputs.mine.chunk(RANKS))
                dist.reduce_scatter(out, parts, torchs, group=group)
                yield f"reduce_scatter {name}", inputs.wrong(out, rank * out.numel())
                x = inputs.mine
                dist.reduce(x, 1, torchs, group=group)
                wrong = inputs.wrong(x) if rank == 1 else not same(x, inputs.mine)
                yield f"reduce {name}", wrong and (rank == 1 or dtype != "int64")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def moves(group: Group, count: int, device: torch.device) -> Cases:
    """Each call that only moves, and messages; objects; barriers."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()

    def of(whose: int) -> torch.Tensor:
        return torch.arange(count, device=device, dtype=torch.float32) + 1000 * whose

    x = of(rank)
    dist.broadcast(x, 1, group=group)
    yield "broadcast", not same(x, of(1))
    rows = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(rows, of(rank), group=group)
    yield "all_gather", not all(same(row, of(i)) for i, row in enumerate(rows))
    whole = x.new_empty(RANKS * count)
    dist.all_gather_into_tensor(whole, of(rank), group=group)
    yield "all_gather_into_tensor", not same(whole, torch.cat([of(0), of(1)]))
    out = torch.empty_like(whole)
    dist.all_to_all_single(out, torch.cat([of(rank), of(rank + 7)]), group=group)
    yield "all_to_all_single", not same(out, torch.cat([of(7 * rank), of(7 * rank + 1)]))
    messages = [
        dist.P2POp(dist.isend, of(rank), group=group, group_peer=other),
        dist.P2POp(dist.irecv, x, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    yield "batch_isend_irecv", not same(x, of(other))
    if rank:
        dist.send(of(3), group=group, group_dst=0)
    else:
        dist.recv(x, group=group, group_src=1)
        yield "send, recv", not same(x, of(3))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    yield "all_gather_object", objects != [{"rank": 0}, {"rank": 1}]
    dist.barrier(group=group)
    if device.type == "cuda":
        dist.barrier(group=group, device_ids=[device.index or 0])
    yield "barriers", False


def coalesced(group: Group, count: int, device: torch.device) -> Cases:
    """Calls that go as one."""
    a, b = Inputs("float32", "avg", count, device), Inputs("float32", "avg", 3, device)
    x, y = a.mine, b.mine
    with dist._coalescing_manager(group, async_ops=True) as cm:
        dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
        dist.all_reduce(y, dist.ReduceOp.AVG, group=group)
    cm.wait()
    yield "all_reduce_coalesced", a.wrong(x) or b.wrong(y)
    x, whole = a.mine, y.new_empty(3 * RANKS)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    with dist._coalescing_manager(group, device):
        group.allreduce([x], options)
        group._allgather_base(whole, y)
    yield "a reduction and a move", a.wrong(x) or not same(whole, torch.cat([y, y]))


class Given(torch.autograd.Function):
    """Makes a weight's gradient what it is given."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0].view(-1, 2), None


class Model(torch.nn.Module):
    """One weight."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros_like(like).view(-1, 2))

    def forward(self, gradient: torch.Tensor) -> Any:
        return Given.apply(self.weight, gradient)


def trainings(group: Group, count: int, device: torch.device) -> Cases:
    """DDP with the hook, FSDP2 as it is, DTensor, functional collectives."""
    inputs = Inputs("float32", "avg", count // 4 * 4, device)
    ddp = DistributedDataParallel(Model(inputs.mine), process_group=group)
    ddp.register_comm_hook(group, ordered.hook)
    ddp(inputs.mine).backward()
    yield "DDP with the hook", inputs.wrong(ddp.module.weight.grad)

    mesh = DeviceMesh.from_group(group, device.type)
    model = Model(inputs.mine)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model(inputs.mine).backward()
    yield "FSDP2", inputs.wrong(model.weight.grad.full_tensor())  # type: ignore[union-attr]

    sums = Inputs("float32", "sum", count // 4 * 4, device)
    partial = DTensor.from_local(sums.mine, mesh, [Partial()])
    whole = partial.redistribute(mesh, [Replicate()]).to_local()
    shard = partial.redistribute(mesh, [Shard(0)]).to_local()
    wrong = sums.wrong(whole) or sums.wrong(shard, dist.get_rank() * shard.numel())
    yield "DTensor", wrong

    def average(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "avg", group) * 1.0

    yield "functional all_reduce", inputs.wrong(average(inputs.mine))
    compiled = torch.compile(average, backend="aot_eager")
    yield "compiled all_reduce", inputs.wrong(compiled(inputs.mine))


def differing(group: Group, count: int, device: torch.device) -> Cases:
    """Ranks that call other things; the last, since no call follows."""
    x = torch.ones(count, device=device)
    op = dist.ReduceOp.AVG if dist.get_rank() else dist.ReduceOp.SUM
    try:
        dist.all_reduce(x, op, group=group)
        x.sum().item()  # the device has done it
        dist.all_reduce(x, op, group=group)
    except CollectiveMismatch as error:
        yield "named", "rank 0 called all_reduce" not in str(error)
    else:
        yield "named", True


def microseconds(group: Group | None, device: torch.device) -> float:
    """Of the host, for an asynchronous all-reduce of an element; the mean."""
    x = torch.ones(1, device=device)
    for timed in (False, True):
        begin = time.perf_counter()
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(ROUNDS)]
        took = time.perf_counter() - begin
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if timed:
            return round(1e6 * took / ROUNDS, 1)
    raise AssertionError


def on_a_rank(ki: int, device: torch.device) -> dict[str, Any]:
    """What was wrong, over both ranks."""
    count = ki << 10
    name = "pycollective"
    if device.type == "cpu":
        name = "gloo_inside"
        dist.Backend.register_backend(name, _with_gloo, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend=name)
    kinds: dict[str, Callable[[Group, int, torch.device], Cases]] = {
        "reductions": reductions,
        "moves": moves,
        "coalesced": coalesced,
        "trainings": trainings,
        "ranks that differ": differing,
    }
    prices = {"us": microseconds(group, device), "own_us": microseconds(None, device)}
    found: dict[str, Any] = {}
    for kind, cases in kinds.items():
        said = list(cases(group, count, device))
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, said)
        wrong = [case for of_rank in everywhere for case, is_wrong in of_rank if is_wrong]
        found[kind] = {"cases": len(said), "wrong": len(wrong), "first": wrong[0] if wrong else ""}
    found["reductions"].update(prices)
    if device.type == "cpu":
        dist.destroy_process_group(group)
    return found


def main() -> None:
    """Start the ranks; print what rank 0 found, or what NCCL says."""
    found = of_two_ranks("benchmarks.gpu.backend", on_a_rank, 1 << 10)
    if found is None:
        return
    print(json.dumps(found))
    sys.exit("refused" not in found and any(row["wrong"] for row in found.values()))


if __name__ == "__main__":
    main()
