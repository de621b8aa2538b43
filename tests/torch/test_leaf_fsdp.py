"""`LeafSync` of a model that FSDP2's `fully_shard` has sharded: the bits that it has without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo  # so that forks need not import it for fully_shard
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pycollective import (
    CollectiveAborted,
    CollectiveMismatch,
    ConfigurationError,
    reference,
)
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves import sync as leaf_sync
from pycollective.torch.leaves.place import OnCpu
from tests.harness import RankPool
from tests.inputs import awkward, order_sensitive, same_bits
from tests.torch.groups import Gradient, standing_group, to_numpy, to_torch
from tests.torch.ordered_groups import own_group, standing

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
WIDE = MixedPrecisionPolicy(reduce_dtype=FP32)
# Of each layer's parameters: uneven over ranks, fewer rows than ranks, and one that odd leaves do
# not use.
SHAPES = [(7, 5), (1,), (40, 6), (3, 2)]
COUNTS = [int(np.prod(shape)) for shape in SHAPES]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], RankPool]]:
    """`ranks_of(n)`: n ranks, forks that have this module."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size, module=__name__)
        return pools[size]

    yield get
    for each in pools.values():
        each.close()


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


# --- Bits.


class Layer(torch.nn.Module):
    """Its gradients are what it is given; those of its last parameter only in even leaves."""

    def __init__(self, dtype):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(*each, dtype=dtype) for each in SHAPES)

    def forward(self, flat, leaf):
        gradients = flat.split(COUNTS)
        used = [*zip(self.parts, gradients, strict=True)][: 3 if leaf % 2 else 4]
        return sum(Gradient.apply(part, each.view_as(part)).float() for part, each in used)


class Layers(torch.nn.Module):
    """Three: one that all leaves use, one that the first some of a step do, and one unused."""

    def __init__(self, some, dtype):
        super().__init__()
        self.some = some
        self.each = torch.nn.ModuleList(Layer(dtype) for _ in range(3))

    def forward(self, flats, leaf):
        used = 2 if leaf < self.some else 1
        return sum(
            each(flat, leaf) for each, flat in zip(self.each[:used], flats[:used], strict=True)
        )


def leaves_of(inputs, dtype, leaves):
    flat = inputs(dtype, leaves, 2 * sum(COUNTS))
    return [np.split(each, 2) for each in flat]


def half_of(leaves, ranks):
    """So many leaves are those of half the rounds."""
    return (leaves // ranks + 1) // 2 * ranks


def averages(comm, backend, policy, dtype, leaves, inputs, options, counts):
    """Of the same leaves in two steps: each parameter's."""
    torch.set_num_threads(1)
    group = standing(comm, backend)
    model = Layers(half_of(leaves, comm.size), dtype)
    for each in model.each:
        fully_shard(each, mesh=mesh_of(group), mp_policy=policy)
    sync = LeafSync(model, leaves, group=group, **options)
    compute = policy.param_dtype or dtype
    given = leaves_of(inputs, str(compute).removeprefix("torch."), leaves)
    found = []
    for _ in range(2):
        for leaf in sync.local_leaves:
            flats = [to_torch(each) for each in given[leaf]]
            with sync.leaf(leaf, counts and counts[leaf]):
                model(flats, leaf).backward()
        sync.finish()
        found.append([to_numpy(each.grad.full_tensor()).ravel() for each in model.parameters()])
    sync.close()
    return found


def wanted(dtype, leaves, some, inputs, out, divisor):
    given = leaves_of(inputs, dtype, leaves)
    for layer in range(3):
        for number, end in enumerate(np.cumsum(COUNTS)):
            part = slice(end - COUNTS[number], end)
            terms = [
                given[leaf][layer][part]
                if layer == 0 or (layer == 1 and leaf < some)
                else np.zeros(COUNTS[number], given[0][0].dtype)
                for leaf in range(leaves)
            ]
            if number == 3:
                terms[1::2] = [np.zeros_like(each) for each in terms[1::2]]
            yield reference.reduce(
                [each.astype(np.float32) for each in terms] if out == np.float32 else terms,
                "avg",
                divisor=divisor,
            )


def check(ranks_of, ranks, policy, dtype, leaves, inputs, backend="gloo", counts=None, **options):
    compute = str(policy.param_dtype or dtype).removeprefix("torch.")
    out = to_numpy(torch.zeros(1, dtype=options.get("grad_dtype") or dtype)).dtype
    some = half_of(leaves, ranks)
    want = [*wanted(compute, leaves, some, inputs, out, counts and sum(counts))]
    given = backend, policy, dtype, leaves, inputs, options, counts
    for rank, steps in enumerate(ranks_of(ranks).call(averages, *given)):
        for step in steps:
            for number, each in enumerate(zip(step, want, strict=True)):
                assert same_bits(*each), (rank, number)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.storm), 3])
