"""Each collective returns the array that holds its result, the caller's own; with async_op=True
`Work.wait` does."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import pycollective as pc
from tests.dlpack_producers import Behind

# Of each operation: how it is called with arrays of a whole and of a shard, and where its result
# is: in the whole, in the shard, or nowhere. `root` is rank 1.
CALLS = {
    "all_reduce": (lambda c, whole, shard, **more: c.all_reduce(whole, **more), "whole"),
    "all_reduce to out": (
        lambda c, whole, shard, **more: c.all_reduce(whole.copy(), "max", whole, **more),
        "whole",
    ),
    "reduce": (lambda c, whole, shard, **more: c.reduce(whole, 1, **more), "whole on the root"),
    "reduce to out": (
        lambda c, whole, shard, **more: c.reduce(whole.copy(), 1, out=whole, **more),
        "whole on the root",
    ),
    "reduce_scatter": (
        lambda c, whole, shard, **more: c.reduce_scatter(shard, whole, **more),
        "shard",
    ),
    "all_gather": (lambda c, whole, shard, **more: c.all_gather(whole, shard, **more), "whole"),
    "broadcast": (lambda c, whole, shard, **more: c.broadcast(whole, 1, **more), "whole"),
    "all_to_all": (lambda c, whole, shard, **more: c.all_to_all(whole, whole, **more), "whole"),
    "gather": (
        lambda c, whole, shard, **more: c.gather(whole, shard, 1, **more),
        "whole on the root",
    ),
    "scatter": (lambda c, whole, shard, **more: c.scatter(shard, whole, 1, **more), "shard"),
    "barrier": (lambda c, whole, shard, **more: c.barrier(**more), "nowhere"),
}


def returned(comm: pc.Communicator, name: str) -> list[str]:
    """Where the results of a call are that blocks, and of one with async_op=True."""
    call, _ = CALLS[name]
    found = []
    for asynchronous in (False, True):
        whole, shard = np.arange(6.0), np.arange(2.0)
        result = call(comm, whole, shard, async_op=asynchronous)
        if asynchronous:
            assert isinstance(result, pc.Work)
            again = result.wait(timeout=30)
            result = result.wait(timeout=0)
            assert again is result
        places = {id(whole): "whole", id(shard): "shard", id(None): "nowhere"}
        found.append(places[id(result)])
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_the_array_that_holds_its_result(pool, name):
    _, where = CALLS[name]
    for rank, found in enumerate(pool(3).call(returned, name)):
        here = where.removesuffix(" on the root")
        expected = here if here == where or rank == 1 else "nowhere"
        assert found == [expected, expected], rank


def messages(comm: pc.Communicator) -> list[object]:
    """What `send` and `recv` return, and the `wait` of each."""
    x = np.zeros(3)
    if comm.rank == 0:
        return [comm.send(x, 1), comm.send(x, 1, async_op=True).wait(timeout=30)]
    works = [comm.recv(x, 0), comm.recv(x, async_op=True).wait(timeout=30)]
    return works


def test_a_send_returns_nothing_and_a_receive_who_sent(pool):
    assert pool(2).call(messages) == [[None, None], [0, 0]]


def test_an_array_behind_dlpack_comes_back_as_itself():
    with pc.init() as comm:
        x, out = Behind(np.arange(3.0)), Behind(np.zeros(3))
        assert comm.all_reduce(x) is x
        assert comm.all_reduce(x, out=out) is out
        assert comm.all_reduce(x, out=out, async_op=True).wait() is out


def test_a_call_keeps_no_array_beyond_its_work():
    with pc.init() as comm:
        for asynchronous in (False, True):
            x = np.zeros((3, 4))
            seen = weakref.ref(x)
            result = comm.all_reduce(x, async_op=asynchronous)
            if asynchronous:
                del x
                assert seen() is not None
                assert result.wait() is seen()
            del result
            x = None
            gc.collect()
            assert seen() is None
