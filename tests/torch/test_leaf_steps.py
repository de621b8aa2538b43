"""`LeafSync.steps`: leaves come with their batches, whoever has them; what else is refused."""

from __future__ import annotations

import itertools
import operator
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pycollective as pc
from pycollective import ConfigurationError, reference
from pycollective.torch import LeafSampler, LeafSync
from tests.inputs import order_sensitive, same_bits
from tests.torch.groups import standing_group

SAMPLES = 40


def dataset():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1, bias=False)
    )


def loader_of(sync, **options):
    return DataLoader(dataset(), batch_sampler=LeafSampler(sync, SAMPLES, 2), **options)


def logged_by(step, leaf, leaves):
    """A number whose sum over leaves depends on their order."""
    return order_sensitive("float64", leaves, 64)[leaf][step]


# --- Bits.


def trained(comm, leaves, until, counted):
    """By the loop: weights as bytes, what each step logged, and which samples it had here."""
    model = network()
    sync = LeafSync(model, leaves, seed=1, group=standing_group(comm))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    logged, samples = [], []
    for step in sync.steps(loader_of(sync), until=until):
        for x, numbers in step:
            if counted:
                step.count(step.leaf + 1)
            loss = model(x).square().sum()
            loss.backward()
            step.log(loss=loss, number=logged_by(step.number, step.leaf, leaves))
            samples.append((step.number, step.leaf, numbers.tolist()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logged.append(step.logged)
    sync.close()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return weights.numpy().tobytes(), logged, samples


@pytest.mark.parametrize("counted", [False, True])
def test_the_same_bits_and_means_on_any_number_of_ranks(pool, counted):
    for leaves in (5, 2):
        [(weights, logged, samples)] = pool(1).call(trained, leaves, 12, counted)
        for ranks in (2, 3):
            found = pool(ranks).call(trained, leaves, 12, counted)
            assert {each for each, _, _ in found} == {weights}
            assert all(each == logged for _, each, _ in found)
            assert sorted(itertools.chain(*(each for *_, each in found))) == samples
        divisor = sum(range(1, leaves + 1)) if counted else leaves
        for step, each in enumerate(logged):
            values = [logged_by(step, leaf, leaves) for leaf in range(leaves)]
            want = reference.tree(values, operator.add) / divisor
            assert same_bits(np.array(each["number"]), want)
        assert len({*map(str, logged)}) == 12


def by_hand(comm, leaves, until):
    model = network()
    sync = LeafSync(model, leaves, seed=1, group=standing_group(comm))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batches = iter(loader_of(sync))
    for _ in range(until):
        for leaf in sync.local_leaves:
            x, _ = next(batches)
            with sync.leaf(leaf):
                model(x).square().sum().backward()
        sync.finish()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sync.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().tobytes()


def test_leaf_by_leaf_a_training_is_the_same(pool):
    assert {*pool(2).call(by_hand, 5, 4)} == {pool(1).call(trained, 5, 4, False)[0][0]}


# --- On one rank.


@pytest.fixture
def alone():
    with pc.init(rank=0, size=1) as comm:
        yield comm


@pytest.fixture
def made(alone):
    """A model and its sync, of 4 leaves."""
    model = network()
    sync = LeafSync(model, 4, group=alone)
    yield model, sync
    with suppress(ConfigurationError):
        sync.close()


def backward(model, batch):
    model(batch[0]).sum().backward()


def test_gradients_are_none_until_the_step_is_complete(made):
    model, sync = made
    for step in sync.steps(loader_of(sync), until=2):
        assert all(each.grad is None for each in model.parameters())
        for batch in step:
            backward(model, batch)
            assert all(each.grad is None for each in model.parameters())
        assert all(each.grad is not None for each in model.parameters())


def test_an_early_break_changes_nothing_and_is_told(made):
    model, sync = made
    before = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    drawn = torch.get_rng_state()
    steps = sync.steps(loader_of(sync, generator=torch.Generator()))  # DataLoader draws, too
    for seen, batch in enumerate(step := next(steps)):
        backward(model, batch)
        if seen == 3:
            break
    assert step.leaf is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(each.grad is None for each in model.parameters())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    why = "leaf 3 of step 0 was left before its end"
    for call in (sync.close, sync.finish, lambda: next(steps), lambda: sync.leaf(0)):
        with pytest.raises(ConfigurationError, match=why):
            call()
    sync.close()  # said once
