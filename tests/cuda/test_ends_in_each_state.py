"""A rank is killed, aborts, or time runs out, in each state that a call on GPUs' arrays can be in:
the survivors are told in time, close() ends, and no context is lost. Three ranks, of which the
second does the harm, on the stand-in."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerFailure, _core
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.cuda.captures import Capture
from tests.harness import Ranks
from tests.turns import each_once

HARMED = 1
BEFORE = 0.3  # seconds in which all come into the state
LATE = 1.5  # seconds after which nobody may be told
TIMEOUT = 0.7  # seconds, where it is to run out
NOT_READY = 600  # CUDA_ERROR_NOT_READY


class Scene:
    """A rank's part in bringing the group into a state. `enter` is the call that is in it."""

    path = "peer"
    held_for = LATE + TIMEOUT  # what is waited for without an end would never be told

    def __init__(self, comm):
        self.comm, self.driver, self.rank = comm, standin.Driver(), comm.rank
        x = np.full(3000, 1.0, np.float32)
        self.array = DeviceArray.from_numpy(x, comm.device, _core.DeviceStream(comm.device))
        self.unnamed = DeviceArray.from_numpy(x, comm.device)
        comm.all_reduce(self.array)
        comm.all_reduce(self.unnamed)

    def prepare(self):
        pass

    def enter(self):
        self.comm.all_reduce(self.array)

    def release(self):
        pass

    def wait_for_failure(self):
        while self.comm.failure is None:
            time.sleep(0.005)
        raise self.comm.failure


class Meeting(Scene):
    """The others have called, and their kernels are not launched."""

    def enter(self):
        if self.rank == HARMED:
            self.wait_for_failure()
        self.comm.all_reduce(self.array)


class Replaying(Scene):
    """The others replay a graph."""

    def prepare(self):
        with Capture(self.comm.device, self.array.stream) as self.capture:
            self.comm.all_reduce(self.array)

    def enter(self):
        if self.rank != HARMED:
            self.capture.replay()
        self.wait_for_failure()


class Launched(Scene):
    """All have launched, and one GPU has not come to it."""

    def prepare(self):
        if self.rank == HARMED:
            self.release = self.driver.hold(self.comm.device, self.array.stream.handle)

    def enter(self):
        self.comm.all_reduce(self.array)
        self.wait_for_failure()


class Closing(Launched):
    """The same, and the others close the communicator."""

    def enter(self):
        self.comm.all_reduce(self.array)
        if self.rank == HARMED:
            self.wait_for_failure()
        self.comm.close()


class Unnamed(Scene):
    """All have launched on streams without a name, and one GPU has not come to it."""

    def prepare(self):
        if self.rank == HARMED:
            self.release = self.driver.hold(self.comm.device, None)

    def enter(self):
        self.comm.all_reduce(self.unnamed)


class ByHost(Scene):
    """By way of the host; `held`: the rank whose first copy takes its time."""

    path = "host"
    held = HARMED

    def prepare(self):
        if self.rank == self.held:
            self.driver.fail("cuEventQuery", 1, NOT_READY)

    def release(self):
        self.driver.fail("cuEventQuery", 0, NOT_READY)


class ToHost(ByHost):
    """Who does the harm is copying to the host, the others wait for it there."""


class Between(ByHost):
    """Rank 2 copies to the host; who does the harm waits for it there."""

    held = 2


class ToDevice(ByHost):
    """Rank 0 copies its result to the device, the others have theirs; rank 2 is one call ahead."""

    held = 0
    held_for = 0.6

    def prepare(self):
        super().prepare()
        self.copies = self.driver.calls("cuMemcpyAsync")

    def enter(self):
        if self.rank == 0:
            threading.Thread(target=self.go_on).start()
        self.comm.all_reduce(self.array)
        if self.rank == HARMED:
            self.wait_for_failure()
        elif self.rank != 0:
            self.comm.all_reduce(self.unnamed)

    def go_on(self):
        """Once the others wait here, until the second copy."""
        time.sleep(0.1)
        while self.driver.calls("cuMemcpyAsync") - self.copies < 2:
            self.driver.fail("cuEventQuery", 2, NOT_READY)
            time.sleep(0.01)


ALL = (Meeting, Replaying, Launched, Closing, Unnamed, ToHost, Between, ToDevice)
SCENES = {each.__name__: each for each in ALL}


def agreed_moment(comm, seconds):
    """So long from now, the same on all ranks: their clock is the machine's."""
    now = np.array([time.monotonic_ns()])
    comm.all_reduce(now, op="max")
    return now[0] / 1e9 + seconds


