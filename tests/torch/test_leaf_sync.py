"""`LeafSync`: averages by the contract, whatever a leaf uses, whoever has it; what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import pycollective as pc
from pycollective import (
    CollectiveAborted,
    CollectiveMismatch,
    ConfigurationError,
    PeerFailure,
    leaves_of,
    reference,
)
from pycollective.torch import LeafSampler, LeafSync
from tests.harness import Ranks
from tests.inputs import order_sensitive, same_bits
from tests.torch.groups import Gradient, standing_group, to_numpy, to_torch

SHAPES = ((40, 25), (7,), (300, 3), (1,))


class Weights(torch.nn.Module):
    """Their gradients are what it is given, bit for bit; None leaves one out."""

    def __init__(self, dtypes):
        super().__init__()
        self.each = torch.nn.ParameterList(
            torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)
        )
        self.register_buffer("seen", torch.zeros(1))  # which DDP would send in its first forward
        self.each[0].data = self.each[0].data.t().contiguous().t()  # lies by columns

    def forward(self, gradients):
        terms = [
            Gradient.apply(weight, gradient)
            for weight, gradient in zip(self.each, gradients, strict=True)
            if gradient is not None
        ]
        return torch.stack([each.float() for each in terms]).sum()


# --- Bits.


def gradients_of(dtypes, leaves):
    """For each leaf one for each weight, or None: weight 1 in odd leaves, weight 3 everywhere."""
    found = [
        order_sensitive(str(dtype).removeprefix("torch."), leaves, int(np.prod(shape)))
        for dtype, shape in zip(dtypes, SHAPES, strict=True)
    ]
    return [
        [
            None if place == 3 or (place == 1 and leaf % 2) else each[leaf].reshape(shape)
            for place, (each, shape) in enumerate(zip(found, SHAPES, strict=True))
        ]
        for leaf in range(leaves)
    ]


class Outer(torch.nn.Module):
    """Has another module inside, as Fabric's wrapper has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, gradients):
        return self.inner(gradients)


def averages(comm, dtypes, leaves, options, counts=None, ddp=None, outer=None):
    """Of the same leaves in two steps, the second in another order."""
    group = standing_group(comm)
    model = Weights(dtypes)
    run = model if ddp is None else DistributedDataParallel(model, process_group=group, **ddp)
    run = run if outer is None else outer(run)
    sync = LeafSync(run, leaves, group=group, **options)
    given = gradients_of(dtypes, leaves)
    found = []
    for order in (sync.local_leaves, reversed(sync.local_leaves)):
        for leaf in order:
            tensors = [None if each is None else to_torch(each) for each in given[leaf]]
            with sync.leaf(leaf, counts and counts[leaf]):
                run(tensors).backward()
        sync.finish()
        found.append([to_numpy(each.grad) for each in model.each])
    sync.close()
    return found


def wanted(dtypes, leaves, out=None, divisor=None):
    given = gradients_of(dtypes, leaves)
    for place, dtype in enumerate(dtypes):
        zero = np.zeros(SHAPES[place], to_numpy(torch.zeros(1, dtype=dtype)).dtype)
        of_each = [zero if leaf[place] is None else leaf[place] for leaf in given]
        yield reference.reduce(
            of_each,
            "avg",
            divisor=divisor,
            dtype=to_numpy(torch.zeros(1, dtype=out or dtype)).dtype,
        )


def check(pool, ranks, dtypes, leaves, options=None, counts=None, ddp=None, outer=None):
    options = options or {}
    want = [*wanted(dtypes, leaves, options.get("grad_dtype"), counts and sum(counts))]
    for steps in pool(ranks).call(averages, dtypes, leaves, options, counts, ddp, outer):
        for step in steps:
            assert all(same_bits(*each) for each in zip(step, want, strict=True))


