"""DistributedDataParallel with the hook over Gloo: the contract's bits, whatever its options,
and those of the backend pycollective and of ranks that mpiexec starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycollective import reference
from pycollective.torch import ordered
from tests.harness import ROOT, PerRank
from tests.inputs import order_sensitive, same_bits
from tests.launchers import find, parts
from tests.torch.groups import standing_group, to_numpy, to_torch
from tests.torch.ordered_groups import apart, laid_out, standing
from tests.torch.test_ddp import OPTIONS, SMALL, TINY, WHOLE, Net, OneWeight, train
from tests.torch.trainings import digest, under_ddp

SITE_PACKAGES = Path(torch.__file__).parent.parent


def over(group):
    """Registers the hook, which averages over the group."""
    return lambda model: model.register_comm_hook(group, ordered.hook)


# --- Bits.


def averaged_gradient(comm, gradient, hosts):
    group = standing(comm)
    tensor = to_torch(gradient)
    with laid_out(group, hosts):
        model = under_ddp(ordered.hook, group)(OneWeight(tensor.numel(), tensor.dtype))
        model(tensor).backward()
        return to_numpy(model.module.weight.grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("hosts", [apart(2), apart(3), ((0, 1), (2,)), ((0, 1), (2, 3))])
def test_the_hook_gives_exactly_the_references_average(pool, hosts, dtype):
    ranks = sum(map(len, hosts))
    gradients = order_sensitive(dtype, ranks, 10_000)
    for got in pool(ranks).call(averaged_gradient, PerRank(gradients), hosts):
        assert same_bits(got, reference.reduce(gradients, "avg"))


def weights_by_bucket(comm, dtype, caps, hooks):
    """Final weights for each size of buckets, over Gloo, with the hook or as DDP has it."""
    group = standing(comm)
    register = over(group) if hooks else None
    options = {"process_group": group, "dtype": getattr(torch, dtype)}
    with laid_out(group):
        return [train(comm, register, bucket_cap_mb=cap, **options) for cap in caps]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_final_weights_do_not_depend_on_the_bucket_size(pool, dtype):
    outcomes = pool(4).call(weights_by_bucket, dtype, [TINY, SMALL, WHOLE], True)
    assert {weights for rank in outcomes for weights in rank} == {outcomes[0][0]}


def test_by_gloo_alone_they_do(pool):
    """It is what the hook is for, and the inputs show it."""
    caps = [TINY, SMALL, WHOLE]
    assert len({*pool(4).call(weights_by_bucket, "float32", caps, False)[0]}) == len(caps)


# --- What DDP can be told.


def weights_with(comm, options):
    """Final weights by the hook over Gloo, and over the backend pycollective."""
    world, group = standing_group(comm), standing(comm)
    with laid_out(group):
        ours = train(comm, over(group), process_group=group, **options)
    return ours, train(comm, over(world), process_group=world, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_gives_the_weights_of_the_backend_pycollective(pool, name):
    outcomes = pool(3).call(weights_with, OPTIONS[name])
    assert {weights for rank in outcomes for weights in rank} == {outcomes[0][0]}


def uneven(comm, backend):
    """Ranks have more inputs the higher they are; and accumulate every other step."""
    group = standing(comm, backend)
    torch.manual_seed(0)
    with laid_out(group):
        model = under_ddp(ordered.hook, group, bucket_cap_mb=SMALL)(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        random = torch.Generator().manual_seed(comm.rank)
        with model.join():
            for _ in range(2 + comm.rank):
                model(torch.randn(6, 11, generator=random)).square().mean().backward()
                optimizer.step()
        for _ in range(2):
            with model.no_sync():
                model(torch.randn(6, 11, generator=random)).square().mean().backward()
            model(torch.randn(6, 11, generator=random)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return b"".join(to_numpy(each.detach()).tobytes() for each in model.parameters())


def test_join_and_no_sync(pool):
    weights = {
        *pool(3).call(uneven, "gloo"),
        *pool(3).call(uneven, "pycollective"),
    }
    assert len(weights) == 1


def mixed_precision(comm):
    """Under autocast: gradients of this rank alone, and those of DDP."""
    group = standing(comm)
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(64, 90), torch.nn.GELU(), torch.nn.Linear(90, 3))
    model = torch.nn.Sequential(torch.nn.Linear(64, 90), torch.nn.GELU(), torch.nn.Linear(90, 3))
    model.load_state_dict(alone.state_dict())
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(comm.rank)) * 10**comm.rank
    with laid_out(group):
        replica = under_ddp(ordered.hook, group)(model)
        for each in (alone, replica):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x).float().square().mean()
            loss.backward()
    return [[to_numpy(each.grad.reshape(-1)) for each in of.parameters()] for of in (alone, model)]


def test_mixed_precision(pool):
    outcomes = pool(3).call(mixed_precision)
    for number in range(4):
        want = reference.reduce([alone[number] for alone, _ in outcomes], "avg")
        assert all(same_bits(averaged[number], want) for _, averaged in outcomes)


class SumsOverRanks(torch.autograd.Function):
    """As SyncBatchNorm does: a collective in forward, and one in backward, on DDP's own group."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        sums.append(total_of_ranks(x.shape[1], group))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.sums.append(total_of_ranks(3 * gradient.shape[1], ctx.group))
        return gradient, None, None


