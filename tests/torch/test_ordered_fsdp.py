"""FSDP2 over Gloo with `ordered.ReduceScatter`: the reference's gradients, and how they travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo  # so that forks need not import it for fully_shard
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pycollective import ConfigurationError, reference
from pycollective.torch import ordered
from pycollective.torch.ordered import header
from tests.harness import PerRank, results, run_ranks
from tests.inputs import awkward, order_sensitive, same_bits
from tests.torch.groups import Gradient, process_group, to_numpy, to_torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
# Of each layer's parameters: uneven over ranks, fewer rows than ranks, and large.
SHAPES = [(7, 5), (1,), (191, 60)]
COUNT = 2 * sum(int(np.prod(shape)) for shape in SHAPES)  # of two layers


class Layer(torch.nn.Module):
    """Its gradients are what it is given."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(*s, dtype=dtype) for s in SHAPES)

    def forward(self, flat):
        grads = flat.split([each.numel() for each in self.parts])
        return sum(
            Gradient.apply(part, grad.view_as(part))
            for part, grad in zip(self.parts, grads, strict=True)
        )


def sharded(mesh, reduce_scatter, mp_policy=MIXED, dtype=FP32, hook=False, prepare=None):
    """Two layers, and what holds them."""
    model = torch.nn.ModuleList([Layer(dtype), Layer(dtype)])
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=mp_policy)
        layer.set_custom_reduce_scatter(reduce_scatter)
        if hook:
            layer.set_all_reduce_hook(reduce_scatter.all_reduce_replicas)
        if prepare is not None:
            prepare(layer)
    return model


def loss_of(model, leaf):
    """What has these gradients of all the model's parameters, one tensor."""
    halves = to_torch(leaf).chunk(2)
    return sum(layer(half) for layer, half in zip(model, halves, strict=True))


def gradients_of(model):
    whole = [part.grad.full_tensor().flatten() for layer in model for part in layer.parts]
    return to_numpy(torch.cat(whole))


def gradients(model, leaf):
    """All of the model's gradients after a backward pass in which they are `leaf`, one tensor."""
    model.zero_grad()
    loss_of(model, leaf).backward()
    return gradients_of(model)


def check(outcomes, wanted):
    for rank, got in enumerate(outcomes):
        assert same_bits(got, wanted), rank


def widened(leaves):
    return [each.astype(np.float32) for each in leaves]


def cases_of(ranks, inputs):
    """Gradients of bf16, of fp32, and of fp32 but all bf16's except for one of rank 1's."""
    small, large = (inputs(dtype, ranks, COUNT) for dtype in ("bfloat16", "float32"))
    one_off = widened(small)
    one_off[1][-1] = np.float32(1 + 2.0**-20)
    return {"bf16": small, "fp32": large, "one off": one_off}


def of_cases(comm, backend, cases):
    """(gradients, bytes sent meanwhile) of each case."""
    with process_group(comm, backend=backend):
        mesh = init_device_mesh("cpu", (comm.size,))
        group = mesh.get_group()
        ordered.prepare(group)
        found = {}
        for name, leaf in cases.items():
            policy = MIXED if name == "bf16" else MixedPrecisionPolicy()
            model = sharded(mesh, ordered.ReduceScatter(), policy)
            before = ordered.stats(group)["sent_bytes"]
            got = gradients(model, leaf)
            found[name] = got, ordered.stats(group)["sent_bytes"] - before
        return found


def run_cases(ranks, inputs, backend="gloo"):
    cases = cases_of(ranks, inputs)
    mine = [{name: leaves[rank] for name, leaves in cases.items()} for rank in range(ranks)]
    outcomes = results(run_ranks(of_cases, ranks, backend, PerRank(mine)))
    for name, leaves in cases.items():
        check([each[name][0] for each in outcomes], reference.reduce(widened(leaves), "avg"))
    return [{name: sent for name, (_, sent) in each.items()} for each in outcomes]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_the_references_averages(ranks):
    run_cases(ranks, awkward)


