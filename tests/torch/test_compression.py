"""Compressed DDP: what every option must give, bit for bit, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint
from torch.nn.parallel import DistributedDataParallel

from tests.compression.players import held_by
from tests.torch import trainings
from tests.torch.compressed import HOOKS, Given, digest_of, given, group_of, ranks_of, state_of

TOPOLOGIES = ["4x1", "2x2"]


ranks = ranks_of(__name__, 4)


class Net(torch.nn.Module):
    """A branch that a forward pass may leave out, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.input = torch.nn.Linear(40, 130)
        self.branch = torch.nn.Linear(130, 130)
        self.output = torch.nn.Linear(130, 33)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.input(x))
        if branch:
            x = x + torch.relu(self.branch(x))
        return self.output(x)


def residuals_of(state, name):
    return {kind: held.tobytes() for kind, held in held_by(state).items() if kind.endswith(name)}


def train(comm, backend, codec, topology, steps=4, branch=lambda rank, step: True, **options):
    """Digest of final weights, and the state."""
    group = group_of(comm, backend)
    torch.manual_seed(3)
    model = DistributedDataParallel(Net(), process_group=group, **options)
    state = state_of(model, codec, topology, group)
    model.register_comm_hook(state, HOOKS[codec])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    random = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        x = torch.randn(6, 40, generator=random)
        optimizer.zero_grad()
        model(x, branch(comm.rank, step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return digest_of(model.parameters()), state


VARIANTS = {
    "tiny buckets": {"bucket_cap_mb": 0.001},
    "small buckets": {"bucket_cap_mb": 0.03},
    "1 MB": {"bucket_cap_mb": 1},
    "25 MB": {},
    "1000 MB": {"bucket_cap_mb": 1000},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.03},
    "find unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.03},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.03},
}


def variants(comm, backend, codec, topology, names):
    found = {}
    for name in names:
        options = VARIANTS[name]
        digest, state = train(comm, backend, codec, topology, **options)
        stats = state.stats()
        found[name] = digest, stats["steps"], stats["compressed_calls"], stats["payload_bytes"] > 0
    return found


# Some of them for each codec, together all; the rest in `make storm`.
SOME = {
    "one_bit": ["tiny buckets", "25 MB", "static graph"],
    "int8": ["1 MB", "small buckets", "views"],
    "top_k": ["tiny buckets", "1000 MB", "find unused"],
}
OVER_GLOO = ["tiny buckets", "1 MB", "views"]


@pytest.mark.parametrize(
    ("topology", "some"),
    [
        *(("4x1", True), ("2x2", True)),
        *(pytest.param(each, False, marks=pytest.mark.storm) for each in TOPOLOGIES),
    ],
)
@pytest.mark.parametrize("codec", HOOKS)
def test_no_option_and_no_backend_changes_a_bit(ranks, codec, topology, some):
    names = SOME[codec] if some else list(VARIANTS)
    outcomes = ranks(variants, "pycollective", codec, topology, names)
    if codec != "int8":
        outcomes += ranks(variants, "gloo", codec, topology, OVER_GLOO[:1] if some else OVER_GLOO)
    weights = {digest for found in outcomes for digest, *_ in found.values()}
    assert len(weights) == 1
    for found in outcomes:
        for name, (_, steps, calls, sent) in found.items():
            assert (steps, sent) == (4, True)
            assert calls >= (8 if name == "tiny buckets" else 4), "it was not compressed"


def trained(comm, backend, codec, topology, name, steps):
    """The digest of a training's final weights; its first step is dense."""
    group = group_of(comm, backend)

    def replicate(model):
        replica = DistributedDataParallel(model, process_group=group)
        state = state_of(replica, codec, topology, group, dense_steps=1)
        replica.register_comm_hook(state, HOOKS[codec])
        return replica

    return trainings.digest(name, steps, comm.rank, comm.size, replicate)


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        (codec, name)
        if (codec, name) == ("one_bit", "digits")
        else pytest.param(codec, name, marks=pytest.mark.storm)
        for codec in HOOKS
        for name in ("digits", "gpt")
    ],
)
def test_trainings_over_gloo_have_the_weights_of_those_over_pycollective(ranks, codec, name):
    found = {
        (backend, topology): set(ranks(trained, backend, codec, topology, name, 4))
        for backend in ("gloo", "pycollective")
        for topology in ("4x1", "2x2")
    }
    for topology in ("4x1", "2x2"):
        assert len(found["gloo", topology] | found["pycollective", topology]) == 1, found


def unused(comm, codec, cap):
    """No rank uses the branch in step 2, rank 1 never: its residual in that step, and weights."""
    options = {
        "branch": lambda rank, step: rank != 1 and step != 2,
        **{"find_unused_parameters": True, "bucket_cap_mb": cap},
    }
    first, state = train(comm, "pycollective", codec, "2x2", steps=2, **options)
    before = residuals_of(state, "branch.weight")
    last, state = train(comm, "pycollective", codec, "2x2", steps=3, **options)
    after = residuals_of(state, "branch.weight")
    return first, last, before == after, bool(before)


