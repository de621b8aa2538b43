"""`LeafSync.steps` with a cost: who computes which leaves changes, and the bits do not."""

from __future__ import annotations

import itertools
import math
import random
import time
from contextlib import suppress

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pycollective import CollectiveAborted, CollectiveMismatch, ConfigurationError, Deal
from pycollective.leaves.cut import cut
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves.balance import Balance
from tests.torch.groups import standing_group
from tests.torch.ordered_groups import standing

SAMPLES, LEAVES = 60, 6
LENGTHS = random.Random(5).choices(range(1, 30), k=SAMPLES)


def cost(samples):
    return sum(LENGTHS[each] ** 2 for each in samples)


def loader_of(sync, **options):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=generator))
    return DataLoader(data, batch_sampler=LeafSampler(sync, SAMPLES, 2), **options)


def trained(comm, backend, until, slow, workers, options):
    """Weights as bytes; the run of leaves that this rank had in each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    group = standing(comm) if backend == "gloo" else standing_group(comm)
    sync = LeafSync(model, LEAVES, seed=1, group=group)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    runs = []
    loader = loader_of(sync, num_workers=workers)
    for step in sync.steps(loader, until=until, **options):
        runs.append((sync.local_leaves.start, sync.local_leaves.stop))
        for (x,) in step:
            if comm.rank == slow:
                time.sleep(0.02)
            model(x).square().sum().backward()
        optimizer.step()
    sync.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()]), runs


@pytest.mark.parametrize("backend", ["pycollective", "gloo"])
@pytest.mark.parametrize("workers", [0, 2])
def test_runs_are_cut_by_cost_and_the_weights_are_the_same_bits(pool, backend, workers):
    [(weights, _)] = pool(1).call(trained, backend, 12, None, 0, {})
    for ranks in (2, 3):
        found = pool(ranks).call(trained, backend, 12, None, workers, {"cost": cost})
        assert all(torch.equal(each, weights) for each, _ in found)
        deals = [*zip(*(runs for _, runs in found), strict=True)]
        for step, runs in enumerate(deals):
            # Each leaf once, and as `cut` has them.
            assert [*itertools.chain(*(range(*run) for run in runs))] == [*range(LEAVES)]
            assert cut(costs_of(step), [1.0] * ranks).held == tuple((run,) for run in runs)
        assert len({*deals}) > 2


def costs_of(step):
    class Sync:
        leaves, seed, in_order = LEAVES, 1, False

    sampler = LeafSampler(Sync(), SAMPLES, 2)
    return [float(cost(sampler.indices_of(step, leaf))) for leaf in range(LEAVES)]


def test_a_slow_rank_gets_less_where_ranks_are_measured(pool):
    options = {"cost": len, "measure_ranks": True}  # all leaves cost alike
    [(weights, _)] = pool(1).call(trained, "pycollective", 16, None, 0, {})
    for workers in (0, 1):
        slow, fast = pool(2).call(trained, "pycollective", 16, 0, workers, options)
        assert torch.equal(slow[0], weights)
        assert torch.equal(fast[0], weights)
        assert slow[1][0] == (0, 3)
        assert slow[1][-1][1] < 3, slow[1]
        assert [hi for _, hi in slow[1]] == [lo for lo, _ in fast[1]]


# --- What a deal may count.


class Sync:
    leaves, seed, step, in_order = LEAVES, 1, 0, False


def measured(ahead):
    balance = Balance(LeafSampler(Sync(), SAMPLES, 2), len, 2)
    balance.measure(ahead)
    return balance


def test_a_deal_counts_only_what_all_ranks_knew_when_one_could_ask_for_it():
    ahead = 3
    late, early = (measured(ahead), measured(ahead))
    for step in range(40):
        # A loader of one rank draws as far ahead as it may, and that of the other not at all.
        for further in range(ahead + 1):
            early.deal_of(step + further)
        assert late.deal_of(step) == early.deal_of(step)
        slower = 1.0 if step < 20 else 4.0
        halves = [sum(hi - lo for lo, hi in runs) for runs in late.deal_of(max(step - 1, 0)).held]
        for each in (late, early):
            each.completed(step, [halves[0] * slower, halves[1] * 1.0] if step else [0.0, 0.0])
    assert late.deal_of(40) == Deal(LEAVES, (((0, 1),), ((1, 6),)))
    assert len(early._dealt) <= ahead + 3
    assert len(early._speeds) <= ahead + 4


def test_a_loader_that_draws_further_ahead_than_it_says_is_refused():
    balance = measured(1)
    for step in range(4):
        balance.deal_of(step)
        balance.completed(step, [1.0, 1.0])
    balance.deal_of(5)
    with pytest.raises(ConfigurationError, match="step 6 is asked for while ranks were told"):
        balance.deal_of(6)


# --- What is refused.


def refused(comm, case):
    model = torch.nn.Linear(3, 1)
    sync = LeafSync(model, LEAVES, group=standing_group(comm))
    mine = comm.rank == 1
    costs = {
        "other": lambda samples: 1.0 + samples[0] * mine,
        "nan": lambda samples: math.nan if mine and 7 in samples else 1.0,
        "text": lambda samples: "1" if mine else 1.0,
        "huge": lambda samples: 10**400 if mine else 1.0,
        "none": None if mine else len,
        "alone": None,
    }
    try:
        measure = case == "alone" and mine
        loader = loader_of(sync)
        for step in sync.steps(loader, until=40, cost=costs[case], measure_ranks=measure):
            for (x,) in step:
                model(x).sum().backward()
    except (CollectiveAborted, CollectiveMismatch, ConfigurationError) as error:
        return str(error)
    finally:
        with suppress(ConfigurationError):
            sync.close()


REFUSED = {
    "other": "deal its leaves otherwise than rank 0: the cost of sync.steps must return the same",
    "nan": "costs nan: give a finite number above 0",
    "text": "leaf 0 costs '1', which is no number",
    "huge": "which is no number",
    "none": "steps: rank(s) 1 have other cost than rank 0: none, not one",
    "alone": "measure_ranks=True needs a cost",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why_on_all_ranks(pool, case):
    for said in pool(2).call(refused, case):
        assert REFUSED[case] in said
