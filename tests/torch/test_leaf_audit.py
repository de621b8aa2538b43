"""`LeafSync(audit=)`: a rank that computes a leaf wrongly is named, and the step is not applied."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from functools import partial
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pycollective import CollectiveMismatch, ConfigurationError
from pycollective.leaves.deal import Deal
from pycollective.ledger.reader import read
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves.audit import audits_of, deal_audits
from tests.harness import PerRank
from tests.torch.elastic_job import Fault, Job, Training, digest, train
from tests.torch.test_leaf_elastic import check
from tests.torch.test_leaf_ledger import OVER

LEAVES = 6

# --- Which leaves, and by whom.


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_audits_are_drawn_alike_for_all_leaves_and_pairs_of_ranks(ranks):
    deal = Deal.contiguous(ranks, LEAVES)
    steps, times = 1000, Counter()
    pairs = {count: Counter() for count in (1, 2, LEAVES)}
    for step, count in itertools.product(range(steps), pairs):
        dealt = deal_audits(count, 3, step, deal)
        assert len({each.leaf for each in dealt}) == count
        audits = Counter(each.auditor for each in dealt)
        assert max(audits.values()) <= -(-count // (ranks - 1))
        for each in dealt:
            assert any(lo <= each.leaf < hi for lo, hi in deal.held[each.owner])
            computing = {each.owner, each.auditor, each.third} - {None}
            assert len(computing) == min(3, ranks)
            pairs[count][each.owner, each.auditor] += 1
        if count == 1:
            times[dealt[0].leaf] += 1
    owners = [rank for rank in range(ranks) if deal.held[rank]]
    every = {(a, b) for a in owners for b in range(ranks) if a != b}
    assert all({*each} == every for each in pairs.values())
    assert all(abs(times[leaf] - steps / LEAVES) < steps / LEAVES / 4 for leaf in range(LEAVES))


def test_one_rank_audits_nothing():
    assert deal_audits(LEAVES, 0, 0, Deal.contiguous(1, LEAVES)) == []


# --- Trainings.


def trained(comm, wrong=(), over="pycollective", until=5, more=None, leaves=LEAVES, **options):
    """Train; return what was raised, the number of steps that were handed out, and two digests.

    `wrong` are leaves of which this rank makes other gradients: (step, leaf, parameter, bits), with
    None for every step or leaf. The digests are of the weights and what was logged, and of buffers
    and what was logged by rank.
    """
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3)),
        torch.nn.Linear(4, 2),
    )
    sync = LeafSync(model, leaves, group=OVER[over](comm), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    samples = TensorDataset(torch.randn(48, 3))
    loader = DataLoader(samples, batch_sampler=LeafSampler(sync, 48, micro_batch=4))
    step, done, owners = None, [], []

    def bend(name, gradient):
        for when, leaf, of, bits in wrong:
            if of == name and when in (None, step.number) and leaf in (None, step.leaf):
                gradient = gradient.clone()
                gradient.view(torch.int32).view(-1)[1] ^= bits
        return gradient

    for name, each in model.named_parameters():
        each.register_hook(partial(bend, name))
    said = ""
    try:
        for step in sync.steps(loader, until=until, **(more or {})):
            for (x,) in step:
                step.count(step.leaf + 1)
                loss = model(x).square().sum()
                step.log(loss=loss, owner=comm.rank)
                loss.backward()
            optimizer.step()
            done.append(step.logged["loss"])
            owners.append(step.logged["owner"])
    except CollectiveMismatch as error:
        said = str(error)
        assert all(each.grad is None for each in model.parameters())
        optimizer.step()  # does nothing
        with TemporaryDirectory() as folder:
            sync.save(f"{folder}/last.pt")
            assert torch.load(f"{folder}/last.pt")["sync"]["step"] == len(done)
        with pytest.raises(ConfigurationError, match="cannot go on: audit of step"):
            next(iter(sync.steps(loader)))
    finally:
        sync.close()
    weights = {name: each for name, each in model.named_parameters()}
    made = digest(mock.Mock(state_dict=lambda: [weights, optimizer.state_dict(), done]))
    own = digest(mock.Mock(state_dict=lambda: [*model.buffers(), owners]))
    return said, sync.step, made, own


def on(ranks, wrong=(), **options):
    """What each of these ranks of a pool returns."""
    return ranks.call(partial(trained, **options), wrong)


pytestmark = pytest.mark.filterwarnings("ignore:LeafSync")


def dealt_at(step, ranks, count=LEAVES, seed=0):
    return deal_audits(count, seed, step, Deal.contiguous(ranks, LEAVES))


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("place", [0, LEAVES - 1])
@pytest.mark.parametrize("role", ["owner", "auditor"])
def test_a_flipped_bit_is_named_by_a_third_rank(pool, over, place, role):
    audited = dealt_at(2, 3)[place]
    wrong = getattr(audited, role)
    flip = (2, audited.leaf, "3.weight", 1)
    found = on(
        pool(3), PerRank([[flip] * (rank == wrong) for rank in range(3)]), over=over, audit=LEAVES
    )
    a, b = sorted({0, 1, 2} - {wrong})
    said = (
        f"step 2, leaf {audited.leaf}: rank {wrong} gave other bits than ranks {a} and {b} for "
        "3.weight"
    )
    [(*_, before, _)] = on(pool(1), until=2)  # nothing of step 2 was applied
    assert [each[:3] for each in found] == [(said, 2, before)] * 3


@pytest.mark.parametrize("over", OVER)
def test_of_two_ranks_nobody_knows_which_is_right(pool, over):
    leaf = dealt_at(1, 2)[3].leaf
    flips = [[], [(1, leaf, "0.bias", 1 << 31), (1, leaf, "0.weight", 1)]]
    said = (
        f"step 1, leaf {leaf}: ranks 0 and 1 gave other bits for 0.bias; a third rank would say "
        "which"
    )
    for each in on(pool(2), PerRank(flips), over=over, audit=LEAVES):
        assert each[:2] == (said, 1)


def test_three_ranks_that_differ_are_all_named(pool):
    flips = [[(0, 0, "1.weight", 1 << rank)] for rank in range(3)]
    said = "step 0, leaf 0: ranks 0, 1 and 2 gave other bits each for 1.weight"
    for each in on(pool(3), PerRank(flips), audit=LEAVES):
        assert each[:2] == (said, 0)


@pytest.mark.parametrize(("leaf", "seed"), [(None, 1), (5, 1)])
def test_a_persistent_fault_is_found_when_its_turn_is_drawn(pool, leaf, seed):
    """Of a rank's every leaf, and of one leaf: with one audit a step, in M steps on average."""
    for step in range(5 * LEAVES):
        [audited] = dealt_at(step, 3, 1, seed)
        if 2 in audited[1:3] and leaf in (None, audited.leaf):
            break
    assert 0 < step < 5 * LEAVES - 1
    flips = [[(None, leaf, "0.weight", 1)] * (rank == 2) for rank in range(3)]
    said = f"step {step}, leaf {audited.leaf}: rank 2 gave other bits than ranks 0 and 1"
    for each in on(pool(3), PerRank(flips), until=step + 9, audit=1, seed=seed):
        assert each[:2] == (f"{said} for 0.weight", step)


