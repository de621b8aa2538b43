"""`LeafSync.steps`: leaves come with their batches, whoever has them; what else is refused."""

from __future__ import annotations

import itertools
import operator
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pycollective as pc
from pycollective import CollectiveAborted, CollectiveMismatch, ConfigurationError, reference
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


def backward(model, batch):
    model(batch[0]).sum().backward()


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
        sync.clip_grad_norm_(1.0)
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
        sync.clip_grad_norm_(1.0)
        optimizer.step()
    sync.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().tobytes()


def test_leaf_by_leaf_a_training_is_the_same(pool):
    assert {*pool(2).call(by_hand, 5, 4)} == {pool(1).call(trained, 5, 4, False)[0][0]}


def resumed(comm, until, state):
    """The weights after `until` steps: from a checkpoint, or two of them in one loop each."""
    model = network()
    sync = LeafSync(model, 5, seed=1, group=standing_group(comm))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
    # Not forked: a fork of a process with threads may hang, and did in two of three long runs.
    loader = loader_of(sync, num_workers=1, multiprocessing_context="spawn")
    steps = sync.steps(loader, until=until)
    assert len(steps) == until - sync.step
    for step in steps:
        for x, _ in step:
            scaler.scale(model(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        sync.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    assert len(steps) == 0
    assert next(steps, None) is None
    sync.close()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sync": sync.state_dict(),
    }


def test_a_run_goes_on_from_a_checkpoint_on_other_ranks_with_workers_and_a_scaler(pool):
    state = pool(2).call(resumed, 3, None)[0]
    state = pool(1).call(resumed, 6, state)[0]
    weights = torch.cat([each.flatten() for each in state["model"].values()])
    assert weights.numpy().tobytes() == pool(1).call(trained, 5, 6, False)[0][0]


# --- What the ranks must have alike.


def told_apart(comm, case):
    """What rank 1 does otherwise, and what each rank is told."""
    mine = comm.rank == 1
    model = network()
    # What is given up may stay without its partner.
    sync = LeafSync(model, 2, group=standing_group(comm))
    micro_batch = 3 if case == "micro_batch" and mine else 2
    loader = DataLoader(dataset(), batch_sampler=LeafSampler(sync, SAMPLES, micro_batch))
    if case == "loader" and mine:
        loader = [1, 2]
    if case == "step" and mine:
        sync.load_state_dict({**sync.state_dict(), "step": 4})
    try:
        until = {"until": 9, "no until": "all"}.get(case, 3) if mine else 3
        for step in sync.steps(loader, until=until):
            for batch in step:
                names = {"other" if case == "name" and mine else "loss": 1.0}
                if case != "no log" or not mine or step.number == 0:
                    step.log(**names)
                backward(model, batch)
                if case == "break" and mine and step.number == 1:
                    break
    except (CollectiveAborted, CollectiveMismatch, ConfigurationError) as error:
        assert case != "break" or all(each.grad is None for each in model.parameters())
        return type(error).__name__, str(error)
    finally:
        with suppress(ConfigurationError):
            sync.close()


MISMATCH = {
    "name": "step 0: leaf 0 logs ['loss'], and leaf 1 ['other']: all leaves of a step log the same",
    "no log": "step 1: leaf 0 logs ['loss'], and leaf 1 []: all leaves of a step log the same",
    "until": "steps: rank(s) 1 have other until than rank 0: 9, not 3",
    "micro_batch": "steps: rank(s) 1 have other micro_batch than rank 0: 3, not 2",
    "step": "steps: rank(s) 1 have other step than rank 0: 4, not 0",
}


@pytest.mark.parametrize("case", MISMATCH)
def test_ranks_are_told_what_they_have_unlike(pool, case):
    for kind, said in pool(2).call(told_apart, case):
        assert kind == "CollectiveMismatch"
        assert MISMATCH[case] in said


@pytest.mark.parametrize(
    ("case", "why"),
    [("loader", "batch_sampler lacks in this list"), ("no until", "until is 'all', which is no")],
)
def test_all_are_told_of_what_one_rank_gives(pool, case, why):
    (first, other), (second, own) = pool(2).call(told_apart, case)
    assert first == second == "ConfigurationError"
    assert "refused on rank(s) 1" in other
    assert why in other
    assert why in own


def test_all_are_told_of_one_ranks_early_break(pool):
    (first, heard), (second, own) = pool(2).call(told_apart, "break")
    assert (first, second) == ("CollectiveAborted", "ConfigurationError")
    assert "leaf 1 of step 1 was left before its end" in heard
    assert "leaf 1 of step 1 was left before its end" in own


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
    for call in (sync.close, sync.finish, lambda: next(steps), sync.leaf(0).__enter__):
        with pytest.raises(ConfigurationError, match=why):
            call()
    sync.close()  # said once


def raising(model, sync):
    for step in sync.steps(loader_of(sync)):
        for batch in step:
            if step.leaf == 2:
                raise KeyError("data")
            backward(model, batch)


def swallowed(model, sync):
    with suppress(KeyError):
        raising(model, sync)
    sync.close()


def none(model, sync):
    for batch in next(sync.steps(loader_of(sync))):
        model(batch[0])


def twice(model, sync):
    for batch in next(sync.steps(loader_of(sync))):
        backward(model, batch)
        backward(model, batch)


def two_loops(model, sync):
    steps = sync.steps(loader_of(sync))
    next(steps)
    next(sync.steps(loader_of(sync)))
    next(steps)


def a_loop_inside_a_step(model, sync):
    for batch in next(sync.steps(loader_of(sync))):
        backward(model, batch)
        sync.steps(loader_of(sync))


def test_close_ends_the_leaf_that_is_under_way(made):
    """An iterator that something keeps would put random numbers back later."""
    model, sync = made
    drawn = torch.get_rng_state()
    step = next(sync.steps(loader_of(sync, generator=torch.Generator())))
    kept = iter(step)
    backward(model, next(kept))
    assert not torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(ConfigurationError, match="leaf 0 of step 0 was left before its end"):
        sync.close()
    assert step.leaf is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert next(kept, None) is None


def test_a_loop_that_was_left_between_steps_is_over(made):
    model, sync = made
    for step in sync.steps(loader_of(sync)):
        for batch in step:
            backward(model, batch)
        break
    for leaf in sync.local_leaves:
        with sync.leaf(leaf):
            backward(model, dataset()[[leaf]])
    sync.finish()
    assert sync.step == 2


def step_of(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for batch in step:
        backward(model, batch)
    return step


def iterated_twice(model, sync):
    iter(step_of(model, sync))


def after_its_time(model, sync):
    step = next(sync.steps(loader_of(sync)))
    next(sync.steps(loader_of(sync)))
    iter(step)


def not_iterated(model, sync):
    steps = sync.steps(loader_of(sync))
    next(steps)
    next(steps)


def kept_iterator(model, sync):
    steps = sync.steps(loader_of(sync))
    batches = iter(next(steps))
    backward(model, next(batches))
    next(steps)


def leaf_inside(model, sync):
    steps = sync.steps(loader_of(sync))
    next(steps)
    with sync.leaf(0):
        pass


def finish_inside(model, sync):
    for batch in next(sync.steps(loader_of(sync))):
        backward(model, batch)
        sync.finish()


def finish_after(model, sync):
    for step in sync.steps(loader_of(sync)):
        for batch in step:
            backward(model, batch)
        sync.finish()


def caught(model, sync):
    """A backward that raises half way, and whose error is caught."""

    def fail(gradient):
        raise RuntimeError("out of memory")

    for x, _ in next(sync.steps(loader_of(sync))):
        hidden = model[0](x)
        hidden.register_hook(fail)
        with suppress(RuntimeError):
            model[2](hidden).sum().backward()


def optimizer_inside(model, sync):
    for batch in next(sync.steps(loader_of(sync))):
        backward(model, batch)
        torch.optim.SGD(model.parameters()).step()


def count_after(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for batch in step:
        backward(model, batch)
        step.count(2)


def count_twice(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for _ in step:
        step.count(2)
        step.count(2)


def count_on_some(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for batch in step:
        if step.leaf != 2:
            step.count(2)
        backward(model, batch)


def log_twice(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for _ in step:
        step.log(loss=1)
        step.log(loss=2)


def log_a_vector(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for _ in step:
        step.log(loss=torch.ones(2))


def read_too_early(model, sync):
    step = next(sync.steps(loader_of(sync)))
    for _ in step:
        step.logged["loss"]


def no_sampler(options):
    return lambda model, sync: sync.steps(DataLoader(dataset(), **options))


def another_syncs(model, sync):
    with pc.init(rank=0, size=1) as comm:
        sync.steps(loader_of(LeafSync(network(), 4, group=comm)))


def iterator_of(model, sync):
    sync.steps(iter(loader_of(sync)))


def out_of_order(model, sync):
    sync.steps(loader_of(sync, num_workers=1, in_order=False))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(torch.ones(3))


class Wrapped:
    """Hands out what a loader does, as wrappers for devices do, or less or more."""

    def __init__(self, loader, iterate):
        self.batch_sampler, self._loader, self._iterate = loader.batch_sampler, loader, iterate

    def __iter__(self):
        return self._iterate(self._loader)


def ends(model, sync):
    loader = Wrapped(loader_of(sync), lambda loader: itertools.islice(loader, 6))
    for step in sync.steps(loader):
        for batch in step:
            backward(model, batch)


def drops(model, sync):
    loader = Wrapped(loader_of(sync), lambda loader: (x for x in loader if 7 not in x[1]))
    for step in sync.steps(loader, until=7):
        for batch in step:
            backward(model, batch)


def made_before(model, sync):
    batches = iter(loader_of(sync))
    next(batches)
    loader = Wrapped(loader_of(sync), lambda _: batches)
    for batch in next(sync.steps(loader)):
        backward(model, batch)


def extra_next(model, sync):
    """A loader that keeps its workers has one iterator for all who ask."""
    loader = loader_of(sync, num_workers=1, persistent_workers=True)
    try:
        for step in sync.steps(loader, until=3):
            for batch in step:
                backward(model, batch)
            next(iter(loader))
    finally:
        loader._iterator._shutdown_workers()  # or it lives as long as the error, and has our pipes


def loaded_inside(model, sync):
    for step in sync.steps(loader_of(sync), until=9):
        for batch in step:
            backward(model, batch)
        sync.load_state_dict({**sync.state_dict(), "step": 7})


def closed(model, sync):
    sync.close()
    sync.steps(loader_of(sync))


REFUSED = {
    "after close()": (closed, "this LeafSync cannot go on: it was closed"),
    "an exception that was dropped": (swallowed, "leaf 2 of step 0 was left before its end"),
    "no backward": (none, "leaf 0 has no backward"),
    "two backwards": (twice, "has come twice in leaf 0"),
    "two loops": (two_loops, "a LeafSync has one loop at a time"),
    "a loop inside a step": (a_loop_inside_a_step, "step 0 is under way, and no other begins"),
    "a step iterated twice": (iterated_twice, "step 0 was iterated already"),
    "a step after its time": (after_its_time, "step 0 is over"),
    "a step not iterated": (not_iterated, "step 0 was not gone through"),
    "an iterator that is kept": (kept_iterator, "leaf 0 of step 0 was left before its end"),
    "leaf() inside": (leaf_inside, "step 0 is that of sync.steps"),
    "finish() inside": (finish_inside, "step 0 is that of sync.steps"),
    "finish() after": (finish_after, "step 1 is that of sync.steps"),
    "an error of backward that is caught": (caught, "a backward of leaf 0 raised, and something"),
    "an optimizer's step inside": (optimizer_inside, "SGD steps inside leaf 0"),
    "a count after backward": (count_after, "leaf 0: its count comes once, and before"),
    "a count twice": (count_twice, "leaf 0: its count comes once, and before"),
    "a count on some leaves": (count_on_some, "leaf 2: all leaves of a step have a count, or none"),
    "a count outside": (lambda m, s: step_of(m, s).count(3), "step.count() outside a leaf of step"),
    "a log outside": (lambda m, s: step_of(m, s).log(loss=3), "step.log() outside a leaf of step"),
    "a log twice": (log_twice, "leaf 0 logs loss twice"),
    "a log of a vector": (log_a_vector, "leaf 0 logs loss, which is no number"),
    "a log read too early": (read_too_early, "step 0 is not complete"),
    "batches of a size": (no_sampler({"batch_size": 2}), "this DataLoader is BatchSampler, and"),
    "no batches": (no_sampler({"batch_size": None}), "batch_sampler lacks in this DataLoader"),
    "a list": (lambda _, sync: sync.steps([1, 2]), "batch_sampler lacks in this list"),
    "an iterator": (iterator_of, "_SingleProcessDataLoaderIter is an iterator"),
    "an IterableDataset": (
        lambda _, sync: sync.steps(DataLoader(Endless())),
        "Endless is an IterableDataset",
    ),
    "another LeafSync's sampler": (another_syncs, "LeafSampler is of another LeafSync"),
    "batches in any order": (out_of_order, "has in_order=False"),
    "a loader that ends": (ends, "the loader ended before leaf 2 of step 1"),
    "a loader that drops a batch": (drops, "batches were drawn that have not come"),
    "a loader that was begun before": (made_before, "something else iterates the loader"),
    "an extra next()": (extra_next, "something else iterates the loader"),
    "a checkpoint inside a loop": (loaded_inside, "is of leaf 0 of step 1, and not of leaf 0 of"),
    "no end": (lambda _, sync: sync.steps(loader_of(sync), until=1.5), "until is 1.5, which is no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(made, case):
    call, why = REFUSED[case]
    with pytest.raises(ConfigurationError) as raised:
        call(*made)
    assert why in str(raised.value)


def test_a_loop_without_an_end_has_no_length(made):
    _, sync = made
    with pytest.raises(TypeError, match="has no end: give it one by until="):
        len(sync.steps(loader_of(sync)))


class ByList:
    """A dataset that reads many samples at once."""

    def __init__(self, whole):
        self._whole = whole

    def __getitems__(self, indices):
        return [self._whole[each] for each in indices]


def test_leaves_are_read_out_of_turn(made):
    _, sync = made
    ahead = loader_of(sync)
    drawn = [*itertools.islice(ahead, 44)]  # three epochs of five steps of four leaves, nearly
    sampler = LeafSampler(sync, SAMPLES, 2)
    for loader in (ahead, DataLoader(ByList(dataset()), batch_sampler=sampler)):
        for at in (43, 0, 21, 22):
            read = sampler.read(loader, *divmod(at, 4))
            assert all(map(torch.equal, read, drawn[at]))
    with pytest.raises(ConfigurationError, match="Endless is an IterableDataset"):
        sampler.read(DataLoader(Endless()), 0, 0)
    for step, leaf in ((-1, 0), (0, 4)):
        with pytest.raises(ConfigurationError, match=f"step {step}, leaf {leaf}: steps are from"):
            sampler.read(ahead, step, leaf)
