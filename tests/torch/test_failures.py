"""Failures through torch: an error keeps its type and words on every way out, on every rank."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch
from pycollective import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, PeerFailure
from tests.harness import await_, results, run_ranks
from tests.joining import failing
from tests.torch.groups import backend_of, join, standing_group


def leaves(group):
    dist.destroy_process_group(group)


def calls_something_else(group):
    with pytest.raises(CollectiveMismatch):
        dist.broadcast(torch.ones(3), group=group, group_src=0)


def aborts(group):
    group.abort()


def calls_nothing(group):
    pass


# What rank 1 does instead of what the others call; the error; what its message says.
CAUSES = {
    "died": (leaves, PeerFailure, "rank 1 "),
    "mismatch": (calls_something_else, CollectiveMismatch, "broadcast(float32, count 3, root 0)"),
    "aborted": (aborts, CollectiveAborted, "rank 1 aborted the communicator"),
    "timeout": (calls_nothing, CollectiveTimeout, "rank(s) 1 have not called it"),
}


def waits(group):
    return dist.all_reduce(torch.ones(4), group=group, async_op=True).wait


def waits_for_a_future(group):
    return dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().wait


def waits_for_all_futures(group):
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
    return lambda: torch.futures.wait_all([each.get_future() for each in works])


def reads_a_future(group):
    future = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()

    def value():
        end = time.monotonic() + 20
        while not future.done() and time.monotonic() < end:
            time.sleep(0.01)
        return future.value()

    return value


def waits_for_a_tensor(group):
    return lambda: functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", group))


def goes_backward(group, hook=None):
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    if hook is not None:
        model.register_comm_hook(group, hook)
    loss = model(torch.ones(2, 8)).sum()
    return lambda model=model: loss.backward()  # the model must live


def goes_backward_with_the_hook(group):
    return goes_backward(group, pycollective.torch.all_reduce_hook)


def goes_backward_with_a_callback(group):
    return goes_backward(group, default_hooks.fp16_compress_hook)  # decompresses in one


def goes_backward_sharded(group):
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), reshard_after_forward=False)
    return model(torch.ones(2, 8)).sum().backward


WAYS = [
    *(waits, waits_for_a_future, waits_for_all_futures, reads_a_future, waits_for_a_tensor),
    *(goes_backward, goes_backward_with_the_hook, goes_backward_sharded),
]
# Torch makes a RuntimeError of what a callback in Python raises, with this before its name.
OPENING = "Got the following error when running the callback: "


def meets(comm, way, cause):
    """What a rank that keeps waiting is told."""
    standing_group(comm)
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    backward = "backward" in way.__name__
    wait = way(group) if backward else None  # as far as the forward pass, in which ranks meet
    dist.barrier()  # so that all are through it
    told = None
    if comm.rank == 1:
        CAUSES[cause][0](group)
    else:
        if cause == "timeout":
            group.set_timeout(datetime.timedelta(seconds=0.2))
        try:
            (wait or way(group))()
        except Exception as error:
            told = error
    dist.barrier()
    if cause != "died" or comm.rank != 1:
        dist.destroy_process_group(group)
    return told


# Each cause on one way, and one cause on each: a way carries whatever it is.
@pytest.mark.parametrize(
    ("way", "cause"),
    [(waits, cause) for cause in CAUSES] + [(way, "mismatch") for way in WAYS[1:]],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_an_error_keeps_its_type(pool, way, cause):
    _, kind, words = CAUSES[cause]
    first, _, third = pool(3).call(meets, way, cause)
    for error in (first, third):
        assert type(error) is kind, error
        assert words in str(error)
        assert error.rank in (0, 1, 2)
        assert error.op
        if cause == "timeout":  # as PyTorch's own tests match it
            assert " timed out " in str(error)
            assert " timeout " in str(error)


@pytest.mark.parametrize("cause", ["died", "aborted"])
def test_what_torch_makes_of_an_error_in_a_callback_names_it(pool, cause):
    _, kind, words = CAUSES[cause]
    first, _, third = pool(3).call(meets, goes_backward_with_a_callback, cause)
    made = [error for error in (first, third) if type(error) is RuntimeError]
    for error in (first, third):
        assert words in str(error)
        # Its own where the hook's call itself was refused.
        assert type(error) is RuntimeError or type(error) is kind, error
    for error in made:
        assert str(error).startswith(f"{OPENING}{kind.__name__}: ")
    # Not both are refused: unless rank 1 has told them, one finds out by its call.
    assert made or cause == "aborted", (first, third)


def backward_with_a_death(comm):
    join(comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.2
    )
    model.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    for _ in range(3):
        model(torch.ones(2, 256)).sum().backward()
    loss = model(torch.ones(2, 256)).sum()
    if comm.rank == 1:
        # In the middle: when the third of the layers' gradients is there, after a bucket has gone.
        model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model(torch.ones(2, 256)).sum().backward()
    first, second = failing(loss.backward), failing(lambda: dist.barrier(dist.group.WORLD))
    return first[0], *second


@pytest.mark.alone  # how soon is part of it
def test_a_rank_that_dies_in_backward_is_named_by_backward():
    outcomes = run_ranks(backward_with_a_death, 3)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        first, second, seconds = results([outcomes[rank]])[0]
        assert isinstance(first, PeerFailure), first
        assert f"rank 1 (pid {outcomes[1].pid}) died" in str(first)
        assert isinstance(second, PeerFailure)
        assert "refused" in str(second)
        assert seconds < 5


def fails_alone(comm, how, told):
    """Rank 0's call has a timeout of its own, or is interrupted; rank 1 comes once it has ended."""
    standing_group(comm)
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=0.3 if how == "its own timeout" else 30)
    if comm.rank == 1:
        await_(told.exists)
    elif how == "Ctrl-C":
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        return failing(lambda: group.allreduce([torch.ones(4)], options).wait())
    finally:
        told.touch()
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("its own timeout", CollectiveTimeout, CollectiveTimeout),
        ("Ctrl-C", KeyboardInterrupt, CollectiveAborted),
    ],
)
def test_a_call_that_ends_before_its_group_does_tells_the_peers(pool, tmp_path, how, own, others):
    (first, seconds), (second, _) = pool(2).call(fails_alone, how, tmp_path / "told")
    assert type(first) is own
    assert type(second) is others
    assert seconds < 10  # the group's timeout is 30 s
    assert how != "Ctrl-C" or "rank 0 was interrupted" in str(second)


def destroy_in_a_handler(comm, folder):
    join(comm)
    group = dist.group.WORLD
    communicator = backend_of(group).communicator

    def handle(*_):
        dist.destroy_process_group()
        (folder / "handled").touch()

    def interrupt():
        await_(lambda: communicator.pending)
        os.kill(os.getpid(), signal.SIGTERM)

    if comm.rank == 0:
        signal.signal(signal.SIGTERM, handle)
        threading.Thread(target=interrupt).start()
    else:
        await_((folder / "handled").exists)
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except CollectiveAborted as error:
        return str(error), communicator.closed, dist.is_initialized()
    return None


@pytest.mark.alone
def test_a_signal_handler_may_destroy_the_group_whose_call_it_interrupts(tmp_path):
    said = "rank 0 aborted the communicator: a signal handler closed it in the middle of a call"
    (own, *here), (others, *there) = results(run_ranks(destroy_in_a_handler, 2, tmp_path))
    assert own == said
    assert others.startswith(f"all_reduce refused: this communicator failed before: {said}")
    assert (here, there) == ([True, False], [False, True])
