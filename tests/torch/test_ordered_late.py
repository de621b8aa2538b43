"""Ordered calls on devices that do not end, or that the backend gives up, say who called what."""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from pycollective import CollectiveError, CollectiveMismatch, ConfigurationError, PeerFailure
from pycollective.torch.ordered import late, reduction
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.pieces import Call
from tests.harness import PerRank, await_
from tests.joining import failing
from tests.torch.groups import CPU
from tests.torch.ordered_groups import StandInStreams, apart, own_group
from tests.torch.streams import EXCHANGES, KERNELS

AFTER = "0.2"  # seconds
SMALL, LARGE = 10, 20_000  # elements: one exchange, and another kind of exchange


class ThreadStreams(StandInStreams):
    """A stream of a device that is a thread: the host issues work, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self.raised: list[BaseException] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except RuntimeError as error:  # of the backend; a device would say nothing
                self.raised.append(error)

    @contextmanager
    def in_use(self):
        """Exchanges and kernels run on the thread."""
        with ExitStack() as patched:
            for where, names in ((DeviceMessages, EXCHANGES), (reduction, KERNELS)):
                for name in names:
                    patch = mock.patch.object(where, name, self._later(getattr(where, name)))
                    patched.enter_context(patch)
            yield

    def _later(self, function):
        return lambda *arguments: self._work.put(lambda: function(*arguments))

    def event(self):
        done = threading.Event()
        self._work.put(done.set)
        return mock.Mock(query=done.is_set)


def on_threads(group, hosts):
    """Ordered calls whose device is a thread."""
    with mock.patch.dict(os.environ, {"PYCOLLECTIVE_LATE_AFTER": AFTER}):
        ordered = OrderedGroup(group, CPU, ThreadStreams())
    ordered._layout = Layout(ordered.rank, hosts)
    return ordered


def issue(ordered, count, op="sum"):
    tensor = torch.ones(count)
    return ordered.issue([Call("all_reduce", op, tensor, tensor)], tensor, [tensor])


def waits_for_sizes(comm, count):
    """What a rank is told of a call that its backend waits in for ever, and of the next one."""
    with own_group(comm, timeout=datetime.timedelta(seconds=6)) as group:
        ordered = on_threads(group, apart(comm.size))
        with ordered.streams.in_use():
            good = issue(ordered, LARGE)
            await_(good.is_completed)
            work = issue(ordered, count)
            assert not work.is_completed()
            await_(lambda: work.exception() is not None)
            assert work.is_completed()
            assert not work.is_success()
            return work.exception(), failing(work.wait)[0], failing(issue, ordered, 3)[0]


def test_a_call_that_does_not_end_says_who_called_what(pool):
    for told in pool(3).call(waits_for_sizes, PerRank([SMALL, LARGE, SMALL])):
        for error in told:
            assert type(error) is CollectiveMismatch, error
            said = [f"all_reduce of {count} float32 (sum) as call 2" for count in (SMALL, LARGE)]
            assert any(f"rank {rank} called {said[0]}" in str(error) for rank in (0, 2)) or (
                f"rank 1 called {said[1]}, rank 2 {said[0]}" in str(error)
            )
            assert all(each in str(error) for each in said)


def comes_late(comm):
    """Rank 1 makes the same call long after it is late on the others."""
    with own_group(comm) as group:
        ordered = on_threads(group, apart(comm.size))
        with ordered.streams.in_use():
            if comm.rank != 1:
                work = issue(ordered, LARGE)
                await_(lambda: ordered._late._told)
                assert not work.is_completed()
            comm.barrier()
            if comm.rank == 1:
                work = issue(ordered, LARGE)
            await_(work.is_completed)
            assert work.is_success()
            await_(lambda: not ordered._late._told)  # nothing of it stays in the store
            comm.barrier()
            store = ordered._late._store
            keys = [f"1/{rank}" for rank in range(comm.size)]
            return [key for key in keys if store is not None and store.check([key])]


def test_a_call_that_is_late_ends_as_usual(pool):
    assert not any(pool(3).call(comes_late)[::2])


def fails_by_itself(comm, sends):
    """Rank 1 has too little memory, before or behind what it sends. What ranks are told of it."""
    with own_group(comm, timeout=datetime.timedelta(seconds=6)) as group:
        ordered = on_threads(group, apart(comm.size))
        aborted = mock.Mock()
        ordered._messages.abort = aborted
        with ordered.streams.in_use():
            if comm.rank != 1:
                work = issue(ordered, LARGE)
                await_(lambda: work.exception() is not None)
                aborted.assert_called()
                return work.exception()
            where = (reduction, "reduce") if sends else (reduction, "lay_out")
            with mock.patch.object(*where, side_effect=RuntimeError("out of memory")):
                told, _ = failing(issue, ordered, LARGE)
            assert aborted.called is sends
            return told


@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_has_given_up_says_so(pool, sends):
    first, own, third = pool(3).call(fails_by_itself, sends)
    assert type(own) is CollectiveError, own
    assert "out of memory" in str(own)
    for error in (first, third):
        assert type(error) is PeerFailure, error
        said = f"rank 1 has given up all_reduce of {LARGE} float32 (sum) as call 1: "
        assert str(error).startswith(said)
        assert "out of memory" in str(error)


def is_aborted(comm):
    """What is said by a call that the backend ends, as a watchdog's abort does; not rank 1's."""
    with own_group(comm, timeout=datetime.timedelta(seconds=2)) as group:
        if comm.rank == 1:
            ordered = on_threads(group, apart(comm.size))
            with ordered.streams.in_use():
                work = issue(ordered, LARGE)
                await_(lambda: work.exception() is not None)
                comm.barrier()
                return failing(issue, ordered, LARGE)[0]
        ordered = OrderedGroup(group, CPU, StandInStreams())
        ordered._layout = Layout(ordered.rank, apart(comm.size))
        told, _ = failing(issue, ordered, SMALL)
        ordered._late.look(time.monotonic())  # forgets nothing
        comm.barrier()
        return told


def test_a_call_that_the_backend_ends_says_who_called_what(pool):
    for error in pool(3).call(is_aborted):
        assert type(error) is CollectiveMismatch, error
        for count in (SMALL, LARGE):
            assert f"all_reduce of {count} float32 (sum) as call 1" in str(error)


def has_no_message(comm):
    """What a call finds whose memory was another group's, and to which no message comes."""
    with own_group(comm) as group:
        before = OrderedGroup(group, CPU, StandInStreams())
        before._layout = Layout(before.rank, apart(comm.size))
        issue(before, SMALL)
        left = {each.numel(): each for each in before._buffers._memory.values()}

        with (
            mock.patch.object(torch, "empty", lambda size, **_: left[size].clone()),
            mock.patch.object(DeviceMessages, "all_gather"),  # the backend has ended it
        ):
            ordered = OrderedGroup(group, CPU, StandInStreams())
            ordered._layout = Layout(ordered.rank, apart(comm.size))
            return issue(ordered, SMALL).exception()


def test_what_another_group_has_left_is_no_message(pool):
    for error in pool(2).call(has_no_message):
        assert str(error).startswith("nothing has come from rank(s) ")


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(monkeypatch, said):
    monkeypatch.setenv("PYCOLLECTIVE_LATE_AFTER", said)
    with pytest.raises(ConfigurationError, match="PYCOLLECTIVE_LATE_AFTER is '"):
        late.seconds()