def total_of_ranks(count, group):
    total = torch.full((count,), dist.get_rank(group) + 1.0)
    dist.all_reduce(total, group=group)
    return total


class Sums(torch.nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(61, 61) for _ in range(6))
        self.group = group
        self.sums: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.group is not None:
                x = SumsOverRanks.apply(x, self.group, self.sums)
        return x


def with_other_collectives(comm):
    """Gradients with the program's own collectives on the group during backward, and without."""
    group = standing(comm)
    found = []
    with laid_out(group):
        for others in (group, None):
            torch.manual_seed(0)
            module = Sums(others)
            model = under_ddp(ordered.hook, group, bucket_cap_mb=SMALL)(module)
            random = torch.Generator().manual_seed(comm.rank)
            for _ in range(4):
                model(torch.randn(5, 61, generator=random)).square().sum().backward()
            total = comm.size * (comm.size + 1) / 2
            assert all(bool((each == total).all()) for each in module.sums)
            assert len(module.sums) == (48 if others else 0)
            found.append(b"".join(to_numpy(each.grad).tobytes() for each in model.parameters()))
    return found


def test_messages_do_not_mix_with_collectives_of_the_main_thread(pool):
    outcomes = pool(3).call(with_other_collectives)
    assert len({weights for rank in outcomes for weights in rank}) == 1


def over_part_of_the_ranks(comm):
    """DDP over pairs of ranks, of which the hook is told by its state alone."""
    standing_group(comm)
    pairs = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    mine = pairs[comm.rank // 2]
    model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=mine)
    model.register_comm_hook(mine, ordered.hook)
    model(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
    gradient = model.module.weight.grad[0, 0].item()
    del model
    dist.destroy_process_group(mine)
    return gradient


def test_the_hook_averages_over_the_group_it_is_given(pool):
    assert pool(4).call(over_part_of_the_ranks) == [1.5, 1.5, 3.5, 3.5]


# --- One digest, however the gradients were averaged.


def digest_over(comm, name, steps, backend, hosts, options):
    group = standing(comm, backend)
    with laid_out(group, hosts):
        return digest(name, steps, comm.rank, comm.size, under_ddp(ordered.hook, group, **options))


def by_gloo(pool, name, steps, hosts, **options):
    """The digest over Gloo, with options of DDP's."""
    ranks = sum(map(len, hosts))
    found = pool(ranks).call(digest_over, name, steps, "gloo", hosts, options)
    assert len({*found}) == 1
    return found[0]


def by_pycollective(pool, name, steps, ranks):
    found = pool(ranks).call(digest_over, name, steps, "pycollective", None, {})
    assert len({*found}) == 1
    return found[0]


def by_mpi(mpi, name, steps, ranks, topology=""):
    """Of ranks that mpiexec starts, which have no process group of torch's at all."""
    program = [str(ROOT / "tests" / "torch" / "trainings.py"), name, str(steps)]
    path = {"PYTHONPATH": f"{ROOT}:{SITE_PACKAGES}"}  # torch; its mpi4py is the MPI's own
    done = find(mpi).run(ranks, *program, PYCOLLECTIVE_TOPOLOGY=topology, **path)
    assert done.returncode == 0, done.stderr
    found = parts(done.stdout)
    assert len(found) == ranks
    assert len({*found}) == 1
    return found[0]


def test_one_digest_over_gloo_over_pycollective_and_under_mpiexec(pool):
    found = {
        "gloo": by_gloo(pool, "digits", 2, apart(2)),
        "small buckets": by_gloo(pool, "digits", 2, apart(2), bucket_cap_mb=0.1),
        "pycollective": by_pycollective(pool, "digits", 2, 2),
        "mpi": by_mpi("mpich", "digits", 2, 2),
    }
    assert len({*found.values()}) == 1, found


HOSTS = {
    2: {"1x2": apart(2), "2x1": apart(2)},
    3: {"1x3": apart(3), "2,1": ((0, 1), (2,))},
    4: {"1x4": apart(4), "2x2": ((0, 1), (2, 3))},
}


@pytest.mark.storm
@pytest.mark.parametrize("name", ["digits", "gpt"])
@pytest.mark.parametrize("ranks", HOSTS)
def test_one_digest_for_every_way_to_average(pool, name, ranks):
    steps = 15
    found = {"pycollective": by_pycollective(pool, name, steps, ranks)}
    for topology, hosts in HOSTS[ranks].items():
        for cap in (0.02, 0.3, 25.0):
            key = f"gloo, {topology}, {cap}"
            found[key] = by_gloo(pool, name, steps, hosts, bucket_cap_mb=cap)
        for mpi in ("mpich", "openmpi"):
            found[f"{mpi}, {topology}"] = by_mpi(mpi, name, steps, ranks, topology)
    assert len({*found.values()}) == 1, found
