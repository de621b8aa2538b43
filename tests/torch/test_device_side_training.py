"""Trainings over the backend on devices: the oracle's bits through DDP, FSDP2, HSDP, tensor
parallel, functional collectives and compiled code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo  # so that forks need not import it
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch
from pycollective import reference
from pycollective.torch import ordered
from tests.harness import PerRank
from tests.inputs import order_sensitive, same_bits
from tests.torch.device_side import run
from tests.torch.groups import to_numpy, to_torch
from tests.torch.test_ddp import OneWeight
from tests.torch.test_ordered_fsdp import COUNT, Layer, gradients, widened


def check(outcomes, wanted):
    for rank, got in enumerate(outcomes):
        assert same_bits(got, wanted), rank


# --- DDP.


def under_ddp(comm, world, gradient, cap):
    found = []
    for hook in (ordered.hook, pycollective.torch.all_reduce_hook, None):
        tensor = to_torch(gradient)
        model = DistributedDataParallel(OneWeight(tensor.numel(), tensor.dtype), bucket_cap_mb=cap)
        if hook is not None:
            model.register_comm_hook(None, hook)
        model(tensor).backward()
        found.append(to_numpy(model.module.weight.grad))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ddp_with_the_hook_gives_the_references_average(dtype):
    gradients = order_sensitive(dtype, 3, 10_000)
    divided = [to_numpy(to_torch(each) * (1 / 3)) for each in gradients]  # by DDP, without a hook
    for *averaged, summed in run(under_ddp, 3, PerRank(gradients), 0.01):
        for got in averaged:
            assert same_bits(got, reference.reduce(gradients, "avg"))
        assert same_bits(summed, reference.reduce(divided, "sum"))


def compressed(comm, world, backends):
    """Weights after two steps with gradients of one bit, by way of each backend."""
    found = []
    for backend in backends:
        group = dist.new_group(backend=backend)
        torch.manual_seed(5)
        model = torch.nn.Linear(40, 30)
        ddp = DistributedDataParallel(model, process_group=group)
        state = pycollective.torch.OneBitState(ddp)
        ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.randn(6, 40, generator=random)).square().sum().backward()
            optimizer.step()
        found.append(to_numpy(model.weight.detach()))
        state.close()
    return found


def test_compressed_gradients_are_those_of_other_backends():
    for here, there in run(compressed, 2, ("on_device", "gloo")):
        assert same_bits(here, there)


# --- FSDP2.


def sharded(mesh, policy):
    model = torch.nn.ModuleList([Layer(), Layer()])
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def fsdp(comm, world, leaf, shape, reduce_dtype):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return gradients(sharded(mesh if shape[0] > 1 else mesh["shards"], policy), leaf)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_without_a_reduce_scatter_of_ones_own(reduce_dtype):
    """It asks for averages."""
    leaves = order_sensitive("bfloat16", 3, COUNT)
    outcomes = run(fsdp, 3, PerRank(leaves), (1, 3), reduce_dtype)
    wide = widened(leaves) if reduce_dtype == torch.float32 else leaves
    wanted = reference.reduce(wide, "avg")
    check(outcomes, wanted.astype(outcomes[0].dtype))


def test_hybrid_shards_give_averages_of_averages():
    """torch averages twice; `ordered.ReduceScatter(replicas)` does once."""
    leaves = order_sensitive("bfloat16", 4, COUNT)
    wide = widened(leaves)
    halves = [reference.reduce(wide[at : at + 2], "avg") for at in (0, 2)]
    outcomes = run(fsdp, 4, PerRank(leaves), (2, 2), torch.float32)
    check(outcomes, reference.reduce(halves, "avg"))


def hybrid_once(comm, world, leaf):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    reduce_scatter = ordered.ReduceScatter(mesh.get_group("replicas"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mesh["shards"], policy)
    for layer in model:
        layer.set_custom_reduce_scatter(reduce_scatter)
        layer.set_all_reduce_hook(reduce_scatter.all_reduce_replicas)
    return gradients(model, leaf)


def test_hybrid_shards_with_the_reduce_scatter_give_one_average():
    leaves = order_sensitive("bfloat16", 4, COUNT)
    check(run(hybrid_once, 4, PerRank(leaves)), reference.reduce(widened(leaves), "avg"))


# --- Tensor parallel, DTensor.


def tensor_parallel(comm, world, leaf):
    mesh = init_device_mesh("cpu", (comm.size,))
    # The sum over the ranks of what each has.
    partial = DTensor.from_local(to_torch(leaf), mesh, [Partial()])
    whole = to_numpy(partial.redistribute(mesh, [Replicate()]).to_local())
    shard = to_numpy(partial.redistribute(mesh, [Shard(0)]).to_local())
    gathered = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).full_tensor()
    assert gathered.tolist() == list(range(6))

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    alone = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    alone.load_state_dict(model.state_dict())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), alone(x))
    model(x).sum().backward()
    alone(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), alone[0].weight.grad)
    return whole, shard


def test_tensor_parallel_and_dtensor():
    leaves = order_sensitive("float32", 3, 3000)
    outcomes = run(tensor_parallel, 3, PerRank(leaves))
    check([whole for whole, _ in outcomes], reference.reduce(leaves, "sum"))
    check([np.concatenate([shard for _, shard in outcomes])], reference.reduce(leaves, "sum"))


# --- Functional collectives.


def functions(comm, world, leaf):
    def average(x):
        return functional.all_reduce(x, "avg", world) * 1.0

    x = to_torch(leaf)
    compiled = torch.compile(average, backend="aot_eager")
    coalesced = functional.all_reduce_coalesced([x, x[:7]], "avg", world)
    shard = functional.reduce_scatter_tensor(x, "avg", 0, world)
    gathered = functional.all_gather_tensor(shard, 0, world)
    moved = functional.all_to_all_single(torch.arange(4.0) + 10 * comm.rank, None, None, world)
    assert moved.tolist() == ([0, 1, 10, 11] if comm.rank == 0 else [2, 3, 12, 13])
    found = [average(x), compiled(x), coalesced[0], gathered]
    assert torch.equal(x, to_torch(leaf))
    return [to_numpy(each + 0) for each in found]


def test_functional_collectives_and_compiled_code():
    leaves = order_sensitive("float32", 2, 2000)
    for found in run(functions, 2, PerRank(leaves)):
        check(found, reference.reduce(leaves, "avg"))