FP32, BF16, MIXED = (
    [torch.float32] * 4,
    [torch.bfloat16] * 4,
    [torch.bfloat16, torch.float32, torch.float16, torch.float32],
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_the_references_average(pool, ranks):
    check(pool, ranks, FP32, 7)
    check(pool, ranks, MIXED, 6, {"bucket_cap_mb": 0.003})
    check(pool, ranks, BF16, 5, {"grad_dtype": torch.float32})
    check(pool, ranks, FP32, 4, counts=[3, 0, 11, 5])
    check(pool, ranks, FP32, 4, counts=[1, 1 << 24, 0, 0])  # which fp32 does not hold


def test_ranks_without_leaves(pool):
    check(pool, 3, MIXED, 2)
    check(pool, 3, FP32, 1, counts=[3])


DDP = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}


@pytest.mark.parametrize("name", DDP)
def test_under_ddp(pool, name):
    check(pool, 2, FP32, 3, ddp=DDP[name])
    check(pool, 2, FP32, 1, ddp=DDP[name])


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("outer", [Outer, compiled])
def test_ddp_inside_the_model_does_not_average_too(pool, outer):
    check(pool, 2, FP32, 3, ddp={}, outer=outer)


def two_models(comm, leaves):
    """The gradients of two models that have a LeafSync each, over one group."""
    group = standing_group(comm)
    torch.manual_seed(0)
    models = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    first, second = (LeafSync(each, leaves, group=group) for each in models)
    for leaf in first.local_leaves:
        with first.leaf(leaf), second.leaf(leaf):
            models[1](models[0](torch.full((2, 4), leaf + 1.0))).sum().backward()
    for sync in (first, second):
        sync.finish()
        sync.close()
    return [to_numpy(each.grad) for model in models for each in model.parameters()]


def test_two_leaf_syncs_share_a_group(pool):
    for leaves in (1, 3):
        alone, both = (pool(ranks).call(two_models, leaves) for ranks in (1, 2))
        for found in both:
            assert all(same_bits(*each) for each in zip(found, alone[0], strict=True))


# --- What the ranks must have alike.


def told_apart(comm, case):
    group = standing_group(comm)
    mine = comm.rank == 1
    model = torch.nn.Linear(3, 3 if case == "shape" and mine else 2)
    if case == "strides" and mine:
        model.weight.data = model.weight.data.t().contiguous().t()
    if case == "number" and mine:
        model.bias.requires_grad_(False)
    if case == "buffer":
        model.register_buffer("kept", torch.zeros(1, dtype=torch.int64 if mine else torch.uint8))
    if case == "count":  # its other ranks' all-reduces stay without their partner
        group = dist.new_group(backend=dist.get_backend(group))
    torch.set_num_threads(2 if case == "threads" and mine else 1)
    try:
        leaves = {"leaves": 5, "leaves that are none": 4.5}.get(case, 4) if mine else 4
        cap = float("nan") if case == "cap" and mine else 6
        given = [] if case == "module" and mine else model
        sync = LeafSync(given, leaves, bucket_cap_mb=cap, group=group)
        if case == "step" and mine:
            sync.load_state_dict({**sync.state_dict(), "step": 3})
        for leaf in sync.local_leaves:
            with sync.leaf(leaf, 1 if case == "count" and mine else None):
                model(torch.ones(1, 3)).sum().backward()
    except (CollectiveMismatch, ConfigurationError) as error:
        return str(error)
    finally:
        torch.set_num_threads(1)


ALIKE = {
    "shape": "the first is weight of torch.float32, shape (3, 3), strides (3, 1), not weight of",
    "strides": "first is weight of torch.float32, shape (2, 3), strides (1, 2), not weight of",
    "number": "first is bias (no gradient) of torch.float32, shape (2,), not bias of torch",
    "leaves that are none": "leaves is 4.5, which is no integer",
    "cap": "bucket_cap_mb is nan, not above 0",
    "module": "model is a list, and no module",
    "buffer": "the first is kept (no gradient) of torch.int64, shape (1,), not kept (no gradient)",
    "count": "step 0: 2 of 4 leaves have a count;",
    "threads": "rank(s) 1 have other threads",
    "leaves": "rank(s) 1 have other leaves than rank 0: 5, not 4",
    "step": "rank 0 is at step 0, and rank(s) 1 at [3]",
}


@pytest.mark.parametrize("case", ALIKE)
def test_ranks_are_told_what_they_have_unlike(pool, case):
    for said in pool(2).call(told_apart, case):
        assert ALIKE[case] in said


