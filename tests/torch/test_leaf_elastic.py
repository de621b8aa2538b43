"""`LeafSync(elastic=True)`: ranks die and others join, and the training has the same bits."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import pycollective as pc
from pycollective import (
    CollectiveMismatch,
    ConfigurationError,
)
from pycollective.bootstrap.store import StoreClient, job_secret
from pycollective.ledger.compare import compare
from pycollective.ledger.reader import read
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves.elastic import elastic_of
from tests.harness import asleep, await_, counts
from tests.torch.elastic_job import (
    Fault,
    Job,
    Losses,
    Network,
    Training,
    train,
    trained,
    undisturbed,
)


def check(outcomes, training, killed=0):
    """All that were not killed have made what one rank makes; the calls that each has made."""
    want = undisturbed(training)
    lived = [each for each in outcomes if each.exit_code is None]
    assert len(outcomes) - len(lived) == killed
    assert {each.exit_code for each in outcomes} <= {None, -signal.SIGKILL}
    assert lived
    for each in lived:
        if each.error is not None:
            raise each.error
        assert each.result[:2] == want
    return [each.result[2] for each in lived]


# --- A kill at a point of a step.

POINTS = {
    "backward": Fault("add", 3),
    "the exchange of averages": Fault("finish", 3),
    "averages are there, and the step is not": Fault("barrier", 3),
    "the optimizer steps": Fault("step", 3),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_and_another_joins(point):
    training = Training(until=9)
    calls = check(trained(training, {1: [POINTS[point]]}), training, killed=1)
    assert len(calls) == 3
    assert all("hand_out" in each for each in calls)


JOINING = {
    "a newcomer that is invited": ({}, [[Fault("get", 1)]]),
    "newcomers that get the state": ({}, [[Fault("recv", 9)], [Fault("load", 1)]]),
    "the source as it sends": ({0: [Fault("send", 9)]}, []),
    "the source as ranks join": ({0: [Fault("join", 1, after="grow")]}, []),
    "the source as ranks have joined": ({0: [Fault("barrier", 1, after="grow")]}, []),
}


@pytest.mark.parametrize("who", JOINING)
def test_a_newcomer_or_the_source_of_its_state_is_killed(who):
    training = Training(until=12)
    faults, later = JOINING[who]
    outcomes = trained(training, {1: [Fault("add", 3)], **faults}, later)
    check(outcomes, training, killed=1 + len(faults) + len(later))


def test_over_simulated_hosts_the_others_go_on():
    for topology, fault in (("3x1", Fault("finish", 3)), ("1,2", Fault("add", 5))):
        training = Training(ranks=0)
        outcomes = trained(training, {1: [fault]}, replace=0, PYCOLLECTIVE_TOPOLOGY=topology)
        assert len(check(outcomes, training, killed=1)) == 2


def test_the_rank_that_is_left_alone_goes_on():
    training = Training(ranks=0)
    faults = {0: [Fault("finish", 2)], 1: [Fault("", 5, after="shrink")]}
    assert len(check(trained(training, faults, replace=0), training, killed=2)) == 1


def test_ranks_without_leaves_and_ranks_with_all():
    for rank in (0, 2):
        training = Training(leaves=1)
        check(trained(training, {rank: [Fault("barrier", 3)]}), training, killed=1)


# --- What a rank hears of a death, and when, differs from rank to rank.


def test_a_step_that_is_there_on_some_ranks_is_sent_to_the_others():
    """A rank that has sent all hears of a death before it has what the others have logged."""
    training = Training(ranks=0)
    calls = check(trained(training, {1: [Fault("all_gather", 6, "hears")]}), training)
    assert [each.count("shrink") for each in calls] == [1, 1, 1]
    assert ["recv" in each for each in calls] == [False, True, False]


def test_a_step_that_another_has_handed_out_is_handed_out():
    training = Training(ranks=0)
    calls = check(trained(training, {1: [Fault("barrier", 3, "hears")]}), training)
    assert not any("recv" in each for each in calls)
    last = Fault("barrier", training.until, "hears")
    check(trained(training, {1: [last]}), training)


def lives_on(_, training, *faults):
    """Does not close its LeafSync before the rank that has faults is done."""
    store = StoreClient(os.environ["PYCOLLECTIVE_STORE"], timeout=10)

    def ended(sync):
        if faults:
            store.set("done", b"")
        else:
            store.get("done")

    return train(None, training, *faults, ended=ended)


def test_a_rank_whose_loop_is_over_is_not_waited_for():
    training = Training(ranks=0)
    last = Fault("barrier", training.until, "hears")
    with Job(3, replace=0) as job:
        check(job.run(lives_on, [(training,), (training, last), (training,)]), training)


MANY = {rank: [Fault("", 13 + 4 * rank, "hears", again=True)] for rank in range(3)}


@pytest.mark.parametrize(
    "training",
    [
        Training(ranks=0, until=30, counted=True),
        Training(ranks=0, until=30, leaves=2, cost=True, options=(("check_every", 2),)),
    ],
)
def test_whatever_rank_hears_of_a_death_in_whatever_call(training):
    calls = check(trained(training, MANY), training)
    assert all(each.count("shrink") > 30 for each in calls)


# --- What a training may have.


def early(_, training, *faults):
    """What a process that is to join says of its rank before it has one."""
    said = []

    def made(sync):
        for ask in (lambda: sync.communicator, lambda: sync.local_leaves):
            with suppress(ConfigurationError):
                ask()
                said.append("has a rank")

    return *train(None, training, *faults, made=made)[:2], said


def test_a_process_has_a_rank_once_it_has_joined():
    training = Training(own=True)
    with Job(3) as job:
        first = [(training,), (training, Fault("finish", 2)), (training,)]
        *others, newcomer = job.run(early, first, [(training,)])
    assert newcomer.error is None
    assert newcomer.result[2] == []
    assert {len(each.result[2]) for each in others if each.result} == {2}
    check([*others, newcomer], training, killed=1)


def disturbed(training):
    """A rank dies and another joins, and the others hear of deaths here and there."""
    faults = {0: [Fault("", 150, "hears")], 1: [Fault("finish", 2)], 2: [Fault("", 130, "hears")]}
    check(trained(training, faults), training, killed=1)


KINDS = {
    "counts": Training(counted=True, leaves=5),
    "costs": Training(cost=True, leaves=7, until=9),
    "bfloat16": Training(dtype=torch.bfloat16, options=(("grad_dtype", torch.float32),)),
    "workers": Training(workers=2),
    "workers that stay": Training(workers=2, persistent=True, cost=True, until=9),
    "checks": Training(options=(("check_every", 1),)),
    "a communicator of its own": Training(own=True),
    "many buckets": Training(options=(("bucket_cap_mb", 1e-5),)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_training_has_goes_on(kind):
    disturbed(KINDS[kind])


def test_the_ledger_says_that_no_bit_has_changed(tmp_path):
    alone, both = (
        Training(options=(("ledger", str(tmp_path / name)),)) for name in ("alone", "both")
    )
    assert undisturbed(alone) == undisturbed(Training())
    trained(both, {1: [Fault("finish", 2)], 2: [Fault("", 130, "hears")]})
    found = compare(read(tmp_path / "alone"), read(tmp_path / "both"))
    assert found.same, str(found)


# --- A rank that gives up, and does not die.


def failing(_, training, where, how, folder=None, *faults):
    """Leaves fail on this rank; what its caller gets, and what it saves then."""
    syncs = []

    def in_leaf(step):
        if (step.number, step.leaf) in where:
            how()

    try:
        return train(None, training, *faults, in_leaf=in_leaf, made=syncs.append)
    except (ValueError, KeyboardInterrupt, pc.CollectiveError) as error:
        if folder is not None:
            syncs[0].save(folder / f"{type(error).__name__}.pt")
        return syncs[0].step, type(error).__name__, str(error)


def value_error():
    raise ValueError("of the data")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def failed(training, where, how=value_error, size=3, folder=None):
    with Job(size, replace=0) as job:
        return job.run(failing, [(training, each, how, folder) for each in where])


@pytest.mark.parametrize("how", [value_error, interrupt])
def test_a_rank_that_raises_leaves_and_others_compute_its_leaves(how):
    training = Training(ranks=0)
    outcomes = failed(training, [{}, {(2, 2)}, {}], how)
    step, kind, said = outcomes.pop(1).result
    assert (step, kind) == (2, {value_error: "ValueError", interrupt: "KeyboardInterrupt"}[how])
    assert said == {value_error: "of the data", interrupt: ""}[how]
    check(outcomes, training)


def resumed(_, training, path):
    return train(None, training, made=lambda sync: sync.load(path))


def test_a_leaf_that_raises_on_every_rank_ends_the_training(tmp_path):
    training = Training(ranks=0)
    outcomes = failed(training, 3 * [{(3, 2)}], folder=tmp_path)
    found = [each.result for each in outcomes]
    assert sorted(each[:2] for each in found) == [
        (3, "CollectiveAborted"),
        (3, "ValueError"),
        (3, "ValueError"),
    ]
    [said] = [each[2] for each in found if each[1] == "CollectiveAborted"]
    assert "the training cannot go on, as leaf 2 of step 3 has failed on two ranks" in said
    for each in tmp_path.iterdir():  # the last committed step, on all
        with Job(2, replace=0) as job:
            check(job.run(resumed, 2 * [(training, each)]), training)


def leaving(_, training, step):
    """Leaves the loop of a step in its first leaf, and ends by itself."""
    sync = LeafSync(Network(), training.leaves, group=pc.init(timeout=20), elastic=True)
    samples = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(samples), batch_sampler=LeafSampler(sync, 96, 2))
    for each in sync.steps(loader, until=training.until):
        for (x,) in each:
            if each.number == step:
                break
            sync._model.module(x).sum().backward()
        if each.number == step:
            break
    with suppress(ConfigurationError):
        sync.close()
    return sync.step


def test_a_rank_that_leaves_the_loop_leaves():
    training = Training(ranks=0)
    with Job(3, replace=0) as job:
        outcomes = job.run(leaving, [(training, None), (training, None), (training, 2)])
    assert [each.error for each in outcomes] == 3 * [None]
    assert [each.result for each in outcomes] == [6, 6, 2]


# --- What ends a training.


def ends(_, training, *faults, timeout=20.0):
    try:
        return train(None, training, *faults, timeout=timeout)
    except (ConfigurationError, pc.CollectiveError) as error:
        return type(error).__name__, str(error)


def quick_ends(_, training, *faults):
    return ends(None, training, *faults, timeout=1.0)


def test_too_few_ranks_wait_for_others_no_longer_than_the_timeout():
    training = Training(ranks=0)
    with Job(3, replace=0, fewest=3) as job:
        first = [(training,), (training, Fault("finish", 2)), (training,)]
        outcomes = job.run(quick_ends, first)
    said = [each.result for each in outcomes if each.exit_code is None]
    assert [kind for kind, _ in said] == 2 * ["PeerFailure"]
    assert any(
        "2 rank(s) are left, at least 3 go on (--min), and no other has joined" in text
        for _, text in said
    )


def test_ranks_wait_until_enough_are_there():
    training = Training(ranks=0)
    with Job(3, fewest=3) as job:
        first = [(training,), (training, Fault("finish", 6)), (training,)]
        outcomes = job.run(train, first, 3 * [(training,)])
    assert len(check(outcomes, training, killed=1)) == 3


def closing_store(_, training, *faults):
    """The store ends after step 2, and then a rank."""

    def between(sync, step):
        if step == 2:
            store = StoreClient(os.environ["PYCOLLECTIVE_STORE"], job_secret(), 10)
            store.set(f"rank {sync.communicator.rank} is there", b"")
            await_(lambda: not works(store))

    try:
        return train(None, training, *faults, between=between)
    except pc.PeerFailure as error:
        return str(error)


def works(store):
    with suppress(ConfigurationError):
        store.check(["any"])
        return True


def test_without_the_store_a_loss_ends_the_training_and_no_loss_does_not():
    for faults in ((), (Fault("finish", 5),)):
        training = Training(ranks=0)
        with Job(3, replace=0, PYCOLLECTIVE_SECRET="word") as job:

            def close(job=job):
                await_(lambda: all(job._store.has(f"rank {rank} is there") for rank in range(3)))
                job._store.close()

            with beside(close):
                first = [(training,), (training, *faults), (training,)]
                outcomes = job.run(closing_store, first)
        if faults:
            said = [each.result for each in outcomes if each.exit_code is None]
            assert len(said) == 2
            assert all("the store has gone at which the ranks meet" in each for each in said)
        else:
            check(outcomes, training)


@contextmanager
def beside(function):
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join()


def stopping(_, training, where):
    def in_leaf(step):
        if (step.number, step.leaf) == where:
            os.kill(os.getpid(), signal.SIGSTOP)

    return train(None, training, in_leaf=in_leaf)


def test_a_rank_that_is_stopped_in_a_leaf_is_waited_for():
    training = Training(ranks=0)
    with Job(3, replace=0) as job:

        def wake():
            await_(lambda: Path(f"/proc/{job.pids[1]}/stat").read_text().split()[2] == "T")
            await_(lambda: asleep(job.pids[0]) and asleep(job.pids[2]))
            os.kill(job.pids[1], signal.SIGCONT)

        with beside(wake):
            outcomes = job.run(stopping, [(training, where) for where in (None, (2, 2), None)])
    assert all(each.count("shrink") == 0 for each in check(outcomes, training))


# --- Who joins.


class Forgets(Losses):
    def load_state_dict(self, state):
        self.each = state["each"][1:]


class Refuses(Losses):
    def load_state_dict(self, state):
        raise KeyError("of another version")


class NotSent:
    def __reduce__(self):
        raise TypeError("cannot be pickled")

    def __repr__(self):
        return "NotSent()"


class Keeps(Losses):
    def state_dict(self):
        return {**super().state_dict(), "kept": NotSent()}


UNLIKE = {
    "other parameters": (Training(width=9), CollectiveMismatch, "other parameters than rank 0"),
    "other leaves": (Training(leaves=5), CollectiveMismatch, "other leaves than rank 0: 5, not 4"),
    "another seed": (
        Training(options=(("seed", 5),)),
        CollectiveMismatch,
        "other seed than rank 0: 5, not 0",
    ),
    "another end": (Training(until=7), CollectiveMismatch, "other until than rank 0: 7, not 6"),
    "other objects": (Training(more=True), CollectiveMismatch, "other names of state()"),
    "what does not restore": (
        Training(losses=Forgets),
        CollectiveMismatch,
        "rank(s) 2 has been sent the state, and has other bits than rank 0",
    ),
    "what raises": (Training(losses=Refuses), KeyError, "of another version"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_newcomer_that_is_unlike_is_refused_and_the_others_go_on(kind):
    is_refused(Training(awaits=1), *UNLIKE[kind])


def test_a_state_that_cannot_be_sent_lets_nobody_in_and_the_others_go_on():
    training = Training(awaits=1, losses=Keeps)
    said = "refused on rank(s) 0: TypeError: cannot be pickled"
    is_refused(training, training, ConfigurationError, said)


def is_refused(training, other, error, said):
    """The newcomer of another training is told why."""
    with Job(3) as job:
        first = [(training,), (training, Fault("finish", 2)), (training,)]
        *outcomes, refused = job.run(train, first, [(other,)])
    assert type(refused.error) is error
    assert said in str(refused.error)
    check(outcomes, training, killed=1)


def loading(_, training, path, *faults):
    hooks = {} if path is None else {"made": lambda sync: sync.load(path)}
    return train(None, training, *faults, **hooks)


def test_what_a_newcomer_has_loaded_does_not_matter(tmp_path):
    training = Training()
    syncs = []
    with pc.init(rank=0, size=1) as comm:
        replace(training, until=4).run(
            comm, made=syncs.append, ended=lambda sync: sync.save(tmp_path / "old.pt")
        )
    with Job(3) as job:
        first = [(training, None), (training, None, Fault("finish", 2)), (training, None)]
        check(job.run(loading, first, [(training, tmp_path / "old.pt")]), training, killed=1)


# --- What is left behind, and what programs do between steps.


def counting(_, training, *faults):
    found = []

    def between(sync, step):
        if step in (5, training.until - 1):
            gc.collect()
            found.append(counts())

    return train(None, training, *faults, between=between), found


def test_many_changes_leave_nothing_behind():
    training = Training(ranks=0, until=40)
    with Job(3, replace=0) as job:
        outcomes = job.run(counting, [(training, *MANY[rank]) for rank in range(3)])
    for each in outcomes:
        (_, _, calls), (before, after) = each.result
        assert calls.count("shrink") > 30
        assert after == before


def talking(_, training, *faults):
    """Ranks use their communicator between steps."""

    def between(sync, step):
        with suppress(pc.CollectiveError):
            sync.communicator.all_reduce(np.ones(3))

    return train(None, training, *faults, between=between)


def test_what_a_call_between_steps_raises_the_next_step_makes_good():
    training = Training(ranks=0)
    for number in (1, 2):
        faults = {1: [Fault("all_reduce", number)], 2: [Fault("all_reduce", number, "hears")]}
        with Job(3, replace=0) as job:
            outcomes = job.run(talking, [(training, *faults.get(rank, ())) for rank in range(3)])
        check(outcomes, training, killed=1)


# --- A kill at every point.


def points(training):
    """How many calls a rank makes in a training without deaths."""
    calls = check(trained(training, {}, replace=0), training)
    return min(map(len, calls))


def killed_at(rank, number, other=None, later=None):
    """One rank dies at a call of its own; and another at a call in what follows."""
    faults = {rank: [Fault("", number)]}
    if other is not None:
        faults[other] = [Fault("", later, after="shrink")]
    outcomes = trained(Training(), faults)
    check(outcomes, Training(), killed=sum(each.exit_code is not None for each in outcomes))


@pytest.mark.parametrize("number", [2, 12, 15, 16, 26])
def test_a_kill_at_some_points(number):
    killed_at(number % 3, number)
    killed_at(number % 3, number, (number + 1) % 3, number // 2)


@pytest.mark.storm
@pytest.mark.parametrize("rank", range(3))
def test_a_kill_at_every_point(rank):
    most = points(Training())
    assert most > 40
    for number in range(1, most + 1):
        killed_at(rank, number)


@pytest.mark.storm
@pytest.mark.parametrize("rank", range(3))
def test_a_second_kill_at_every_point_of_what_follows(rank):
    chosen = random.Random(rank)
    for later in range(1, 61):
        killed_at(rank, chosen.randint(1, 40), (rank + chosen.randint(1, 2)) % 3, later)


@pytest.mark.storm
def test_a_kill_at_every_point_of_joining():
    training, first = Training(until=9), {1: [Fault("add", 3)]}
    for number in range(1, 46):
        outcomes = trained(training, first, [[Fault("", number)]])
        check(outcomes, training, killed=2)
        outcomes = trained(training, {**first, 0: [Fault("", number, after="grow")]})
        check(outcomes, training, killed=2)


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(100))
def test_ranks_hear_and_die_anywhere(seed):
    chosen = random.Random(seed)
    faults = {
        rank: [Fault("", chosen.randint(1, 60), "hears"), Fault("", chosen.randint(1, 99), "hears")]
        for rank in range(3)
    }
    faults[chosen.randrange(3)].append(Fault("", chosen.randint(1, 50)))
    check(trained(Training(), faults), Training(), killed=1)


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(100))
def test_a_rank_raises_and_another_dies_anywhere(seed):
    chosen = random.Random(seed)
    training, where = Training(ranks=0), (chosen.randrange(6), chosen.randrange(4))
    after = chosen.choice(["", "shrink"])
    fault = Fault("", chosen.randint(1, 20 if after else 50), after=after)
    raises, dies = chosen.sample(range(3), 2)
    first = [
        (training, {where} if rank == raises else {}, value_error, None, *[fault] * (rank == dies))
        for rank in range(3)
    ]
    with Job(3, replace=0) as job:
        outcomes = job.run(failing, first)
    if outcomes[raises].result is None or outcomes[raises].result[1] == "ValueError":
        del outcomes[raises]
    check(outcomes, training, killed=sum(each.exit_code is not None for each in outcomes))


# --- What is refused.


def alone():
    return LeafSync(Network(), 4, group=pc.init(), elastic=True)


def loader_of(sync):
    return DataLoader(TensorDataset(torch.randn(96, 6)), batch_sampler=LeafSampler(sync, 96, 2))


def of_torch(folder):
    LeafSync(Network(), 4, group=dist.group.WORLD, elastic=True)


def in_ddp(folder):
    LeafSync(DistributedDataParallel(Network()), 4, elastic=True)


def in_shards(folder):
    model = Network()
    fully_shard(model)
    LeafSync(model, 4, elastic=True)


def of_split(folder):
    group = pc.init().split(0)
    with mock.patch.object(pc.Communicator, "size", 2):  # one rank loses nobody
        LeafSync(Network(), 4, group=group, elastic=True)


def by_leaves(folder):
    with alone().leaf(0):
        pass


def by_finish(folder):
    alone().finish()


def in_two_loops(folder):
    sync = alone()
    loop = sync.steps(loader_of(sync))
    next(loop)
    sync.steps(loader_of(sync))


def two_of_a_name(folder):
    sync = alone()
    sync.state(losses=Losses())
    sync.state(losses=Losses())


def no_state(folder):
    alone().state(rate=0.1)


def another_file(folder):
    torch.save({"a": 1}, folder / "other.pt")
    alone().load(folder / "other.pt")


def other_objects(folder):
    sync = alone()
    sync.save(folder / "one.pt")
    sync.state(losses=Losses())
    sync.load(folder / "one.pt")


def not_elastic(folder):
    LeafSync(Network(), 4, group=pc.init()).communicator  # noqa: B018


REFUSED = {
    of_torch: "group is a Communicator or None, and not a ProcessGroup",
    in_ddp: "takes a bare model: DistributedDataParallel keeps the number of ranks",
    in_shards: "with fully_shard a rank that dies takes its part of the weights along",
    of_split: "the ranks of this communicator have no store at which they could meet again",
    by_leaves: "in place of leaf\\(\\) and finish",
    by_finish: "in place of leaf\\(\\) and finish",
    in_two_loops: "with elastic=True there is one loop",
    two_of_a_name: "another object is registered as losses",
    no_state: "rate is a float, which has no state_dict",
    another_file: "other.pt was not written by LeafSync.save",
    other_objects: r"the state is of \[\], and here are \['losses'\]",
    not_elastic: "a communicator with elastic=True alone",
}


def refusing(_, folder):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for case, why in REFUSED.items():
            with pytest.raises(ConfigurationError, match=why):
                case(folder)
    finally:
        dist.destroy_process_group()


def test_what_is_refused_says_why(tmp_path):
    with Job(1) as job:
        [outcome] = job.run(refusing, [(tmp_path,)])
    if outcome.error:
        raise outcome.error
    with pytest.raises(ConfigurationError, match="a model on CPUs, and this one is on cuda:0"):
        elastic_of(mock.Mock(), Network(), None, mock.Mock(device="cuda:0"))
