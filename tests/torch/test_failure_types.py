"""An error keeps its type through every way out of torch, and its message what people look for."""

from __future__ import annotations

import datetime
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
from tests.torch.groups import standing_group


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