def cost(samples):
    return 1.0 + sum(samples)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("ranks", [2, 3])
def test_audits_change_no_bit(pool, over, ranks, tmp_path):
    alone, beside = {"ledger": tmp_path / "alone"}, {"ledger": tmp_path / "beside"}
    plain = on(pool(ranks), over=over, **alone)
    more = {"more": {"cost": cost, "measure_ranks": True}, "check_every": 2}
    assert on(pool(ranks), over=over, audit=LEAVES, **beside) == plain  # also buffers
    for each in on(pool(ranks), over=over, audit=2, **more):
        assert each[:3] == plain[0][:3]
    notes = [read(each["ledger"]).records for each in (alone, beside)]
    assert (notes[0] == notes[1]).all()


def test_ranks_without_leaves_audit(pool):
    plain = on(pool(1), leaves=2)[0]
    for each in on(pool(3), leaves=2, audit=2):
        assert each[:3] == plain[:3]
    dealt = deal_audits(2, 0, 0, Deal.contiguous(3, 2))
    assert 2 in {each.auditor for each in dealt}


def test_half_gradients_are_compared_and_added_in_fp32(pool):
    training = Training(dtype=torch.bfloat16, options=(("grad_dtype", torch.float32),))
    plain = pool(1).call(training.run)[0]
    assert pool(2).call(partial(training.run, audit=3)) == [plain] * 2


# --- With elastic=True.