ODD = {  # that are not added up, or lie otherwise than they look
    "complex64": lambda value: torch.full((3,), value, dtype=torch.complex64),
    "uint16": lambda value: torch.full((3,), value).to(torch.uint16),
    "float8_e4m3fnuz": lambda value: torch.full((3,), value).to(torch.float8_e4m3fnuz),
    "conjugate": lambda value: torch.full((3,), value * 1j).conj(),
    "negative": lambda value: torch.full((3,), value * 1j).conj().imag,
    "expanded": lambda value: torch.full((3, 1), value).expand(3, 4),
    "columns": lambda value: torch.full((2, 6), value)[:, ::2],
    "no elements": lambda value: torch.full((0,), value),
    "one of an odd stride": lambda value: torch.full((4, 2), value)[:1, 0],
    "a scalar, expanded": lambda value: torch.full((), value).expand(4),
    "quantized": lambda value: torch.quantize_per_tensor(
        torch.full((3,), value), 0.5, 1, torch.quint8
    ),
}


def begun_apart(comm):
    """Weights and buffers, once LeafSync has them; what it has warned of."""
    group = standing_group(comm)
    value = comm.rank + 5.0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = torch.nn.BatchNorm1d(2)
        for each in (*model.parameters(), *model.buffers()):
            each.data.fill_(value)
        for name, make in ODD.items():
            model.register_buffer(name, make(value))
        LeafSync(model, 2, group=group).close()
    found = [
        (each.dequantize() if each.is_quantized else each).tolist()
        for each in (*model.parameters(), *model.buffers())
    ]
    return found, [str(each.message) for each in said if "LeafSync" in str(each.message)]


def test_all_begin_with_rank_0s_weights_and_are_warned_once_of_state(pool):
    (first, said), (other, unsaid) = pool(2).call(begun_apart)
    assert first == other
    assert first[0] == [5, 5]
    assert first[-1] == [5, 5, 5]
    assert unsaid == []
    assert len(said) == 1
    assert "BatchNorm1d keeps running statistics" in said[0]


def test_embeddings_that_renormalize_are_warned_of(alone):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=0.1), torch.nn.Linear(2, 1))
    with pytest.warns(UserWarning, match=r"0 \(max_norm\) changes its weights in forward"):
        sync = LeafSync(model, 1, group=alone)
    with sync.leaf(0):
        model(torch.tensor([1])).sum().backward()
    assert model[0].weight.grad is not None


def raised_in_a_leaf(comm):
    """What another rank is told of an error in one's last leaf."""
    model = torch.nn.Linear(3, 2)
    sync = LeafSync(model, 2, group=standing_group(comm))
    try:
        with sync.leaf(comm.rank):
            if comm.rank == 1:
                raise KeyError("no sample")
            model(torch.ones(1, 3)).sum().backward()
    except (KeyError, CollectiveAborted) as error:
        sync.close()
        sync = LeafSync(model, 2, group=standing_group(comm))
        with sync.leaf(comm.rank):
            model(torch.ones(1, 3)).sum().backward()
        sync.close()
        return str(error)


def test_an_error_in_a_leaf_is_told_to_all_and_another_leaf_sync_can_follow(pool):
    told, own = pool(2).call(raised_in_a_leaf)
    assert own == "'no sample'"
    assert "leaf 1 of step 0 raised KeyError: 'no sample'" in told


def closed(comm):
    """What is on a model that a LeafSync has left."""
    group = standing_group(comm)
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(model, process_group=group)
    sync = LeafSync(ddp, 2, grad_dtype=torch.float32)
    with sync.leaf(comm.rank):
        ddp(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    sync.close()
    hooks = [each._forward_pre_hooks for each in (model, ddp)]
    hooks += [each._post_accumulate_grad_hooks for each in model.parameters()]
    dtypes = {each.grad_dtype for each in model.parameters()}
    return sum(map(len, hooks)), dtypes, ddp.require_forward_param_sync


def test_a_model_that_is_left_is_as_it_was(pool):
    assert pool(2).call(closed) == [(0, {torch.bfloat16}, True)] * 2


def under_static_graph(comm):
    group = standing_group(comm)
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group, static_graph=True)
    with pytest.raises(ConfigurationError, match="static_graph"):
        LeafSync(ddp, 2)


