"""Calls on GPUs' arrays that differ, in each state: beside work that is under way, without waiting,
and in a capture. Nothing moves, each rank is told, and later use is refused for the same reason."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import CollectiveMismatch, _core
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.cuda.captures import Capture
from tests.harness import Ranks, results

RANKS = 3
DIFFERS = 1  # the rank that calls something else
SOON = 3.0  # seconds


def on_gpu(comm, x):
    return DeviceArray.from_numpy(x, comm.device, _core.DeviceStream(comm.device))


def op_of(comm):
    return "max" if comm.rank == DIFFERS else "sum"


def beside_work(comm, array, driver):
    """The call before is under way, and on one GPU its stream has not come to it."""
    before = on_gpu(comm, np.full(5000, 1.0, np.float32))
    by_host = comm.device_path[0] == "host"
    release = threading.Event().set
    if comm.rank == 2:
        release = driver.hold(comm.device, before.stream.handle)
    if by_host:  # where calls are carried out one after the other
        threading.Timer(0.3, release).start()
    work = comm.all_reduce(before, async_op=True)
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatch) as info:
        comm.all_reduce(array, op=op_of(comm))
    assert time.monotonic() - begin < SOON
    if comm.rank != 2:  # its kernel waits for no one any more
        before.stream.synchronize(SOON)
    release()
    before.stream.synchronize(SOON)
    done = True
    try:
        work.wait(timeout=SOON)
    except CollectiveMismatch:  # which others have come to before this rank was done
        done = False
    if by_host and done:
        assert (before.to_numpy() == RANKS).all()
    return str(info.value)


def without_waiting(comm, array, driver):
    """The second of three that nobody has waited for; what came before it is right."""
    first, third = (on_gpu(comm, np.full(50, 1.0, np.float32)) for _ in range(2))
    works, told = [], []
    # Where others have come to the second before, the first or the call itself may say so, too.
    for call, op in ((first, "sum"), (array, op_of(comm))):
        try:
            works.append(comm.all_reduce(call, op=op, async_op=True))
        except CollectiveMismatch as error:
            told.append(error)
    for work in works:
        try:
            work.wait(timeout=SOON)
        except CollectiveMismatch as error:
            told.append(error)
    assert told
    with pytest.raises(CollectiveMismatch):
        comm.all_reduce(third, async_op=True)
    assert (third.to_numpy() == 1).all()
    # By way of the host its result is there; kernels may have been told to stop.
    if comm.device_path[0] == "host" and len(told) == 1:
        assert (first.to_numpy() == RANKS).all()
    return str(told[0])


def captured(comm, array, driver):
    """In a capture, which its owner can end; the graph does nothing."""
    comm.all_reduce(on_gpu(comm, np.zeros(10, np.float32)))  # the program is known
    with Capture(comm.device, array.stream) as capture:
        with pytest.raises(CollectiveMismatch) as info:
            comm.all_reduce(array, op=op_of(comm))
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(array)
    capture.replay()
    array.stream.synchronize(SOON)
    return str(info.value)


def differ(_, path, act):
    os.environ["PYCOLLECTIVE_DEVICE_PATH"] = path
    comm = pc.init(device="cuda", timeout=30)
    assert comm.device_path[0] == path
    x = np.arange(3000, dtype=np.float32)
    array = on_gpu(comm, x)
    text = act(comm, array, standin.Driver())
    untouched = (array.to_numpy() == x).all()
    with pytest.raises(CollectiveMismatch, match="failed before"):
        comm.all_reduce(array)
    assert type(comm.failure) is CollectiveMismatch
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < SOON
    anew = pc.init(device="cuda", timeout=30)
    anew.all_reduce(array)
    right = (array.to_numpy() == RANKS * x).all()
    anew.close()
    return text, untouched, right


@pytest.mark.parametrize(
    ("path", "act"),
    [
        ("peer", beside_work),
        ("peer", without_waiting),
        ("peer", captured),
        ("host", beside_work),
        ("host", without_waiting),
    ],
)
def test_calls_that_differ(path, act):
    env = standin.environment(devices=8)
    with Ranks(RANKS, module=__name__, variables=env, join=False, timeout=20) as ranks:
        for text, untouched, right in results(ranks.call(differ, path, act)):
            assert "max" in text
            assert "sum" in text
            assert untouched
            assert right
