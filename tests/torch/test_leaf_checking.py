"""`LeafSync(check_every=)`: ranks whose weights differ are named, by all of them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pycollective import CollectiveMismatch, ConfigurationError
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves.checking import checked
from tests.harness import PerRank
from tests.torch.test_leaf_ledger import OVER


def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    model[0].bias.requires_grad_(False)
    return model


def flip(tensor, at=1):
    """Change one bit; the lowest might be rounded away in the next step."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[at] ^= 1 << 12


def losses(sync, steps, loop):
    """Go through steps, by a loop or by hand; hand out each step's number once it is complete."""
    model, samples = sync._model.module, torch.randn(12, 3)
    if loop:
        loader = DataLoader(
            TensorDataset(samples), batch_sampler=LeafSampler(sync, 12, micro_batch=2)
        )
        for step in sync.steps(loader, until=steps):
            for (x,) in step:
                model(x).square().sum().backward()
            yield step.number
        return
    for number in range(steps):
        for leaf in sync.local_leaves:
            with pytest.raises(ConfigurationError):
                sync.leaf(99).__enter__()  # is refused, and costs nothing
            with sync.leaf(leaf):
                model(samples[2 * leaf : 2 * leaf + 2]).square().sum().backward()
        sync.finish()
        yield number


@pytest.mark.filterwarnings("ignore:LeafSync")
def flipped(comm, over, loop, where, step, every=2, leaves=4):
    """What a rank raises, and in which step, if its bits change once a step is complete."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = network()
    sync = LeafSync(model, leaves, group=OVER[over](comm), check_every=every)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = None
    try:
        for done in losses(sync, 7, loop):
            optimizer.step()
            if done == step and where is not None:
                tensor = model.get_parameter(where.removeprefix("average of "))
                flip(tensor.grad if where.startswith("average") else tensor)
    except CollectiveMismatch as error:
        return done, str(error)
    finally:
        sync.close()
    return done, ""


ODD = "step 4: the weight 2.weight has other bits on rank(s) 1 than on rank(s) 0, 2"


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("loop", [True, False])
def test_the_odd_rank_of_three_is_named_and_the_first_parameter(pool, over, loop):
    where = PerRank([None, "2.weight", None])
    assert pool(3).call(flipped, over, loop, where, 2) == [(3, ODD)] * 3
    assert pool(3).call(flipped, over, loop, where, 2, 2, 2) == [(3, ODD)] * 3  # one has no leaf


def test_averages_and_weights_that_do_not_train_are_compared(pool):
    where = PerRank(["average of 2.bias", None, None])
    said = "step 2: the average of 2.bias has other bits on rank(s) 0 than on rank(s) 1, 2"
    assert pool(3).call(flipped, "pycollective", True, where, 1) == [(1, said)] * 3
    assert pool(3).call(flipped, "pycollective", True, where, 2) == [(6, "")] * 3  # overwritten
    where = PerRank([None, None, "0.bias"])
    said = "step 4: the weight 0.bias has other bits on rank(s) 2 than on rank(s) 0, 1"
    assert pool(3).call(flipped, "gloo", False, where, 3) == [(3, said)] * 3


def test_two_ranks_differ_and_nobody_knows_who_is_right(pool):
    said = (
        "step 3: the weight 2.bias has other bits on rank(s) 1 than on rank(s) 0; no majority says "
        "which are right"
    )
    for where in (PerRank(["2.bias", None]), PerRank([None, "2.bias"])):
        assert pool(2).call(flipped, "pycollective", False, where, 0, 3) == [(2, said)] * 2
    both = PerRank(["0.weight", "2.bias"])
    for step, text in pool(2).call(flipped, "pycollective", False, both, 0, 1):
        assert step == 0
        assert "the weight 0.weight has other bits" in text
        assert text.endswith(", as have 1 more averages and weights")


def test_equal_weights_raise_nothing_whatever_buffers_are(pool):
    for ranks in (1, 2, 3):
        for over in OVER:
            assert pool(ranks).call(flipped, over, True, None, 0, 1) == [(6, "")] * ranks


@pytest.mark.filterwarnings("ignore:LeafSync")
def not_averaged(comm, case):
    """The averages of one rank are other ones, and are not of a step that is complete."""
    model = network()
    sync = LeafSync(model, 4, group=OVER["pycollective"](comm), check_every=1)
    for _ in losses(sync, 1, False):
        pass
    if comm.rank == 0:
        flip(model[2].weight.grad)
    if case == "joined":
        sync._checking.averaged = comm.rank == 0
    else:  # a step that has begun, and is computed again
        sync._checking.averaged = False
    sync._check_weights()
    sync._check_weights()
    sync.close()


@pytest.mark.parametrize("case", ["joined", "again"])
def test_averages_of_no_whole_step_are_not_compared(pool, case):
    pool(2).call(not_averaged, case)


def refused(comm, every, lacking=False):
    try:
        with mock.patch.dict("sys.modules", {"xxhash": None} if lacking else {}):
            LeafSync(torch.nn.Linear(2, 1), 4, group=OVER["pycollective"](comm), check_every=every)
    except (ConfigurationError, CollectiveMismatch) as error:
        return str(error)


def test_what_is_refused(pool):
    for said in pool(2).call(refused, PerRank([5, 6])):
        assert said == "LeafSync: rank(s) 1 have other check_every than rank 0: 6, not 5"
    for said in pool(2).call(refused, PerRank([0, 1])):
        assert "check_every is 0, not 1 or more" in said
    for said in pool(2).call(refused, PerRank([1, 1]), True):
        assert "check_every needs xxhash: pip install xxhash" in said
    with pytest.raises(ConfigurationError, match="and these are on cuda:0: leave it out"):
        checked(1, torch.device("cuda", 0), False)


def quiet(comm, over, times):
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    sync = LeafSync(model, 4, group=OVER[over](comm), check_every=1)
    for _ in losses(sync, 1, False):
        pass
    for _ in range(times):
        sync._checking.averaged = True
        sync._check_weights()
        with torch.no_grad():
            model[0].weight += 0.1
    sync.close()


@pytest.mark.storm
@pytest.mark.parametrize(("over", "times"), [("pycollective", 100_000), ("gloo", 20_000)])
def test_checks_of_equal_weights_are_quiet(pool, over, times):
    for ranks in (2, 3):
        pool(ranks).call(quiet, over, times // 2)
