"""Calls of several communicators on the same streams: launched in the order of the calls, whichever
thread sees first that a call's ranks have met. On the stand-in."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from pycollective import _core
from pycollective.testing.device_array import DeviceArray
from tests.cuda.arrays import on_its_gpu, starting
from tests.harness import results, thread_names

started = starting(__name__)

CALLS = 150
STORM = pytest.mark.storm


def slow_progress():
    """Let the progress thread run only where nobody else wants the core."""
    for thread, name in thread_names().items():
        if name == "pycollective":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def mixed(comm, seed, streams):
    """Calls of two communicators, some asynchronous, the same on all ranks; how many are wrong."""
    draw = random.Random(seed)
    communicators = [comm, comm.split(0)]
    made = [_core.DeviceStream(comm.device) for _ in range(streams - 1)]
    arrays = [on_its_gpu(comm, np.zeros(64, np.float32), stream=stream) for stream in made]
    arrays.append(DeviceArray.from_numpy(np.zeros(64, np.float32), comm.device))
    wrong = 0
    for number in range(CALLS):
        places = draw.sample(range(streams), draw.randint(1, streams))
        works = []
        for place in places:
            arrays[place].write(np.full(64, number + comm.rank, np.float32))
        for place in places:
            for one in draw.sample(communicators, 2):
                wait = draw.random() < 0.5
                work = one.all_reduce(arrays[place], op="max", async_op=not wait)
                if not wait:
                    works.append(work)
        if number == 0:
            slow_progress()
        for work in works:
            work.wait(timeout=60)
        want = np.full(64, number + comm.size - 1, np.float32)
        wrong += sum(not np.array_equal(arrays[place].to_numpy(), want) for place in places)
    assert all(one.failure is None for one in communicators)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "streams"), [(2, 1), pytest.param(2, 3, marks=STORM), pytest.param(3, 2, marks=STORM)]
)
def test_calls_of_several_communicators_on_the_same_streams(ranks, streams):
    with started(ranks) as group:
        assert results(group.call(mixed, 7 * ranks + streams, streams)) == [0] * ranks