def test_gradients_are_the_references_average(ranks_of, ranks):
    check(ranks_of, ranks, PLAIN, FP32, 12, order_sensitive)
    check(ranks_of, ranks, PLAIN, FP32, 6, awkward)
    check(ranks_of, ranks, MIXED, FP32, 6 * ranks, order_sensitive)
    check(ranks_of, ranks, MIXED, FP32, 2 * ranks, awkward)
    check(ranks_of, ranks, PLAIN, FP32, ranks, order_sensitive)
    check(ranks_of, ranks, WIDE, BF16, 6, order_sensitive)
    check(ranks_of, ranks, PLAIN, BF16, 6, order_sensitive, grad_dtype=FP32)
    check(ranks_of, ranks, PLAIN, FP32, 6, order_sensitive, counts=[1, 1 << 24, 0, 3, 0, 5])


def test_gradients_over_the_backend_pycollective(ranks_of):
    check(ranks_of, 3, MIXED, FP32, 6, order_sensitive, "pycollective")


@pytest.mark.storm
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_gradients_of_many_leaves(ranks_of, ranks):
    for rounds in (1, 2, 3, 5, 8, 11):
        for inputs in (awkward, order_sensitive):
            for policy, dtype in ((PLAIN, FP32), (MIXED, FP32), (WIDE, BF16)):
                check(ranks_of, ranks, policy, dtype, rounds * ranks, inputs)


# --- A training.


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.into = torch.nn.Linear(8, 12)
        self.back = torch.nn.Linear(12, 8)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.into(self.norm(x)))
        return x + self.drop(self.back(hidden))