def with_a_parameter_that_ddp_ignores(comm):
    group = standing_group(comm)
    model = torch.nn.Linear(1, 1)
    model._ddp_params_and_buffers_to_ignore = ["bias"]
    ddp = DistributedDataParallel(model, process_group=group)
    with pytest.raises(ConfigurationError, match="told to ignore bias"):
        LeafSync(ddp, 2)


def test_what_ddp_cannot_do_is_refused(pool):
    pool(2).call(under_static_graph)
    pool(2).call(with_a_parameter_that_ddp_ignores)


def killed_in_its_last_leaf(comm):
    group = standing_group(comm)
    model = torch.nn.Linear(3, 2)
    sync = LeafSync(model, 4, group=group)
    with sync.leaf(sync.local_leaves[0]):
        model(torch.ones(1, 3)).sum().backward()
    try:
        with sync.leaf(sync.local_leaves[1]):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 3)).sum().backward()
    except PeerFailure as error:
        with pytest.raises(ConfigurationError, match="cannot go on: leaf 1 of step 0 raised Peer"):
            sync.finish()
        return str(error), model.weight.grad


def test_a_rank_that_is_killed_is_named_and_no_average_is_there():
    with Ranks(2, module="tests.torch.programs") as ranks:
        survivor, killed = ranks.call(killed_in_its_last_leaf)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None
    said, gradient = survivor.result
    assert "rank 1" in said
    assert gradient is None


# --- On one rank.


@pytest.fixture
def alone():
    with pc.init(rank=0, size=1) as comm:
        yield comm


