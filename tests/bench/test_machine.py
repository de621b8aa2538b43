import os

import numpy as np
import pytest

from pycollective import _core
from pycollective.bench.machine import (
    CoreToCore,
    copy_seconds,
    measure_core_to_core,
    stream_seconds,
)
from pycollective.bench.operations import find_operation

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="there is nothing between cores: this is one core"
)


@two_cores
def test_core_to_core_is_plausible():
    between = measure_core_to_core(sorted(os.sched_getaffinity(0)))
    assert 5e-9 < between.latency < 0.1
    assert 1e8 < between.copy_rate < 1e12


def test_a_core_that_is_not_there_is_an_error():
    with pytest.raises((OSError, RuntimeError), match="cannot pin a thread to CPU 1023"):
        _core.core_to_core_latency(min(os.sched_getaffinity(0)), 1023, 10)


def test_streaming_touches_every_byte_every_time():
    buffer = np.arange(100_003, dtype=np.uint8)
    before = buffer.copy()
    seconds = _core.stream_in_place(buffer, 3)
    assert seconds > 0
    assert np.array_equal(buffer, before + np.uint8(3))


@pytest.mark.parametrize(
    "bad", [np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]]
)
def test_streaming_refuses_what_is_not_plain_bytes(bad):
    with pytest.raises(ValueError, match="contiguous bytes"):
        _core.stream_in_place(bad, 1)


def test_limits_by_hand(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    cores = CoreToCore(1e-7, 1e9)
    all_reduce, all_gather = find_operation("all_reduce"), find_operation("all_gather")
    assert copy_seconds(all_reduce, 1000, 2, cores) == pytest.approx(1e-7 + 1e-6)
    # Four ranks each receive 1.5 times the message, two after two on two cores.
    assert copy_seconds(all_reduce, 1000, 4, cores) == pytest.approx(1e-7 + 3e-6)
    assert stream_seconds(all_reduce, 2.0, 2) == 2.0
    assert stream_seconds(all_gather, 2.0, 2) == 1.0  # its own shard is where it belongs
    # The root of four receives three shards, one after another, or sends them, two at once.
    gather, scatter = find_operation("gather"), find_operation("scatter")
    assert copy_seconds(gather, 1000, 4, cores) == pytest.approx(1e-7 + 0.75e-6)
    assert copy_seconds(scatter, 1000, 4, cores) == pytest.approx(1e-7 + 0.375e-6)
    assert copy_seconds(find_operation("broadcast"), 1000, 2, cores) == pytest.approx(1.1e-6)