class Net(torch.nn.Module):
    """Has a frozen weight, a module that nothing uses, and a checkpoint of activations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.unused = torch.nn.Linear(3, 5)
        self.head = torch.nn.Linear(8, 11)
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.twice = False

    def forward(self, x):
        hidden = self.blocks[0](self.embedding(x) * self.scale)
        if self.twice:
            hidden = self.blocks[0](hidden)
        return self.head(checkpoint(self.blocks[1], hidden, use_reentrant=False))


def sharded(mesh, make=Net, **options):
    model = make()
    for each in (*model.blocks, model.unused, model):
        fully_shard(each, mesh=mesh, **options)
    return model


WAYS = [
    *("fully_shard", "weights stay whole"),
    pytest.param("compiled", marks=pytest.mark.storm),  # seconds
]


def digest(tensors):
    found = hashlib.sha256()
    for each in tensors:
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        found.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def evaluated(model, data):
    with torch.no_grad():
        said = digest([model.eval()(data[:2])])
        model.train()
    return said


def training(comm, way, counted):
    """Digests of weights, logs and norms of some steps; `way` None is without fully_shard."""
    torch.set_num_threads(1)
    group = standing(comm)
    whole = {"reshard_after_forward": False} if way == "weights stay whole" else {}
    model = Net() if way is None else sharded(mesh_of(group), **whole)
    parameters = [*model.parameters()]
    run = model
    if whole:
        model.set_reshard_after_backward(False)
    if way == "compiled":
        run = torch.compile(model, backend="eager")
    sync = LeafSync(run, 6, seed=3, group=group)
    optimizer = torch.optim.AdamW([each for each in parameters if each.requires_grad], 1e-2)
    data = torch.randint(11, (60, 4), generator=torch.Generator().manual_seed(1))
    sampler = LeafSampler(sync, len(data), micro_batch=2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    found = []
    for step in sync.steps(loader, until=3):
        for x in step:
            if counted:
                step.count(3 + step.leaf)
            logits = run(x[:, :-1]).flatten(0, 1)
            kind = "sum" if counted else "mean"
            loss = torch.nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction=kind)
            loss.backward()
            step.log(loss=loss)
        norm = sync.clip_grad_norm_(0.1)
        found.append((step.logged["loss"], norm.item(), digest([parameters[0].grad])))
        if step.number % 2:  # leaves weights whole, which the optimizer then changes
            evaluated(run, data)
            optimizer.step()
        else:
            optimizer.step()
            found.append(evaluated(run, data))
    state = sync.state_dict()
    sync.close()
    return digest(parameters), found, state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "counted",
    [pytest.param(False, marks=pytest.mark.storm), True],
    ids=["mean", "counted"],
)
def test_a_training_is_that_without_fully_shard(ranks_of, way, counted):
    [want] = ranks_of(1).call(training, None, counted)
    for ranks in (1, 2, 3):
        assert ranks_of(ranks).call(training, way, counted) == [want] * ranks


def average_of_one(comm, shape, dimension):
    """The average of a weight of this shape, sharded by this dimension."""
    group = standing(comm)
    torch.set_num_threads(1)
    model = Given(shape)
    fully_shard(model, mesh=mesh_of(group), shard_placement_fn=lambda _: Shard(dimension))
    sync = LeafSync(model, 4, group=group)
    leaves = order_sensitive("float32", 4, int(np.prod(shape)))
    for leaf in sync.local_leaves:
        with sync.leaf(leaf):
            model(to_torch(leaves[leaf]).view(shape)).backward()
    sync.finish()
    found = to_numpy(model.weight.grad.full_tensor())
    sync.close()
    return found


class Given(torch.nn.Module):
    """Its weight has the gradient that it is given."""

    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, gradient):
        return Gradient.apply(self.weight, gradient)


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [((8, 12), 1), ((1100, 1024), 0)],
    ids=["by columns", "more than travels at once"],
)
def test_a_weight(ranks_of, shape, dimension):
    leaves = order_sensitive("float32", 4, int(np.prod(shape)))
    want = reference.reduce(leaves, "avg").reshape(shape)
    for found in ranks_of(2).call(average_of_one, shape, dimension):
        assert same_bits(found, want)


# --- What a LeafSync takes over, and what it holds.


def taken_over(comm):
    torch.set_num_threads(1)
    group = standing(comm)
    model = sharded(mesh_of(group))
    [block] = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
    # Whole otherwise, and this rank's: LeafSync sends what is not sharded.
    model.scale.fill_(comm.rank + 1)
    names = ["_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "reduce_grads"]
    names += ["gradient_divide_factor", "force_sum_reduction_for_comms"]
    names += ["reduce_scatter_unused_params"]
    before = [getattr(block, each) for each in names]
    sync = LeafSync(model, 8, group=group)
    told = sync.nbytes
    for leaf in sync.local_leaves:
        assert all(each.grad is None for each in model.parameters())
        with sync.leaf(leaf):
            model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    sync.finish()
    held = sum(each.accumulator.nbytes + each.averages.nbytes for each in sync._buckets)
    assert told == held
    sync.close()
    assert [getattr(block, each) for each in names] == before
    return model.scale.item(), [*sync.local_leaves], told


def test_what_is_taken_over_is_given_back(ranks_of):
    first, second = ranks_of(2).call(taken_over)
    assert first[0] == second[0] == 1
    assert first[1:2] + second[1:2] == ([0, 2, 4, 6], [1, 3, 5, 7])


# --- Failures.


def heard(comm, backend):
    """What ranks raise where rank 1 raises in a leaf; a step of another LeafSync's behind it, and
    one of a model that had no error."""
    torch.set_num_threads(1)
    with own_group(comm, timeout=timedelta(seconds=20)) as own:
        group = own if backend == "gloo" else standing_group(comm)
        failed, fresh = sharded(mesh_of(group)), sharded(mesh_of(group))
        x = torch.zeros(1, 3, dtype=torch.int64)
        said, found = [], []
        for model, fails in ((failed, True), (failed, False), (fresh, False)):
            sync = LeafSync(model, 2 * comm.size, group=group)
            try:
                for leaf in sync.local_leaves:
                    with sync.leaf(leaf):
                        loss = model(x).sum()
                        if fails and leaf == comm.size + 1:
                            raise KeyError("no sample")
                        loss.backward()
            except (KeyError, CollectiveAborted) as error:
                said.append(f"{type(error).__name__}: {error}")
            dist.barrier()
            sync.close()
            if not fails:  # of this rank's shards
                grads = [each.grad for each in model.parameters() if each.requires_grad]
                found.append(digest([each.to_local() for each in grads]))
        return said, found


@pytest.mark.parametrize("backend", ["gloo", "pycollective"])
def test_an_error_in_a_leaf_is_heard_by_all_and_another_leaf_sync_can_follow(ranks_of, backend):
    found = ranks_of(3).call(heard, backend)
    assert found[1][0] == ["KeyError: 'no sample'"]
    for rank in (0, 2):
        [said] = found[rank][0]
        assert said.startswith("CollectiveAborted")
        assert "leaf 4 of step 0 raised KeyError: 'no sample'" in said
    for _, (after, fresh) in found:
        assert after == fresh


def left_behind(comm):
    """The gradients of torch's own step behind a LeafSync in which a backward has raised half way,
    and those of a model that never had one."""
    torch.set_num_threads(1)
    group, x, found = standing(comm), torch.zeros(1, 3, dtype=torch.int64), []
    for had_one in (False, True):
        model = sharded(mesh_of(group))
        if had_one:
            sync = LeafSync(model, comm.size, group=group)
            with pytest.raises(KeyError, match="half way"), sync.leaf(comm.rank):
                fail_half_way(model, x)
            sync.close()
        model(x).sum().backward()
        grads = [each.grad for each in model.parameters()]
        found.append(digest([each for each in grads if each is not None]))
    return found


def fail_half_way(model, x):
    def fail(_):
        raise KeyError("half way")

    def on_output(_module, _args, out):
        out.register_hook(fail)

    handle = model.blocks[0].register_forward_hook(on_output)
    try:
        model(x).sum().backward()
    finally:
        handle.remove()


def left_by_torch(comm):
    """The gradients of a step of a model that has kept a backward of torch's own, and of one that
    has not."""
    torch.set_num_threads(1)
    group, x, found = standing(comm), torch.zeros(1, 3, dtype=torch.int64), []
    for kept in (False, True):
        model = sharded(mesh_of(group))
        if kept:
            model.set_requires_gradient_sync(False)
            model(x).sum().backward()
            model.set_requires_gradient_sync(True)
        sync = LeafSync(model, comm.size, group=group)
        with sync.leaf(comm.rank):
            model(x).sum().backward()
        sync.finish()
        found.append(digest([each.grad for each in model.parameters() if each.requires_grad]))
        sync.close()
    return found


def test_what_torch_has_kept_is_none_of_a_step(ranks_of):
    for without, kept in ranks_of(2).call(left_by_torch):
        assert without == kept


def test_a_backward_that_raised_leaves_nothing_to_torch(ranks_of):
    for alone, behind in ranks_of(2).call(left_behind):
        assert alone == behind


def prefetched(comm, peek):
    """Weights after steps between which, if asked, a forward of a part has others on their way."""
    torch.set_num_threads(1)
    group = standing(comm)
    model = sharded(mesh_of(group))
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    sync = LeafSync(model, 2 * comm.size, group=group)
    optimizer = torch.optim.SGD([each for _, each in sync._model.trained], 0.1)
    for step in range(3):
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                model(torch.full((1, 3), step + leaf)).sum().backward()
        sync.finish()
        if peek:
            with torch.no_grad():
                first(torch.ones(1, 3, 8))
        optimizer.step()
    sync.close()
    return digest(model.parameters())


def test_weights_on_their_way_between_steps_are_not_used(ranks_of):
    assert ranks_of(2).call(prefetched, True) == ranks_of(2).call(prefetched, False)


def counted_apart(comm):
    """What ranks raise of which only the first counts."""
    torch.set_num_threads(1)
    with own_group(comm, timeout=timedelta(seconds=20)) as group:
        model = sharded(mesh_of(group))
        sync = LeafSync(model, 2, group=group)
        try:
            with sync.leaf(comm.rank, None if comm.rank else 3):
                model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
        except CollectiveMismatch as error:
            return str(error)
        finally:
            dist.barrier()
            sync.close()


def test_ranks_of_which_some_count_are_told_so(ranks_of):
    for said in ranks_of(2).call(counted_apart):
        assert "1 of 2 leaves have a count" in said


def sharded_here(comm):
    """What ranks raise of which only the first has sharded its model."""
    torch.set_num_threads(1)
    group = standing(comm)
    model = Net() if comm.rank else sharded(mesh_of(group))
    with pytest.raises((ConfigurationError, CollectiveMismatch)) as raised:
        LeafSync(model, 2, group=group)
    return str(raised.value)


def test_ranks_of_which_some_shard_are_told_so(ranks_of):
    for said in ranks_of(2).call(sharded_here):
        assert "have other ranks of fully_shard's mesh than rank 0: None" in said


class Either(torch.nn.Module):
    """Uses one of two modules, or both."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

    def forward(self, x, which):
        return sum(getattr(self, each)(x).sum() for each in which)


