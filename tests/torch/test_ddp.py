"""DistributedDataParallel, end to end: the same bits for every bucket size, every option, hooks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch
from pycollective import reference
from tests.harness import PerRank
from tests.inputs import order_sensitive, same_bits
from tests.torch.groups import Gradient, standing_group, to_numpy, to_torch

TINY, SMALL, WHOLE = 0.0005, 0.01, 25.0  # bucket_cap_mb: many buckets, several, one


class Net(torch.nn.Module):
    """Has buffers, a branch that a forward pass may leave out, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.input = torch.nn.Linear(11, 37)
        self.norm = torch.nn.BatchNorm1d(37)
        self.hidden = torch.nn.Linear(37, 37)
        self.branch = torch.nn.Linear(37, 37)
        self.output = torch.nn.Linear(37, 5)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.norm(self.input(x)))
        x = torch.relu(self.hidden(x))
        if branch:
            x = x + self.branch(x)
        return self.output(x)


def train(comm, register, steps=4, dtype=torch.float32, branch=lambda rank, step: True, **options):
    """Final weights, as bytes, after `steps` on data that differ by rank."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Net().to(dtype), **options)
    if register is not None:
        register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    random = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        scale = 10.0 ** (comm.rank % 3)  # gradients of different magnitudes, so that order matters
        x = (torch.randn(6, 11, generator=random) * scale).to(dtype)
        optimizer.zero_grad()
        model(x, branch(comm.rank, step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = b"".join(
        p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()
    )
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return weights


def our_hook(model):
    model.register_comm_hook(None, pycollective.torch.all_reduce_hook)


def weights_by_bucket(comm, dtype, caps):
    standing_group(comm)
    return [train(comm, our_hook, dtype=getattr(torch, dtype), bucket_cap_mb=cap) for cap in caps]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_final_weights_do_not_depend_on_the_bucket_size(pool, dtype):
    outcomes = pool(4).call(weights_by_bucket, dtype, [TINY, SMALL, WHOLE])
    assert {weights for rank in outcomes for weights in rank} == {outcomes[0][0]}


def unused(rank, step):
    """Rank 1 leaves the branch out always, all ranks in step 2."""
    return rank != 1 and step != 2


def weights_with(comm, options):
    standing_group(comm)
    return [train(comm, register, **options) for register in (None, our_hook)]


OPTIONS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "no broadcast_buffers": {"broadcast_buffers": False},
    "unused on some ranks": {"find_unused_parameters": True, "branch": unused},
    "several buckets": {"bucket_cap_mb": SMALL},
    "several buckets as views": {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
    "static graph as views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def test_every_option_gives_the_same_weights_on_every_rank(pool):
    results = {}
    for name, options in OPTIONS.items():
        outcomes = pool(3).call(weights_with, options)
        assert outcomes[0] == outcomes[1] == outcomes[2], name
        results[name] = outcomes[0]
    # These change how gradients travel, not what they are.
    del results["unused on some ranks"]
    assert {each[1] for each in results.values()} == {results["plain"][1]}


def join_uneven(comm):
    standing_group(comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + comm.rank):
            optimizer.zero_grad()
            model(torch.ones(4, 3) * (comm.rank + 1)).sum().backward()
            optimizer.step()
    return model.module.weight.detach().numpy().tobytes()


def test_join_with_uneven_inputs(pool):
    assert len(set(pool(3).call(join_uneven))) == 1


class OneWeight(torch.nn.Module):
    """Its gradient is whatever it is called with: the input, bit for bit."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return Gradient.apply(self.weight, gradient)