def test_a_layer_travels_as_bf16_if_all_ranks_gradients_are_such():
    part = sum(-(-rows // 3) * int(np.prod(rest)) for rows, *rest in SHAPES)  # padded, of a rank
    of_layers = {"bf16": (2, 2), "fp32": (4, 4), "one off": (2, 4)}  # bytes of an element
    to_each = {name: 2 * header.BYTES + part * sum(each) for name, each in of_layers.items()}
    assert run_cases(3, order_sensitive) == [{k: 2 * sent for k, sent in to_each.items()}] * 3


def test_over_the_backend_pycollective():
    assert run_cases(3, awkward, "pycollective") == [{"bf16": 0, "fp32": 0, "one off": 0}] * 3


def divided_by(factor):
    def prepare(layer):
        layer.set_force_sum_reduction_for_comms(True)
        if factor:
            layer.set_gradient_divide_factor(factor)

    return prepare


OTHERS = {
    # name: (policy, dtype of parameters, factor, what is wanted of the leaves)
    "bf16 all the way": (
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
        *(BF16, None, lambda leaves: reference.reduce(leaves, "avg")),
    ),
    "fp64": (MixedPrecisionPolicy(), FP64, None, lambda leaves: reference.reduce(leaves, "avg")),
    "sums, divided by the ranks": (
        *(MIXED, FP32, 0.0),
        lambda leaves: reference.reduce(widened(leaves), "avg"),
    ),
    "sums, divided by 5": (
        *(MIXED, FP32, 5.0),
        lambda leaves: reference.reduce(widened(leaves), "sum") / np.float32(5),
    ),
}


def of_others(comm, leaves):
    with process_group(comm, backend="gloo"):
        mesh = init_device_mesh("cpu", (comm.size,))
        found = {}
        for name, leaf in leaves.items():
            policy, dtype, factor, _ = OTHERS[name]
            prepare = None if factor is None else divided_by(factor)
            found[name] = gradients(
                sharded(mesh, ordered.ReduceScatter(), policy, dtype, prepare=prepare), leaf
            )
        return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_other_types_and_factors(ranks):
    leaves = {
        name: order_sensitive("float64" if name == "fp64" else "bfloat16", ranks, COUNT)
        for name in OTHERS
    }
    mine = [{name: each[rank] for name, each in leaves.items()} for rank in range(ranks)]
    outcomes = results(run_ranks(of_others, ranks, PerRank(mine)))
    for name, (*_, wanted) in OTHERS.items():
        check([each[name] for each in outcomes], wanted(leaves[name]))


def asynchronous(comm, leaf):
    with process_group(comm, backend="gloo") as group:
        reduce_scatter = ordered.ReduceScatter()
        out = reduce_scatter.allocate([leaf.size // comm.size], dtype=FP32, device="cpu")
        work = reduce_scatter(out, to_torch(leaf), group, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        assert isinstance(work, ordered.Work)
        return to_numpy(out)


def test_async_op_gives_a_work():
    leaves = awkward("float32", 2, 40_000)
    outcomes = results(run_ranks(asynchronous, 2, PerRank(leaves)))
    check([np.concatenate(outcomes)], reference.reduce(leaves, "avg"))


def refusals(comm):
    with process_group(comm, backend="gloo") as group:
        mesh = init_device_mesh("cpu", (comm.size,))
        leaf = np.ones(COUNT, np.float32)

        def refused(match, reduce_scatter=None, policy=MIXED, **options):
            model = sharded(mesh, reduce_scatter or ordered.ReduceScatter(), policy, **options)
            with pytest.raises(ConfigurationError, match=match):
                gradients(model, leaf)

        def factor(layer):
            layer.set_gradient_divide_factor(5.0)

        fp16, bf16 = (MixedPrecisionPolicy(reduce_dtype=dtype) for dtype in (FP16, BF16))
        refused(r"set_force_sum_reduction_for_comms\(True\)", prepare=factor)
        refused(r"float16 .* MixedPrecisionPolicy\(reduce_dtype=torch\.float32\)", policy=fp16)

        replicas = ordered.ReduceScatter(group)
        refused("neither set_force_sum", replicas, hook=True, prepare=divided_by(0.0))
        refused("reduce in float32", ordered.ReduceScatter(group), bf16, hook=True)
        refused("set_all_reduce_hook", ordered.ReduceScatter(group))
        with pytest.raises(ConfigurationError, match="the group of the replicas"):
            ordered.ReduceScatter().all_reduce_replicas(torch.ones(3))


def test_what_would_round_before_the_sum_is_refused():
    results(run_ranks(refusals, 2))


def hybrid(comm, leaves, shapes):
    with process_group(comm, backend="gloo"):
        found = {}
        for shape in shapes:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
            reduce_scatter = ordered.ReduceScatter(mesh.get_group("replicas"))
            model = sharded(mesh["shards"], reduce_scatter, hook=True)
            found[shape] = [gradients(model, leaf) for leaf in leaves]
        return found


@pytest.mark.parametrize(
    ("ranks", "shapes"), [(4, [(2, 2), (4, 1), (1, 4)]), (6, [(3, 2), (6, 1)])]
)
def test_hybrid_shards_give_the_averages_over_all_ranks(ranks, shapes):
    steps = [awkward("bfloat16", ranks, COUNT, seed) for seed in range(2)]
    mine = [[leaves[rank] for leaves in steps] for rank in range(ranks)]
    outcomes = results(run_ranks(hybrid, ranks, PerRank(mine), shapes))
    for shape in shapes:
        for step, leaves in enumerate(steps):
            wanted = reference.reduce(widened(leaves), "avg")
            check([each[shape][step] for each in outcomes], wanted)


def torchs_own(comm, leaf):
    """Over a mesh of both dimensions, and over shards of one rank."""
    with process_group(comm, backend="gloo"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicas", "shards"))["shards"]
        return [gradients(sharded(each, ordered.ReduceScatter()), leaf) for each in (mesh, alone)]


def test_what_torch_reduces_itself():
    """Averages over replicas, of which two have no order, and what is one rank's alone."""
    leaves = order_sensitive("bfloat16", 4, COUNT)
    wide = widened(leaves)
    halves = [reference.reduce(wide[at : at + 2], "avg") for at in (0, 2)]
    outcomes = results(run_ranks(torchs_own, 4, PerRank(leaves)))
    check([each[0] for each in outcomes], reference.reduce(halves, "avg"))
    for each, mine in zip(outcomes, wide, strict=True):
        assert same_bits(each[1], mine)