def apart(comm, used):
    """What ranks raise whose leaves use other modules."""
    torch.set_num_threads(1)
    with own_group(comm, timeout=timedelta(seconds=20)) as group:
        model = Either()
        for each in (model.one, model.other):
            fully_shard(each, mesh=mesh_of(group))
        sync = LeafSync(model, 2, group=group)
        try:
            with sync.leaf(comm.rank):
                model(torch.ones(1, 3), used[comm.rank]).backward()
        except CollectiveMismatch as error:
            return str(error)
        finally:
            dist.barrier()
            sync.close()


APART = {
    "others": (
        (["one"], ["other"]),
        "rank 1 gathers weights of other in round 0, and rank 0 gathers weights of one in round 0",
    ),
    "more": (
        (["one", "other"], ["one"]),
        "rank 1 reduces gradients of one in round 0, and rank 0 gathers weights of other in",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_ranks_whose_leaves_use_other_modules_are_told_so(ranks_of, case):
    used, why = APART[case]
    for said in ranks_of(2).call(apart, used):
        assert why in said


# --- What is refused.


def train(model, sync):
    for leaf in sync.local_leaves:
        with sync.leaf(leaf):
            model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def mesh_for(size):
    return init_device_mesh("cpu", (size,))


def of_two_dimensions(size):
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicas", "shards"))
    return LeafSync(sharded(mesh), 4)


def a_part_whole(size):
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh_for(size))
    LeafSync(model, 4)


def by_several_meshes(size):
    one, two = mesh_for(size), mesh_for(size)
    model = Net()
    for block, mesh in zip(model.blocks, (one, two), strict=True):
        fully_shard(block, mesh=mesh)
    groups = [each._get_fsdp_state()._fsdp_param_groups for each in model.blocks]
    groups[0] += groups[1]  # as shard_placement_fn makes them
    LeafSync(model, 4)


def of(leaves=4, **options):
    given = {
        name: options.pop(name) for name in [*options] if name.startswith(("mp_", "off", "re"))
    }
    return lambda size: LeafSync(sharded(mesh_for(size), **given), leaves, **options)


def on_a_gpu(size):
    place = OnCpu()
    place.device = torch.device("cuda", 0)
    with mock.patch.object(leaf_sync, "place_of", return_value=place):
        of()(size)


def with_ddp(size):
    model = torch.nn.ModuleDict({"sharded": sharded(mesh_for(size)), "not": torch.nn.Linear(2, 2)})
    model["not"] = DistributedDataParallel(model["not"])
    LeafSync(model, 4, group=mesh_for(size).get_group())


def made(size):
    model = sharded(mesh_for(size))
    return model, LeafSync(model, 4 * size)


def with_a_hook(size):
    model = sharded(mesh_of(dist.group.WORLD))
    model.blocks[1].set_all_reduce_hook(lambda gradients: None)
    LeafSync(model, 4)


def without_sync(size):
    model = sharded(mesh_for(size))
    model.set_requires_gradient_sync(False)
    LeafSync(model, 4)


def without_sync_later(size):
    model, sync = made(size)
    model.blocks[1].set_requires_gradient_sync(False)
    train(model, sync)


def without_sync_in_a_leaf(size):
    model, sync = made(size)
    with sync.leaf(sync.local_leaves[0]):
        model.blocks[1].set_requires_gradient_sync(False)
        model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def another_comm(size):
    model, sync = made(size)
    model.set_custom_reduce_scatter(None)
    train(model, sync)


def used_twice(size):
    model, sync = made(size)
    model.twice = True
    train(model, sync)


def past_forward(size):
    model, sync = made(size)
    with sync.leaf(sync.local_leaves[0]):
        sum(each.pow(2).sum() for each in model.parameters()).full_tensor().backward()


def out_of_turn(size):
    _, sync = made(size)
    with sync.leaf(sync.local_leaves[1]):
        pass


def another_ranks(size):
    _, sync = made(size)
    with sync.leaf(sync.local_leaves[0] + 1):
        pass


def compared(size):
    made(size)[1].compare_leaf("never", 0, lambda: None)


def by_cost(size):
    made(size)[1].steps([], cost=len)


REFUSED = {
    "leaves that ranks do not divide": (of(5), "leaves is 5, and 2 ranks compute fully_shard's"),
    "HSDP": (of_two_dimensions, "LeafSync takes one dimension, over which parameters are sharded"),
    "a part whole": (a_part_whole, "embedding.weight requires a gradient, and fully_shard has not"),
    "several groups": (
        by_several_meshes,
        "blocks.0 has 2 groups of parameters, by several meshes: give one",
    ),
    "offload": (of(offload_policy=CPUOffloadPolicy(pin_memory=False)), "has a CPUOffloadPolicy"),
    "weights that some ranks gather": (
        *(of(reshard_after_forward=2), "has reshard_after_forward=2, by which some ranks gather"),
    ),
    "a GPU": (on_a_gpu, "parameters on cuda:0: LeafSync takes sharded ones on CPUs"),
    "rounded in reduction": (
        of(mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16)),
        "are torch.float32, and reduced in torch.bfloat16",
    ),
    "bucket_cap_mb": (of(bucket_cap_mb=1), "leave bucket_cap_mb out"),
    "ledger": (of(ledger="never"), "a ledger is of whole gradients, and with fully_shard no rank"),
    "check_every": (of(check_every=1), "compares whole weights on CPUs, and these are sharded"),
    "DDP too": (with_ddp, "has DistributedDataParallel and fully_shard"),
    "an all-reduce hook": (with_a_hook, "blocks.1 has an all-reduce hook, as HSDP has"),
    "no sync": (without_sync, "Net has set_requires_gradient_sync(False), and LeafSync takes"),
    "no sync later": (without_sync_later, "blocks.1 has set_requires_gradient_sync(False)"),
    "no sync in a leaf": (without_sync_in_a_leaf, "blocks.1 has set_requires_gradient_sync(False)"),
    "another reduce-scatter": (another_comm, "Net has _reduce_scatter_comm None now"),
    "a module twice": (used_twice, "the gradient of blocks.0.norm.weight has come twice in leaf"),
    "past forward": (past_forward, "has come past fully_shard"),
    "a leaf out of turn": (out_of_turn, "is out of turn: with fully_shard leaf"),
    "another rank's leaf": (another_ranks, " in steps of 2 of 8"),
    "compare_leaf": (compared, "compare_leaf: with fully_shard no rank has a leaf's gradients"),
    "a cost": (by_cost, "leave cost out"),
}


def refused(comm, case):
    torch.set_num_threads(1)
    standing_group(comm)
    try:
        REFUSED[case][0](comm.size)
    except (ConfigurationError, CollectiveAborted) as error:  # the latter tells what another raised
        return str(error)
    finally:
        dist.barrier()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(ranks_of, case):
    ranks = 4 if case == "weights that some ranks gather" else 2
    for said in ranks_of(ranks).call(refused, case):
        assert REFUSED[case][1] in said


def after_a_forward_outside(comm):
    torch.set_num_threads(1)
    group = standing(comm)
    found = []
    for forward in (False, True):
        model = sharded(mesh_of(group))
        sync = LeafSync(model, 4, group=group)
        if forward and comm.rank == 0:  # so nothing is sent
            with pytest.raises(ConfigurationError, match="a forward of training outside a leaf"):
                model(torch.zeros(1, 3, dtype=torch.int64))
        train(model, sync)
        sync.close()
        found.append(digest([each.grad for each in model.parameters() if each.requires_grad]))
    return found


def test_a_forward_that_was_refused_leaves_no_trace(ranks_of):
    for before, after in ranks_of(2).call(after_a_forward_outside):
        assert before == after