def averaged_gradient(comm, gradient, hook):
    standing_group(comm)
    tensor = to_torch(gradient)
    model = DistributedDataParallel(OneWeight(tensor.numel(), tensor.dtype))
    if hook:
        our_hook(model)
    model(tensor).backward()
    return to_numpy(model.module.weight.grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_hook_gives_exactly_the_references_average(pool, ranks, dtype):
    gradients = order_sensitive(dtype, ranks, 10_000)
    for got in pool(ranks).call(averaged_gradient, PerRank(gradients), True):
        assert same_bits(got, reference.reduce(gradients, "avg"))


def test_without_the_hook_ddp_rounds_before_the_backend_sees_the_gradients(pool):
    """At 3 ranks in bf16, scaling by 1/3 first changes more than a third of the elements."""
    random = np.random.default_rng(0)
    dtype = order_sensitive("bfloat16", 1, 1)[0].dtype
    gradients = [random.standard_normal(100_000).astype(dtype) for _ in range(3)]
    got = pool(3).call(averaged_gradient, PerRank(gradients), False)[0]
    want = reference.reduce(gradients, "avg")
    different = np.count_nonzero(got.view(np.uint16) != want.view(np.uint16)) / want.size
    assert 0.3 < different < 0.45
    # What the backend was given it added without fault.
    scaled = [(g.astype(np.float32) * np.float32(1 / 3)).astype(g.dtype) for g in gradients]
    assert same_bits(got, reference.reduce(scaled, "sum"))


def power_sgd(model):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.power_sgd_state = state
    model.register_comm_hook(state, pycollective.torch.in_order(powerSGD_hook.powerSGD_hook))


HOOKS = {
    "allreduce": lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda m: m.register_comm_hook(None, _bf16_hook),
    "fp16 around ours": lambda m: m.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(pycollective.torch.all_reduce_hook)
    ),
    "built in": lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "built in, fp16": lambda m: m._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "PowerSGD": power_sgd,
}


def _bf16_hook(state, bucket):
    """torch refuses its own by name without a GPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


def with_hook(comm, name, cap):
    standing_group(comm)
    return train(comm, HOOKS[name], steps=6, bucket_cap_mb=cap)


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(pool, name):
    for cap in (SMALL, WHOLE):
        outcomes = pool(3).call(with_hook, name, cap)
        assert outcomes[0] == outcomes[1] == outcomes[2]


def complex_parameters(comm):
    standing_group(comm)
    model = DistributedDataParallel(torch.nn.Linear(3, 2, dtype=torch.complex64))
    our_hook(model)
    model(torch.full((1, 3), (comm.rank + 1) * (1 - 2j))).abs().square().sum().backward()
    average = model.module.weight.grad.clone()
    alone = torch.nn.Linear(3, 2, dtype=torch.complex64)
    alone.load_state_dict(model.module.state_dict())
    alone(torch.full((1, 3), (comm.rank + 1) * (1 - 2j))).abs().square().sum().backward()
    return to_numpy(torch.view_as_real(average)), to_numpy(torch.view_as_real(alone.weight.grad))


def test_complex_gradients_are_averaged_part_by_part(pool):
    outcomes = pool(3).call(complex_parameters)
    want = reference.reduce([alone for _, alone in outcomes], "avg")
    assert all(same_bits(average, want) for average, _ in outcomes)


def subgroup_hook(comm):
    """DDP over part of the ranks, with the hook's state naming the group."""
    standing_group(comm)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[comm.rank // 2]
    model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=mine)
    model.register_comm_hook(mine, pycollective.torch.all_reduce_hook)
    model(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
    gradient = model.module.weight.grad[0, 0].item()
    del model
    dist.destroy_process_group(mine)
    return gradient


def test_the_hook_averages_over_the_group_it_is_given(pool):
    assert pool(4).call(subgroup_hook) == [1.5, 1.5, 3.5, 3.5]


@pytest.mark.parametrize("module", ["hooks", "ordered.hooks"])
def test_a_pickled_model_finds_its_hook(module):
    """DDP pickles its hooks by name; those that were pickled before have other names."""
    now = pickle.dumps(pycollective.torch.all_reduce_hook)
    name = {"hooks": "all_reduce_hook", "ordered.hooks": "hook"}[module]
    before = f"cpycollective.torch.{module}\n{name}\n.".encode()
    assert pickle.loads(before) is pickle.loads(now) is pycollective.torch.ordered.hook


def different_models(comm):
    standing_group(comm)
    group = dist.new_group()
    try:
        DistributedDataParallel(torch.nn.Linear(3, 2 + comm.rank), process_group=group)
    except RuntimeError as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group(group)


def test_models_that_differ_raise_when_wrapped(pool):
    # Rank 1 compares itself with rank 0, and leaves; rank 0 goes on to send it the weights.
    assert pool(2).call(different_models) == ["PeerFailure", "RuntimeError"]
