"""What goes wrong while kernels wait for each other's: waits end, no context is lost, and each rank
is told why, in time. Also that leaving leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from pycollective import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailure,
    _core,
)
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.cuda.arrays import on_its_gpu, starting
from tests.cuda.captures import Capture
from tests.harness import await_, results
from tests.launchers import launcher

started = starting(__name__)


class Late:
    """An array; of rank 1 its stream comes to the next call after the others have been told.

    These say so by touching the file `told`: nothing is asked of the communicator for it.
    """

    def __init__(self, comm, told):
        self.array, self.told = on_its_gpu(comm, np.ones(1000, np.float32)), told
        self.release = None
        if comm.rank == 1:
            self.release = standin.Driver().hold(comm.device, self.array.stream.handle)

    def go_on(self):
        try:
            await_(self.told.exists)
        finally:
            self.release()


def failure_of(comm, stream, late=None):
    """What fails the communicator; nothing is asked of it until the kernel's wait has ended."""
    if late is not None and comm.rank == 1:
        late.go_on()
    until = time.monotonic() + (20 if comm.rank == 1 else 1.5)
    try:
        while not stream.query():
            assert time.monotonic() < until, "the kernel waits on"
            time.sleep(0.01)
        while comm.failure is None:
            assert time.monotonic() < until, "nothing has failed, or who waited is told late"
            time.sleep(0.01)
    finally:
        if late is not None and comm.rank != 1:
            late.told.touch()
    return type(comm.failure), str(comm.failure)


def context_lives(comm):
    """The GPU works on: what a trap would have ended."""
    array = DeviceArray.from_numpy(np.arange(5), comm.device, _core.DeviceStream(comm.device))
    return array.to_numpy().tolist() == [0, 1, 2, 3, 4]


def all_have_launched(comm):
    comm.barrier()
    if comm.rank == 1:  # who goes on to harm the others lets them come out of the barrier
        time.sleep(0.3)


def timed_out(comm, told):
    """Rank 1's GPU comes to the call after the other's wait has ended."""
    late = Late(comm, told)
    array = late.array
    comm.barrier()
    comm.timeout = 0.3
    comm.all_reduce(array)
    failure = failure_of(comm, array.stream, late)
    with pytest.raises(CollectiveError):
        comm.all_reduce(array)
    array.stream.synchronize(30)
    return failure, context_lives(comm)


def test_a_wait_on_the_device_ends_with_its_time(tmp_path):
    with started(2) as ranks:
        told = tmp_path / "told"
        (first, first_lives), (second, second_lives) = results(ranks.call(timed_out, told))
    assert first[0] is second[0] is CollectiveTimeout
    assert "GPU 0 timed out where it waited for rank 1" in first[1]
    assert "reported by rank 0" in second[1]
    assert (first_lives, second_lives) == (True, True)


def killed_while_waited_for(comm, told):
    array = Late(comm, told).array
    comm.all_reduce(array)
    all_have_launched(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert not array.stream.query()
    failure = failure_of(comm, array.stream)
    array.stream.synchronize(30)
    return failure, context_lives(comm)


def test_a_rank_killed_while_kernels_wait_for_it(tmp_path):
    with started(3) as ranks:
        outcomes = ranks.call(killed_while_waited_for, tmp_path / "told")
    assert outcomes[1].exit_code == -signal.SIGKILL
    for each in (outcomes[0], outcomes[2]):
        assert each.error is None, each.error
        (kind, text), lives = each.result
        assert kind is PeerFailure
        assert "rank 1 (pid" in text
        assert lives


def aborted(comm, told):
    late = Late(comm, told)
    array = late.array
    comm.all_reduce(array)
    all_have_launched(comm)
    if comm.rank == 1:
        comm.abort("enough")
    failure = failure_of(comm, array.stream, late)
    array.stream.synchronize(30)
    return failure, context_lives(comm)


def test_an_abort_ends_waits_on_the_device(tmp_path):
    with started(2) as ranks:
        for (kind, text), lives in results(ranks.call(aborted, tmp_path / "told")):
            assert kind is CollectiveAborted
            assert "enough" in text
            assert lives


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


def again_and_again(comm, times):
    """Groups made and left; what a mailbox held before is nothing to the next."""
    free = []
    for turn in range(times):
        half = comm.split(0)
        array = on_its_gpu(comm, np.full(5000, comm.rank + turn, np.int64))
        half.all_reduce(array)
        assert (array.to_numpy() == 1 + 2 * turn).all()
        half.close()
        comm.barrier()
        free.append(standin.Driver().free_bytes(comm.device))
    return free


def test_groups_come_and_go():
    with started(2) as ranks:
        for free in results(ranks.call(again_and_again, 30)):
            # A peer that is slow to leave keeps a mailbox of 1 MiB for a while.
            assert min(free) > free[0] - (8 << 20), "device memory is not given back"


def closed_over(comm, how, closed):
    """close() over work that will never be: it ends soon, and says so."""
    late = Late(comm, closed)
    comm.all_reduce(late.array)
    all_have_launched(comm)
    if comm.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        comm.abort("enough")
        threading.Thread(target=late.go_on).start()
    begin = time.monotonic()
    name = None
    try:
        comm.close()
    except CollectiveError as error:
        name = type(error).__name__
    seconds = time.monotonic() - begin
    if comm.rank == 0:
        closed.touch()
    return name, seconds


@pytest.mark.parametrize(("how", "kind"), [("killed", PeerFailure), ("aborted", CollectiveAborted)])
def test_close_over_a_failure_ends_soon_and_says_so(tmp_path, how, kind):
    with started(2) as ranks:
        first, _ = ranks.call(closed_over, how, tmp_path / "closed")
    assert first.error is None
    name, seconds = first.result
    assert name == kind.__name__
    assert seconds < 2


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


def unnamed_and_aborted(comm):
    """A call on a stream that nobody names returns once its result is there, or raises."""
    x = np.full(1000, comm.rank + 1.0, np.float32)
    array = DeviceArray.from_numpy(x, comm.device)
    comm.all_reduce(array)
    right = (array.to_numpy() == 3).all()
    release = standin.Driver().hold(comm.device, None) if comm.rank == 1 else lambda: None
    comm.barrier()
    threading.Timer(0.3, comm.abort, ("enough",)).start()
    try:
        with pytest.raises(CollectiveAborted):
            comm.all_reduce(array)
    finally:
        release()
    return right


def test_a_call_on_no_stream_is_done_or_raises():
    with started(2) as ranks:
        assert results(ranks.call(unnamed_and_aborted)) == [True, True]