def live(_, name, how):
    scene_of = SCENES[name]
    os.environ["PYCOLLECTIVE_DEVICE_PATH"] = scene_of.path
    comm = pc.init(device="cuda", timeout=30)
    scene = scene_of(comm)
    comm.timeout = TIMEOUT if how == "times out" else 30
    scene.prepare()
    at = agreed_moment(comm, BEFORE)
    timer = None
    if comm.rank == HARMED and how != "times out":
        harm = {
            "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "aborts": lambda: comm.abort("enough"),
        }[how]
        timer = threading.Timer(at - time.monotonic(), harm)
        timer.start()
    guard = threading.Timer(at + scene.held_for - time.monotonic(), scene.release)
    guard.start()
    told = None
    try:
        scene.enter()
    except CollectiveError as error:
        told = type(error)
    late = time.monotonic() - at
    guard.cancel()
    scene.release()
    scene.array.stream.synchronize(30)
    while comm.failure is None and time.monotonic() < at + 2 * LATE:
        time.sleep(0.01)  # who has all it wants may not have been told yet
    known = type(comm.failure)
    lives = DeviceArray.from_numpy(np.arange(5), comm.device).to_numpy().tolist() == [*range(5)]
    result = scene.array.to_numpy()
    begin = time.monotonic()
    comm.close()
    if timer:
        timer.join()
    return told, late, known, lives, np.unique(result).tolist(), time.monotonic() - begin


KINDS = {"is killed": PeerFailure, "aborts": CollectiveAborted, "times out": CollectiveTimeout}


@pytest.mark.parametrize(("name", "how"), each_once([*SCENES], [*KINDS]))
def test_everyone_is_told(name, how):
    env = standin.environment(devices=8)
    with Ranks(3, module=__name__, variables=env, join=False, timeout=20) as ranks:
        outcomes = ranks.call(live, name, how)
    for rank, each in enumerate(outcomes):
        if rank == HARMED and how == "is killed":
            assert each.exit_code == -signal.SIGKILL
            continue
        assert each.error is None, each.stderr
        told, late, known, lives, values, closing = each.result
        assert known is KINDS[how]
        assert lives
        assert closing < LATE
        if name == "ToDevice" and rank == 0:  # its result is on its way, whatever comes then
            assert told is (CollectiveTimeout if how == "times out" else None)
        else:
            assert told is KINDS[how]
            assert late < LATE + (TIMEOUT - BEFORE if how == "times out" else 0)
        # Of the call before; what fails moves nothing.
        assert values == [9.0 if name == "ToDevice" else 3.0]


def killed_within(_, path, fraction):
    """Rank 1 is killed so far into a large call: the other has its result, or is told."""
    os.environ["PYCOLLECTIVE_DEVICE_PATH"] = path
    comm = pc.init(device="cuda", timeout=30)
    x = np.arange(1 << 21, dtype=np.float32)
    array = DeviceArray.from_numpy(x, comm.device, _core.DeviceStream(comm.device))
    comm.all_reduce(array)
    array.stream.synchronize(30)
    begin = time.monotonic()
    comm.all_reduce(array)
    array.stream.synchronize(30)
    length = time.monotonic() - begin
    at = agreed_moment(comm, 0.02)
    if comm.rank == HARMED:
        kill = (os.getpid(), signal.SIGKILL)
        threading.Timer(at + fraction * length - time.monotonic(), os.kill, kill).start()
    time.sleep(max(0.0, at - time.monotonic()))
    told = None
    try:
        comm.all_reduce(array)
        if comm.rank == HARMED:
            time.sleep(10)
        array.stream.synchronize(30)
        told = comm.failure  # of what is on the stream nobody else tells
    except CollectiveError as error:
        told = error
    late = time.monotonic() - at - fraction * length
    right = (array.to_numpy() == 8 * x).all()
    comm.close()
    return type(told), right, late


TENTHS = [each / 10 for each in range(10)]


@pytest.mark.parametrize(
    "fractions", [(0, 0.4, 0.8), pytest.param(TENTHS, marks=pytest.mark.storm)]
)
@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_rank_killed_at_any_moment_of_a_large_call(path, fractions):
    env = standin.environment(devices=8)
    for fraction in fractions:
        with Ranks(2, module=__name__, variables=env, join=False, timeout=20) as ranks:
            first, second = ranks.call(killed_within, path, fraction)
        assert second.exit_code == -signal.SIGKILL
        assert first.error is None, first.stderr
        told, right, late = first.result
        assert right or told is PeerFailure
        assert late < LATE