@pytest.mark.parametrize("codec", ["one_bit", "top_k"])
def test_what_no_rank_used_keeps_its_residual(ranks, codec):
    outcomes = [found for cap in (0.001, 25) for found in ranks(unused, codec, cap)]
    assert len({found[:2] for found in outcomes}) == 1
    assert all(same for _, _, same, _ in outcomes)
    assert any(held for *_, held in outcomes)


class Beside:
    """Compressed DDP of `Given`, and the same averages without DDP."""

    def __init__(self, comm, codec, topology="2x2", dtype=torch.float32, **options):
        self.group = group_of(comm, "pycollective")
        self.ddp = DistributedDataParallel(Given(dtype), process_group=self.group, **options)
        self.state = state_of(self.ddp, codec, topology, self.group)
        self.ddp.register_comm_hook(self.state, HOOKS[codec])
        self.direct = state_of(self.ddp, codec, topology, self.group)

    def same(self, gradients):
        """Whether DDP's gradients are the averages of these; and clear them."""
        self.direct.all_reduce(gradients)
        found = {name: p.grad for name, p in self.ddp.module.named_parameters()}
        same = all(digest_of([found[n]]) == digest_of([gradients[n]]) for n in gradients)
        held = [held_by(each) for each in (self.state, self.direct)]
        same &= all(held[0][n].tobytes() == held[1][n].tobytes() for n in held[1])
        self.ddp.zero_grad()
        return same


def accumulated(comm, codec, dtype):
    beside, found = Beside(comm, codec, dtype=getattr(torch, dtype)), []
    for step in range(3):
        one, two = (given(comm.rank, 2 * step + n, getattr(torch, dtype)) for n in (0, 1))
        with beside.ddp.no_sync():
            beside.ddp(one).backward()
        beside.ddp(two).backward()
        found.append(beside.same({n: one[n] + two[n] for n in one}))
    return found, beside.state.stats()["steps"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["one_bit", "top_k"])
def test_no_sync_accumulates_before_one_exchange(ranks, codec, dtype):
    for found, steps in ranks(accumulated, codec, dtype):
        assert found == [True] * 3
        assert steps == 3


def forwards(comm, codec):
    beside, found = Beside(comm, codec, bucket_cap_mb=0.001), []
    for step in range(3):
        one, two = (given(comm.rank, 2 * step + n) for n in (0, 1))
        (beside.ddp(one) + beside.ddp(two)).backward()
        found.append(beside.same({n: one[n] + two[n] for n in one}))
    return found, beside.state.stats()["steps"]


def test_two_forward_passes_are_one_step_of_their_backward(ranks):
    for found, steps in ranks(forwards, "one_bit"):
        assert found == [True] * 3
        assert steps == 3


def uneven(comm, codec):
    """Rank r has 2 + r inputs; then those that ran out take part with zeros."""
    beside, averages = Beside(comm, codec), []
    with beside.ddp.join():
        for step in range(2 + comm.rank):
            beside.ddp(given(comm.rank, step)).backward()
            averages.append(digest_of(p.grad for p in beside.ddp.module.parameters()))
            beside.ddp.zero_grad()
    wants = []
    for step in range(5):
        mine = given(comm.rank, step)
        if step >= 2 + comm.rank:
            mine = {name: torch.zeros_like(each) for name, each in mine.items()}
        beside.direct.all_reduce(mine)
        wants.append(digest_of(mine.values()))
    return averages == wants[: 2 + comm.rank], beside.state.stats()["steps"]


@pytest.mark.parametrize("codec", ["one_bit", "top_k"])
def test_join_lets_ranks_that_ran_out_take_part_with_zeros(ranks, codec):
    assert ranks(uneven, codec) == [(True, 5)] * 4


def under_a_scaler(comm, codec, bad):
    """Final weights, scale and residuals of training with a step whose gradient overflowed."""
    group = group_of(comm, "pycollective")
    torch.manual_seed(5)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.03)
    state = state_of(model, codec, "2x2", group)
    model.register_comm_hook(state, HOOKS[codec])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    state.set_loss_scale(scaler)
    kept = True
    for step in range(5):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        for spoil in ([True] if bad and step == 2 else []) + [False]:
            before = {name: held.tobytes() for name, held in held_by(state).items()}
            optimizer.zero_grad()
            loss = scaler.scale(model(x).square().mean())
            (loss * float("inf") if spoil and comm.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after = {name: held.tobytes() for name, held in held_by(state).items()}
            kept &= (before == after) == spoil or not before
        if not bad and step == 1:
            scaler.update(2.0**9)
    stats = state.stats()
    held = digest_of(torch.from_numpy(each) for _, each in sorted(held_by(state).items()))
    weights = digest_of(model.parameters())
    return weights, held, scaler.get_scale(), kept, stats["steps"], stats["steps_given_up"]


@pytest.mark.parametrize("codec", HOOKS)
def test_a_scaler_skips_a_bad_step_as_if_it_had_not_been(ranks, codec):
    spoilt, good = (ranks(under_a_scaler, codec, bad) for bad in (True, False))
    for one, other in zip(spoilt, good, strict=True):
        assert one[:4] == other[:4]
        assert one[2:] == (2.0**9, True, 5, 1)
        assert other[4:] == (5, 0)
    assert len({each[0] for each in spoilt}) == 1
