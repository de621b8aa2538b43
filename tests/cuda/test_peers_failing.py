"""What goes wrong while kernels wait for each other's: waits end, no context is lost, and each rank
is told why, in time. Also that leaving leaves nothing behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pycollective import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
)
from tests.cuda import standin
from tests.cuda.arrays import on_its_gpu, starting
from tests.cuda.captures import Capture
from tests.harness import results
from tests.launchers import launcher

started = starting(__name__)


def differ(comm, how):
    array = on_its_gpu(comm, np.arange(4, dtype=np.float32))
    before = array.to_numpy()
    call = {
        "op": lambda: comm.all_reduce(array, "sum" if comm.rank == 0 else "max"),
        "count": lambda: comm.all_reduce(array[: 4 - comm.rank]),
        "algorithm": lambda: comm.all_reduce(array, algorithm="ring" if comm.rank else "tree"),
        "place": lambda: comm.all_reduce(array if comm.rank else before.copy()),
    }[how]
    with pytest.raises(CollectiveMismatch) as info:
        call()
    return array.to_numpy().tolist(), str(info.value)


@pytest.mark.parametrize("how", ["op", "count", "algorithm", "place"])
def test_calls_that_differ_move_nothing(how):
    with started(2) as ranks:
        for values, text in results(ranks.call(differ, how)):
            assert values == [0, 1, 2, 3]
            assert "on GPUs that map each other" in text


def captured(comm, timeout):
    """An all-reduce's graph, and its array."""
    array = on_its_gpu(comm, np.ones(300, np.float32))
    comm.all_reduce(array)
    array.stream.synchronize(30)
    comm.timeout = timeout
    with Capture(comm.device, array.stream) as capture:
        comm.all_reduce(array)
    return capture, array


def replays_in_vain(capture, array):
    """Whether a replay does nothing; the stream comes to rest before."""
    array.stream.synchronize(30)
    array.write(np.full(300, 7, np.float32))
    capture.replay()
    return bool((array.to_numpy() == 7).all())


def failure_of(comm, stream):
    """What fails the communicator; nothing is asked of it until the kernel's wait has ended."""
    until = time.monotonic() + 20
    while not stream.query() or comm.failure is None:
        assert time.monotonic() < until, "the kernel waits on, or nothing has failed"
        time.sleep(0.01)
    return type(comm.failure), str(comm.failure)


def replayed_alone(comm):
    """Rank 1 does not replay; later, nobody's replays do anything."""
    capture, array = captured(comm, timeout=0.6)
    if comm.rank == 0:
        capture.replay()
    told = failure_of(comm, array.stream)
    return told, replays_in_vain(capture, array)


def test_a_replay_that_nobody_joins_ends_and_later_ones_do_nothing():
    with started(2) as ranks:
        for (kind, _), in_vain in results(ranks.call(replayed_alone)):
            assert kind is CollectiveTimeout
            assert in_vain


UNKNOWN, NOT_READY = 999, 600


def replayed_after_an_abort(comm, function, code):
    """Rank 1's driver refuses the poison once, or says for long that it has not come.

    Rank 0's replay has handed over all that rank 1's would need.
    """
    capture, array = captured(comm, timeout=30)
    if comm.rank == 0:
        capture.replay()
        time.sleep(0.1)
    comm.barrier()
    seconds = calls = 0
    if comm.rank == 1:
        calls = capture.driver.calls(function)
        capture.driver.fail(function, 1, code)
        begin = time.monotonic()
        comm.abort("enough")
        seconds = time.monotonic() - begin
        capture.driver.fail(function, 1, 0)
    kind, _ = failure_of(comm, array.stream)
    calls = capture.driver.calls(function) - calls
    return kind, replays_in_vain(capture, array), seconds, calls


@pytest.mark.parametrize(
    ("function", "code", "least"),
    [
        pytest.param("cuMemsetD32Async", UNKNOWN, 0, id="an error, once"),
        pytest.param("cuStreamQuery", NOT_READY, 0.1, id="a full GPU"),
    ],
)
def test_replays_after_an_abort_do_nothing(function, code, least):
    with started(2) as ranks:
        made = results(ranks.call(replayed_after_an_abort, function, code))
    for kind, in_vain, _, _ in made:
        assert kind is CollectiveAborted
        assert in_vain
    _, _, seconds, calls = made[1]
    assert least <= seconds < 5
    assert calls >= 2


def left_early(comm, x):
    """Who has launched leaves at once; the other comes to the call later, and is right."""
    array = on_its_gpu(comm, x)
    if comm.rank == 1:
        release = standin.Driver().hold(comm.device, array.stream.handle)
    comm.all_reduce(array)
    if comm.rank == 0:
        comm.close()
    else:
        threading.Timer(0.15, release).start()
    return array.to_numpy().tolist()


def test_leaving_harms_nobody():
    with started(2) as ranks:
        x = np.arange(2000, dtype=np.float32)
        assert results(ranks.call(left_early, x)) == [(2 * x).tolist()] * 2


LEAVES_EARLY = """
import sys
import threading
import numpy as np
import pycollective as pc
from pycollective import _core
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin

comm = pc.init(device="cuda", timeout=30)
assert comm.device_path[0] == "peer", comm.device_path
stream = _core.DeviceStream(comm.device)
x = DeviceArray.from_numpy(np.full(60_000, comm.rank + 1.0, np.float32), comm.device, stream)
comm.all_reduce(x)
if comm.rank == 1:
    release = standin.Driver().hold(comm.device, stream.handle)
    threading.Timer(0.6, release).start()
comm.reduce(x, root=1)
if comm.rank == 0 and sys.argv[1] == "collected":
    del comm
if x.device == 1:
    assert (x.to_numpy() == 6).all(), x.to_numpy()
print("right")
"""


@pytest.mark.parametrize("how", ["exits", "collected"])
def test_who_leaves_without_close_takes_nothing_from_others(tmp_path, how):
    (tmp_path / "program.py").write_text(LEAVES_EARLY)
    done = launcher("run").run(
        2, str(tmp_path / "program.py"), how, **standin.environment(devices=8)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 2
