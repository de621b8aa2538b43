"""Graphs of calls that kernels carry out: several streams of one capture, captures that begin
beside a call, and what a captured graph costs while nobody replays it. On the stand-in."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from pycollective import CollectiveError, CollectiveMismatch, ConfigurationError, _core, reference
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.cuda.arrays import on_its_gpu, starting
from tests.cuda.captures import Capture
from tests.harness import PerRank, results, thread_names
from tests.inputs import order_sensitive, same_bits

started = starting(__name__)


def open_at_once(comm, inputs):
    """Captures, all of them open while each gets its calls, on two streams that are not ordered;
    what their replays, one after the other, give."""
    captures, calls = [], []
    first = on_its_gpu(comm, inputs[0][0])
    comm.all_reduce(first)
    for pair in inputs:
        streams = [_core.DeviceStream(comm.device) for _ in pair]
        arrays = [on_its_gpu(comm, x, stream=s) for x, s in zip(pair, streams, strict=True)]
        outs = [
            on_its_gpu(comm, np.zeros_like(x), stream=s) for x, s in zip(pair, streams, strict=True)
        ]
        captures.append(Capture(comm.device, *streams))
        calls.append(list(zip(arrays, outs, streams, strict=True)))
    for capture in captures:
        capture.__enter__()
    for turn in range(2):
        for each in calls:
            array, out, stream = each[turn]
            comm.all_reduce(array, out=out, stream=stream)
    for capture in captures:
        capture.__exit__(None)
    got = []
    for turn in range(8):
        for capture, each, pair in zip(captures, calls, inputs, strict=True):
            for (array, _, _), x in zip(each, pair, strict=True):
                array.write(np.roll(x, turn))
            capture.replay()
            each[0][2].synchronize(30)
            got.append([out.to_numpy() for _, out, _ in each])
    assert comm.failure is None
    return got


def test_calls_of_captures_that_are_open_at_once_follow_each_other():
    leaves = [
        [order_sensitive("float32", 2, 40_000, seed=2 * i + j) for j in range(2)] for i in range(6)
    ]
    mine = [[[of_call[r] for of_call in pair] for pair in leaves] for r in range(2)]
    with started(2) as group:
        for got in results(group.call(open_at_once, PerRank(mine))):
            for at, outs in enumerate(got):
                turn, capture = divmod(at, len(leaves))
                for of_call, out in zip(leaves[capture], outs, strict=True):
                    want = reference.reduce([np.roll(x, turn) for x in of_call], "sum")
                    assert same_bits(out, want)


def one_too_many(comm):
    """Of 65 captures the first is refused when it comes again; those in turn never are."""
    array = on_its_gpu(comm, np.ones(1000, np.float32))
    comm.all_reduce(array)
    for _ in range(70):
        with Capture(comm.device, array.stream):
            comm.all_reduce(array)
    streams = [_core.DeviceStream(comm.device) for _ in range(65)]
    captures = [Capture(comm.device, stream) for stream in streams]
    for capture, stream in zip(captures, streams, strict=True):
        capture.__enter__()
        comm.all_reduce(array, stream=stream)
    with pytest.raises(ConfigurationError, match="64 other captures have come since"):
        comm.all_reduce(array, stream=streams[0])
    for capture in captures:
        capture.__exit__(None)
    comm.all_reduce(array)
    assert comm.failure is None


def test_more_open_captures_than_are_kept_are_refused():
    with started(2) as ranks:
        results(ranks.call(one_too_many))


def beside_a_capture(comm):
    """On the default stream, which a blocking stream's capture forbids."""
    array = DeviceArray.from_numpy(np.ones(1000, np.float32), comm.device)
    comm.all_reduce(array)
    driver, stream, graph = standin.Driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with driver.context(comm.device):
        assert driver("cuStreamCreate", ctypes.byref(stream), 0) == 0
        assert driver("cuStreamBeginCapture_v2", stream, 0) == 0
    with pytest.raises(ConfigurationError) as refused:
        comm.all_reduce(array)
    with driver.context(comm.device):
        assert driver("cuStreamEndCapture", stream, ctypes.byref(graph)) == 0
    comm.all_reduce(array)
    assert comm.failure is None
    return str(refused.value), array.to_numpy()[0]


def test_the_default_stream_beside_a_capture_is_refused_by_name():
    with started(2) as ranks:
        for text, value in results(ranks.call(beside_a_capture)):
            assert "another stream of its GPU is being captured" in text
            assert value == 4


def captured_on_one_rank(comm):
    array = on_its_gpu(comm, np.ones(1000, np.float32))
    comm.all_reduce(array)
    capture = Capture(comm.device, array.stream)
    if comm.rank == 0:
        capture.__enter__()
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatch) as told:
        comm.all_reduce(array)
    return str(told.value), time.monotonic() - begin


def test_a_call_that_one_rank_captures_is_a_mismatch():
    with started(2) as ranks:
        for text, seconds in results(ranks.call(captured_on_one_rank)):
            assert text.count("captured in a graph") == 1
            assert seconds < 5


def begun_since(comm):
    """Rank 0's stream is being captured by the time the other has called."""
    array = on_its_gpu(comm, np.ones(1000, np.float32))
    comm.all_reduce(array)
    if comm.rank == 1:
        wait_for(comm)
    work = comm.all_reduce(array, async_op=True)
    with Capture(comm.device, array.stream) if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            go_on(comm)
        until = time.monotonic() + 20
        while comm.failure is None and time.monotonic() < until:
            time.sleep(0.01)
    with suppress(CollectiveError, ConfigurationError):
        work.wait(timeout=20)
    return str(comm.failure)


def go_on(comm):
    Path(os.environ["SIGNAL"]).write_text("go on")


def wait_for(comm):
    while not Path(os.environ["SIGNAL"]).exists():
        time.sleep(0.01)


def test_a_capture_that_begins_beside_a_call_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNAL", str(tmp_path / "signal"))
    with started(2) as ranks:
        for text in results(ranks.call(begun_since)):
            assert "rank 0 could not carry out all_reduce" in text
            assert "a capture of its stream has begun since the call" in text


def wakes():
    """Of the library's thread, so far."""
    for thread, name in thread_names().items():
        if name == "pycollective":
            lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            return int(status["voluntary_ctxt_switches"])
    return 0


def idle_after_a_capture(comm):
    array = on_its_gpu(comm, np.ones(1000, np.float32))
    comm.all_reduce(array)
    with Capture(comm.device, array.stream) as capture:
        comm.all_reduce(array)
    capture.replay()
    array.stream.synchronize(30)
    time.sleep(0.2)
    before = wakes()
    time.sleep(2)
    return before > 0, wakes() - before


@pytest.mark.storm  # two seconds
def test_a_graph_that_nobody_replays_costs_little():
    with started(2) as ranks:
        for has_thread, woken in results(ranks.call(idle_after_a_capture)):
            assert has_thread
            assert woken < 100  # every 50 ms