def elastic(training, faults, hooks=None, **options):
    """The outcomes of three ranks and of those that take their places."""
    first = [(training, *faults.get(rank, ())) for rank in range(3)]
    with Job(3, **options) as job:
        return job.run(partial(train, audit=2, **(hooks or {})), first, 20 * [(training,)])


@pytest.mark.parametrize("call", ["finish", "all_gather"])
def test_a_rank_is_killed_and_another_joins(call):
    training = Training(counted=True, cost=True)
    check(elastic(training, {1: [Fault(call, 5)]}), training, killed=1)


def test_the_rank_that_is_left_alone_goes_on_without_audits():
    training = Training(ranks=0)
    faults = {0: [Fault("finish", 2)], 1: [Fault("", 5, after="shrink")]}
    assert len(check(elastic(training, faults, replace=0), training, killed=2)) == 1


def test_a_rank_hears_of_a_death_while_digests_travel():
    training = Training(ranks=0)
    check(elastic(training, {1: [Fault("all_gather", 8, "hears")]}), training)


def rank():
    return int(os.environ["PYCOLLECTIVE_RANK"])


def spoil(sync, dies=None):
    """Rank 2 makes other gradients from step 2 on; a rank may die as it computes a leaf again."""
    parameter = sync._model.module.layers[0].weight

    def bend(gradient):
        step = sync._loop.step
        if step.number == 2 and rank() == dies and step._again:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient * 2 if step.number >= 2 and rank() == 2 else gradient

    parameter.register_hook(bend)


def test_elastic_ranks_stop_all_and_a_death_in_an_audit_is_made_good():
    training = Training(ranks=0)
    outcomes = elastic(training, {}, {"made": spoil}, replace=0)
    assert {type(each.error) for each in outcomes} == {CollectiveMismatch}
    said = {str(each.error) for each in outcomes}
    [text] = said
    assert text.endswith("rank 2 gave other bits than ranks 0 and 1 for layers.0.weight")
    outcomes = elastic(training, {}, {"made": partial(spoil, dies=0)}, replace=0)
    assert [each.exit_code for each in outcomes] == [-signal.SIGKILL, None, None]
    for each in outcomes[1:]:
        assert "step 2, leaf" in str(each.error)
        assert str(each.error).endswith(
            "ranks 0 and 1 gave other bits for layers.0.weight; a third rank would say which"
        )


# --- What is refused.


def refused(comm, audit, lacking=False):
    try:
        with mock.patch.dict("sys.modules", {"xxhash": None} if lacking else {}):
            sync = LeafSync(torch.nn.Linear(2, 1), 4, group=OVER["pycollective"](comm), audit=audit)
        try:
            sync.finish()
        finally:
            sync.close()
    except (ConfigurationError, CollectiveMismatch) as error:
        return str(error)


def test_what_is_refused(pool):
    for said in pool(2).call(refused, PerRank([3, 4])):
        assert said == "LeafSync: rank(s) 1 have other audit than rank 0: 4, not 3"
    for said in pool(2).call(refused, PerRank([2, 5])):
        assert "audit is 5, not 1 to 4, the leaves" in said
    for said in pool(2).call(refused, PerRank([1, 1]), True):
        assert "audit needs xxhash: pip install xxhash" in said
    for said in pool(2).call(refused, 1):
        assert "give it a loader, in place of leaf() and finish()" in said
    assert "by another rank, and there is one rank" in pool(1).call(refused, 1)[0]
    for device, sharded, said in (("cuda:0", False, "on cuda:0"), ("cpu", True, "sharded")):
        with pytest.raises(ConfigurationError, match=f"these are {said}: leave it out"):
            audits_of(1, 4, 2, torch.device(device), sharded)


@pytest.mark.storm
@pytest.mark.parametrize(("over", "steps"), [("pycollective", 4000), ("gloo", 1500)])
def test_audits_of_equal_leaves_are_quiet(pool, over, steps):
    for ranks in (2, 3):
        for each in on(pool(ranks), over=over, until=steps, audit=3):
            assert each[:2] == ("", steps)


@pytest.mark.storm
@pytest.mark.parametrize("does", ["dies", "hears"])
def test_a_rank_dies_or_hears_of_a_death_in_any_call(does):
    """Whatever digests have travelled, the step is made good."""
    training = Training(ranks=0)
    for number in range(1, 100, 3):
        faults = {number % 3: [Fault("", number, does)]}
        outcomes = elastic(training, faults, replace=0)
        check(outcomes, training, sum(each.exit_code is not None for each in outcomes))
