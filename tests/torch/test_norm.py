"""Clipping: the reference's norm, and one digest however gradients are sharded."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
import torch._dynamo  # so that forks need not import it for fully_shard
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pycollective import CollectiveMismatch, ConfigurationError, reference
from pycollective.torch import LeafSync, ordered
from tests.harness import results, run_ranks
from tests.kernels.test_squares import wide
from tests.torch.groups import Gradient, process_group, standing_group, to_numpy, to_torch

# Rows that 2, 3 and 4 ranks do not share evenly, fewer rows than ranks, and many.
SHAPES = [(7, 5), (1,), (191, 6), (3, 2, 2), (2,), (1000,), (5, 40)]
FROZEN = 3
MAX_NORM = 0.37
STEPS = range(6)  # in one alone another order may have the same root


def gradients_of(seed=0):
    """Of bfloat16's values: sums and averages of a few that are equal are exact."""
    return [
        to_torch(wide("bfloat16", shape, seed)).float() if place != FROZEN else None
        for place, shape in enumerate(SHAPES)
    ]


class Weights(torch.nn.Module):
    """Their gradients are `gradients_of`."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        self.parts[FROZEN].requires_grad_(False)

    def forward(self, gradients):
        return sum(
            Gradient.apply(part, gradient)
            for part, gradient in zip(self.parts, gradients, strict=True)
            if gradient is not None
        )


def digest_of(norm, gradients):
    """Of the norm, and of whole gradients after clipping."""
    digest = hashlib.sha256(to_numpy(norm).tobytes())
    for each in gradients:
        if each is not None:
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            digest.update(to_numpy(whole).tobytes())
    return digest.hexdigest()


def clipped(model, run=None):
    """A digest for each step."""
    found = []
    for step in STEPS:
        model.zero_grad()
        (run or model)(gradients_of(step)).backward()
        norm = ordered.clip_grad_norm_(model.parameters(), MAX_NORM)
        found.append(digest_of(norm, [each.grad for each in model.parameters()]))
    return found


def alone():
    """By the reference, in one process."""
    found = []
    for step in STEPS:
        gradients = gradients_of(step)
        norm = reference.norm([None if each is None else to_numpy(each) for each in gradients])
        factor = torch.tensor(MAX_NORM / (norm + 1e-6), dtype=torch.float32)
        whole = [None if each is None else each * factor for each in gradients]
        found.append(digest_of(torch.tensor(norm, dtype=torch.float64), whole))
    return found


# --- One process.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_norm_is_the_references_and_gradients_are_rounded_once(dtype):
    shapes = [(40, 3, 3, 3), (17, 60), (), (9,), (0, 4), (64, 64)]
    gradients = [wide(dtype, shape) for shape in shapes]
    parameters = [torch.nn.Parameter(to_torch(each)) for each in gradients]
    parameters.insert(1, torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    given = [*gradients[:1], None, *gradients[1:]]
    for parameter, each in zip(parameters, given, strict=True):
        parameter.grad = None if each is None else to_torch(each)
    parameters[0].grad = parameters[0].grad.to(memory_format=torch.channels_last)
    parameters[2].grad = parameters[2].grad.t().contiguous().t()
    parameters[-1].grad = to_torch(np.repeat(gradients[-1], 2, axis=1))[:, ::2]

    wanted = reference.norm(given)
    norm = ordered.clip_grad_norm_(iter(parameters), 2 * wanted)
    assert (norm.dtype, norm.shape, norm.item()) == (torch.float64, (), wanted)
    before = [None if each is None else to_torch(each) for each in given]
    for parameter, each in zip(parameters, before, strict=True):
        assert parameter.grad is each is None or torch.equal(parameter.grad, each)

    assert ordered.clip_grad_norm_(parameters, MAX_NORM).item() == wanted
    factor = np.float32(MAX_NORM / (wanted + 1e-6))
    compute = torch.float64 if dtype == "float64" else torch.float32
    for parameter, each in zip(parameters, before, strict=True):
        if each is not None:
            scaled = each.to(compute) * torch.tensor(factor, dtype=compute)
            assert torch.equal(parameter.grad, scaled.to(each.dtype))


def with_gradient(gradient):
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize(("value", "norm"), [(math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_is_torchs(value, norm):
    ours, theirs = ([with_gradient(torch.tensor([1.0, value, 0.0]))] for _ in range(2))
    finite = with_gradient(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"first in gradient 1 of 2, of shape \(3,\)"):
        ordered.clip_grad_norm_([finite, *ours], 1.0, error_if_nonfinite=True)
    assert torch.equal(finite.grad, torch.ones(2))
    found = ordered.clip_grad_norm_(ours[0], 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert found.item() == norm or math.isnan(found) == math.isnan(norm)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, equal_nan=True, rtol=0, atol=0)


def test_a_parameter_without_a_gradient_keeps_its_place():
    moved = 0
    for seed in range(20):
        gradients = [wide("float32", (50,), 10 * seed + place) for place in range(6)]
        parameters = [with_gradient(to_torch(each)) for each in gradients]
        parameters.insert(1, torch.nn.Parameter(torch.zeros(50)))
        wanted = reference.norm([gradients[0], None, *gradients[1:]])
        moved += wanted != reference.norm(gradients)
        assert ordered.clip_grad_norm_(parameters, 1e9).item() == wanted
    assert moved  # without that place


def test_no_gradients_have_the_norm_0():
    assert ordered.clip_grad_norm_([], 1.0).item() == 0
    assert ordered.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0


def test_what_has_no_norm_here_is_refused_by_name():
    def refused(match, *gradients, max_norm=1.0, **options):
        with pytest.raises(ConfigurationError, match=match):
            ordered.clip_grad_norm_(
                [with_gradient(each) for each in gradients], max_norm, **options
            )

    refused("norm_type is inf", torch.ones(2), norm_type=math.inf)
    refused("max_norm is -1", torch.ones(2), max_norm=-1)
    refused("max_norm is nan", torch.ones(2), max_norm=math.nan)
    refused(
        r"gradient 1, of shape \(3,\), is of torch.complex64", torch.ones(2), torch.ones(3) + 0j
    )
    refused("gradient 0, .* must be dense", torch.ones(2).to_sparse())
    refused("is on meta", torch.ones(2, device="meta"))


# --- Several ranks.


def sharded(mesh, reduce_scatter, hook=False):
    model = Weights()
    fully_shard(model, mesh=mesh)
    model.set_custom_reduce_scatter(reduce_scatter)
    if hook:
        model.set_all_reduce_hook(reduce_scatter.all_reduce_replicas)
    return model


def layouts(comm, backend):
    """A digest of each."""
    with process_group(comm, backend=backend) as world:
        found = {"one": clipped(Weights())}
        model = Weights()
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(world, ordered.hook)
        found["ddp"] = clipped(model, replica)
        mesh = init_device_mesh("cpu", (comm.size,))
        found["fsdp"] = clipped(sharded(mesh, ordered.ReduceScatter()))
        if comm.size == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            reduce_scatter = ordered.ReduceScatter(mesh.get_group("replicas"))
            found["hsdp"] = clipped(sharded(mesh["shards"], reduce_scatter, hook=True))
            found["torch's hsdp"] = clipped(sharded(mesh, ordered.ReduceScatter()))
        return found


@pytest.mark.parametrize("backend", ["gloo", "pycollective"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_one_digest_however_gradients_are_sharded(ranks, backend):
    outcomes = results(run_ranks(layouts, ranks, backend))
    wanted = alone()
    assert all(each == wanted for found in outcomes for each in found.values()), outcomes
    assert len(outcomes[0]) == (5 if ranks == 4 else 3)


def refusals(comm):
    with process_group(comm, backend="gloo"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = torch.ones(8, 8)

        def placed(*placements):
            return with_gradient(distribute_tensor(tensor, mesh, placements))

        def refused(match, *parameters, error=ConfigurationError, max_norm=1.0, **options):
            with pytest.raises(error, match=match):
                ordered.clip_grad_norm_(parameters, max_norm, **options)
            assert all((each.grad.to_local() == 1).all() for each in parameters)

        fine = placed(Replicate(), Shard(0))
        refused(
            r"gradient 1, .*Shard\(dim=1\).*shard_placement_fn", fine, placed(Replicate(), Shard(1))
        )
        refused("only Shard", placed(Shard(0), Shard(0)))
        refused("only Shard", placed(Shard(0), Shard(1)))
        local = torch.ones(8, 8)
        partial = with_gradient(DTensor.from_local(local, mesh, (Replicate(), Partial())))
        refused("Partial", fine, partial)
        refused("sharded over ranks", fine, placed(Shard(0), Replicate()))
        uneven = torch.ones(3 if mesh.get_local_rank("b") == 0 else 5, 8)
        uneven = DTensor.from_local(
            uneven, mesh, (Replicate(), Shard(0)), shape=(8, 8), stride=(8, 1), run_check=False
        )
        refused("unevenly", with_gradient(uneven))
        # Ranks that differ: all raise.
        first = comm.rank % 2 == 0
        refused("all ranks must give", fine, error=CollectiveMismatch, max_norm=1.0 + first)
        more = placed(Replicate(), Shard(0))
        gone = placed(Replicate(), Shard(0))
        if first:
            gone.grad = None  # on some ranks alone, who take part nevertheless
        with pytest.raises(CollectiveMismatch, match="all ranks must give"):
            ordered.clip_grad_norm_([gone], 1.0)
        with pytest.raises((ConfigurationError, TypeError), match="not supported between"):
            ordered.clip_grad_norm_([fine], "1" if first else 1.0)
        refused(
            "all ranks must give", *([fine] if first else [fine, more]), error=CollectiveMismatch
        )
        refused("norm_type is 3", fine, norm_type=3.0 if first else 2.0)
        assert ordered.clip_grad_norm_([fine], 8.0).item() == 8.0


def test_what_ranks_cannot_add_up_by_rows_is_refused_on_all():
    results(run_ranks(refusals, 4))


def by_leaves(comm, leaves):
    model = Weights()
    sync = LeafSync(model, leaves, group=standing_group(comm))
    with pytest.raises(ConfigurationError, match="gradients of step 0 are not there"):
        sync.clip_grad_norm_(1.0)
    found = []
    for step in STEPS:
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                model(gradients_of(step)).backward()
            with pytest.raises(ConfigurationError, match=r"call it after finish\(\)"):
                sync.clip_grad_norm_(1.0)
        sync.finish()
        model.parts[FROZEN].grad = torch.full(SHAPES[FROZEN], 1.0 + comm.rank)  # is left alone
        norm = sync.clip_grad_norm_(MAX_NORM)
        model.parts[FROZEN].grad = None
        found.append(digest_of(norm, [each.grad for each in model.parameters()]))
    sync.close()
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_norm_of_leaves(pool, ranks):
    assert pool(ranks).call(by_leaves, 4) == [alone()] * ranks


def test_the_group_is_let_alone():
    """Nothing is sent where nothing is sharded."""
    assert not dist.is_initialized()
    assert clipped(Weights()) == alone()