@pytest.fixture
def made(alone):
    """A model and its sync, of 4 leaves."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    sync = LeafSync(model, 4, group=alone)
    yield model, sync
    sync.close()


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


def twice(model, sync):
    with sync.leaf(0):
        backward(model)
        backward(model)


def again(model, sync):
    for _ in range(2):
        with sync.leaf(0):
            backward(model)


def none(model, sync):
    with sync.leaf(1):
        model(torch.ones(2, 3))


def lacking(model, sync):
    for leaf in (0, 2):
        with sync.leaf(leaf):
            backward(model)
    sync.finish()


def nested(model, sync):
    with sync.leaf(0), sync.leaf(1):
        backward(model)


def late(model, sync):
    with sync.leaf(0):
        loss = model(torch.ones(2, 3)).sum()
        backward(model)
    loss.backward()


def swallowed(model, sync):
    with sync.leaf(0):
        backward(model)
        with suppress(ConfigurationError):
            backward(model)


def unfrozen(model, sync):
    model.append(torch.nn.Linear(1, 1))
    with sync.leaf(0):
        backward(model)


def frozen(model, sync):
    model[2].weight.requires_grad_(False)
    sync.finish()


def steps_inside(model, sync):
    with sync.leaf(0):
        backward(model)
        torch.optim.SGD(model.parameters()).step()


def written_to(model, sync):
    model.register_forward_pre_hook(lambda *_: model[0].weight.detach().clamp_(-1, 1))
    with sync.leaf(0):
        backward(model)


def hooked(model, sync):
    with sync.leaf(0):
        backward(model)
    model[0].bias.register_post_accumulate_grad_hook(steps_inside)
    with sync.leaf(1):
        backward(model)


def taken(model, sync):
    hooks = model[0].bias._post_accumulate_grad_hooks
    with sync.leaf(0):
        ours = hooks.copy()
        hooks.clear()  # hooks run in this order
        hooks.update({-1: lambda parameter: setattr(parameter, "grad", None)} | ours)
        backward(model)


def replaced(model, sync):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    again(model, sync)


def moved(model, sync):
    model.to(torch.bfloat16)
    again(model, sync)


def out_of_turn(model, sync):
    next(iter(LeafSampler(sync, 100, 2)))
    with sync.leaf(0):
        backward(model)
    with sync.leaf(2):
        backward(model)


def some_counted(model, sync):
    with sync.leaf(0, count=3):
        backward(model)
    with sync.leaf(1):
        backward(model)


def no_count(model, sync, counts=(0, 0, 0, 0)):
    for leaf, count in enumerate(counts):
        with sync.leaf(leaf, count=count):
            backward(model)


REFUSED = {
    "a leaf that is not there": (
        lambda model, sync: again(model, FakeLeaf(sync, 4)),
        "leaf 4 is not one of rank 0, which has 0 to 3 of 4",
    ),
    "a leaf twice": (again, "leaf 0 was given to step 0 already, which lacks leaves [1, 2, 3]"),
    "two backwards": (twice, "has come twice in leaf 0"),
    "no backward": (none, "leaf 1 has no backward"),
    "a step that lacks leaves": (lacking, "step 0 lacks leaves [1, 3]"),
    "a leaf inside a leaf": (nested, "leaf 1 begins inside another leaf"),
    "a forward outside": (lambda model, _: backward(model), "a forward of training outside"),
    "a backward outside": (late, "outside a leaf: in `for batch in step`"),
    "an error that the block drops": (swallowed, "has come twice in leaf 0"),
    "a parameter that is added": (unfrozen, "3.weight does, and did not"),
    "a parameter that is frozen": (frozen, "2.weight did, and does not"),
    "a parameter that is replaced": (replaced, "0.weight is another Parameter than when"),
    "another dtype": (moved, "0.weight is torch.bfloat16 (4, 3) on cpu, and was torch.float32 (4"),
    "an optimizer's step in the block": (steps_inside, "SGD steps inside leaf 0, where 0.weight"),
    "a weight that a forward changes": (written_to, "0.weight was changed inside leaf 0"),
    "a hook on a parameter": (hooked, "steps_inside runs in backward on 0.bias"),
    "a gradient that is gone": (taken, "else has taken the gradient of 0.bias in backward"),
    "a leaf out of turn": (out_of_turn, "leaf 2 is out of turn: the LeafSampler's next batch is"),
    "half a leaf": (lambda m, s: again(m, FakeLeaf(s, 0.5)), "leaf is 0.5, which is no integer"),
    "half a count": (lambda m, s: no_count(m, s, [1.5]), "leaf 0: count is 1.5"),
    "a count too large": (lambda m, s: no_count(m, s, [1 << 63]), "has count 9223372036854775808"),
    "counts too large": (lambda m, s: no_count(m, s, [1 << 53] * 4), "must make 1 to 90071992547"),
    "some leaves counted": (some_counted, "all leaves of a step have a count, or none"),
    "no count": (no_count, "the counts make 0"),
}


class FakeLeaf:
    """Asks for a leaf of that number, whatever is asked for."""

    def __init__(self, sync, leaf):
        self._sync, self._leaf = sync, leaf

    def leaf(self, _):
        return self._sync.leaf(self._leaf)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(made, case):
    call, why = REFUSED[case]
    with pytest.raises(ConfigurationError) as raised:
        call(*made)
    assert why in str(raised.value)


def test_a_compiled_model_is_compiled_once_for_all_leaves(made):
    model, sync = made
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                backward(compiled)
    loader = torch.utils.data.DataLoader([0] * 8, batch_sampler=LeafSampler(sync, 8, 2))
    for step in sync.steps(loader, until=6):
        for _ in step:
            backward(compiled)
    assert len(graphs) == 1
    with pytest.raises(Exception, match="outside a leaf"):
        backward(compiled)


def test_after_an_error_in_a_leaf_nothing_goes_on(made):
    _, sync = made
    with pytest.raises(KeyError), sync.leaf(0):
        raise KeyError("data")
    with pytest.raises(ConfigurationError, match="leaf 0 of step 0 raised KeyError"):
        sync.leaf(1).__enter__()


def with_a_hook():
    model = torch.nn.Linear(1, 1)
    model.bias.register_post_accumulate_grad_hook(steps_inside)
    return model


def with_an_optimizer_in_backward():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = torch.nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def with_a_sparse_buffer():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return model


def of_a_subclass():
    with FakeTensorMode():
        return torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_a_hook(), "steps_inside runs in backward on bias"),
        (with_an_optimizer_in_backward(), "SGD runs in backward on weight"),
        (with_a_sparse_buffer(), "mask is torch.sparse_coo, .* make it dense"),
        (of_a_subclass(), "weight is a FakeTensor"),
        (torch.nn.LazyLinear(1), "weight has no shape yet, .* lazy: run a forward first"),
        (torch.nn.Linear(1, 1, dtype=torch.float64), "weight has dtype torch.float64"),
        (torch.nn.Linear(1, 1, device="meta"), "weight is on meta"),
        (torch.nn.ReLU(), "no parameter"),
    ],
)
def test_models_that_cannot_be_taken(alone, model, why):
    with pytest.raises(ConfigurationError, match=why):
        LeafSync(model, 2, group=alone)


def test_sparse_gradients_are_refused(alone):
    model = torch.nn.Embedding(5, 2, sparse=True)
    sync = LeafSync(model, 1, group=alone)
    with pytest.raises(ConfigurationError, match="gradient of weight is sparse"), sync.leaf(0):
        model(torch.tensor([1])).sum().backward()


def test_a_model_may_be_copied_saved_evaluated_and_let_go(made):
    model, sync = made
    copy.deepcopy(model)(torch.ones(1, 3))
    pickle.loads(pickle.dumps(model))(torch.ones(1, 3))
    model.eval()(torch.ones(1, 3))
    with torch.no_grad():
        model.train()(torch.ones(1, 3))
    sync.close()
    backward(model)
    assert model[0].weight.grad is not None


# --- Random numbers, samples, checkpoints of runs.


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_what_is_drawn_follows_from_the_leaf_and_leaves_no_trace(made):
    model, sync = made
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draws()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    drawn = {}
    for leaf in (2, 0, 3, 1):
        with sync.leaf(leaf):
            drawn[leaf] = draws()
            backward(model)
    assert draws() == expected
    for leaf in range(4):
        torch.manual_seed(leaf)  # what others draw does not matter
        with sync.leaf(leaf):
            drawn[leaf + 4] = draws()
            backward(model)
    assert len({*drawn.values()}) == 8  # another step draws anew
    sync.load_state_dict({**sync.state_dict(), "step": 0})
    with sync.leaf(torch.tensor(3)):
        assert draws() == drawn[3]
        backward(model)
    with sync.leaf(True):
        assert draws() == drawn[1]
        backward(model)


class Dealt:
    """What a sampler reads of a LeafSync."""

    def __init__(self, rank, size, step=0):
        self.leaves, self.seed, self.step = 6, 1, step
        self.local_leaves = leaves_of(rank, size, 6)

    def leaves_at(self, step):
        return self.local_leaves


def drawn(ranks, steps, first=0):
    """The samples of each leaf and step."""
    found = {}
    for rank in range(ranks):
        sync = Dealt(rank, ranks, first)
        batches = iter(LeafSampler(sync, 50, 2))
        for step in range(first, steps):
            found |= {(step, leaf): next(batches) for leaf in sync.local_leaves}
    return found


def test_a_leaf_has_the_same_samples_on_any_number_of_ranks():
    whole = drawn(1, 9)
    assert all(drawn(ranks, 9) == whole for ranks in (2, 4, 8))
    resumed = drawn(3, 9, first=5)
    assert resumed == {key: whole[key] for key in resumed}
    epochs = [[x for s in range(e, e + 4) for i in range(6) for x in whole[s, i]] for e in (0, 4)]
    assert all(len({*epoch}) == 48 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_rank_without_leaves_has_no_samples():
    idle = next(each for each in (Dealt(rank, 8) for rank in range(8)) if not each.local_leaves)
    batches = LeafSampler(idle, 50, 2)
    for workers in (0, 1):  # which draw ahead
        loader = torch.utils.data.DataLoader([0] * 50, batch_sampler=batches, num_workers=workers)
        assert next(iter(loader), None) is None


def test_samplers_refuse_too_few_samples():
    with pytest.raises(ConfigurationError, match="takes 12 samples, and the dataset has 11"):
        LeafSampler(Dealt(0, 1), 11, 2)
    with pytest.raises(ConfigurationError, match=r"micro_batch is 2\.0, which is no integer"):
        LeafSampler(Dealt(0, 1), 11, 2.0)


def test_a_sampler_without_an_end_has_no_length():
    loader = torch.utils.data.DataLoader([0] * 50, batch_sampler=LeafSampler(Dealt(0, 1), 50, 2))
    with pytest.raises(TypeError, match=r"steps_per_epoch \(4\) steps of 6 batches"):
        len(loader)


def test_a_checkpoint_of_another_run_is_refused(made):
    _, sync = made
    with pytest.raises(ConfigurationError, match="has seed 9, and this LeafSync 0"):
        sync.load_state_dict({**sync.state_dict(), "seed": 9})
    with pytest.raises(ConfigurationError, match=r"lacks .* no LeafSync's"):
        sync.load_state_dict({})


def test_a_model_has_one_leaf_sync(made, alone):
    model, sync = made
    with pytest.raises(ConfigurationError, match=r"0\.weight is another LeafSync's already"):
        LeafSync(torch.nn.Sequential(model), 2, group=alone)
    sync.close()
    LeafSync(model, 2, group=alone).close()


def test_a_frozen_model_of_another_leaf_sync_may_run_in_a_leaf(made, alone):
    generator, sync = torch.nn.Linear(2, 3), None
    discriminator, _ = made
    sync = LeafSync(generator, 1, group=alone)
    discriminator.requires_grad_(False)
    with sync.leaf(0):
        discriminator(generator(torch.ones(2, 2))).sum().backward()
    discriminator.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="a forward of training outside"), sync.leaf(0):
        discriminator(generator(torch.ones(2, 2)))


def test_a_leaf_is_compared_with_another_launchs(made, tmp_path, capsys):
    model, sync = made
    path = tmp_path / "leaf.json"

    def compute(factor=1.0):
        x = model[0](torch.ones(2, 3))
        (model[2](model[1](x * factor)) + x.sum() * 0).sum().backward()

    assert sync.compare_leaf(path, 2, compute) is None
    assert sync.compare_leaf(path, 2, compute) is None
    assert sync.compare_leaf(path, 2, lambda: compute(1.5)) == "2.weight"
    said = capsys.readouterr().out.splitlines()
    assert "wrote 4 gradients" in said[0]
    threads = torch.get_num_threads()
    assert f"all 4 gradients have the same bits (here {threads} thread(s)" in said[1]
    assert "2.weight is the first of 3 of 4 gradients that differ" in said[2]
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(ConfigurationError, match="is of weights"):
        sync.compare_leaf(path, 2, compute)


def test_a_comparison_leaves_no_trace(alone, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    sync = LeafSync(model, 1, group=alone)

    def compute():
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()

    with sync.leaf(0):
        compute()
    sync.finish()
    gradients = [(each.grad, each.grad.clone()) for each in model.parameters()]
    buffers = [each.clone() for each in model.buffers()]
    with torch.no_grad():
        model[0].weight.mul_(3)  # others than those of the leaf before
    sync.compare_leaf(tmp_path / "leaf.json", 0, compute)
    assert all(now.grad is was for now, (was, _) in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(*each) for each in gradients)
    assert all(torch.equal(*each) for each in zip(model.buffers(), buffers, strict=True))


def test_what_is_no_comparison_is_refused(made, tmp_path):
    model, sync = made
    path = tmp_path / "leaf.json"
    with pytest.raises(ConfigurationError, match="leaf is 4, not 0 to 3"):
        sync.compare_leaf(path, 4, lambda: backward(model))
    with pytest.raises(ConfigurationError, match="of leaf 3 has no backward"):
        sync.compare_leaf(path, 3, lambda: None)
    assert not path.exists()
    for text in ("{", "[]", '{"leaf": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"leaf\.json is there, and is not of"):
            sync.compare_leaf(path, 3, lambda: backward(model))


def test_a_comparison_needs_no_hard_links(made, tmp_path, monkeypatch):
    model, sync = made
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError()))
    for _ in range(2):
        assert sync.compare_leaf(tmp_path / "leaf.json", 3, lambda: backward(model)) is None
    assert [each.name for each in tmp_path.iterdir()] == ["leaf.json"]
