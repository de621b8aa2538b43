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
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.ordered.pieces import Call
from pycollective.torch.ordered.work import Issued, UnderWay
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
    if hosts is not None:
        ordered._layout = Layout(ordered.rank, hosts)
    return ordered


def issue(ordered, count, narrow=None):
    tensor = torch.ones(count)
    return ordered.issue([Call("all_reduce", "sum", tensor, tensor, narrow)], tensor, [tensor])


def waits_for_sizes(comm, count):
    """What a rank is told of a call that its backend waits in for ever, and of the next one."""
    with own_group(comm, timeout=datetime.timedelta(seconds=6)) as group:
        ordered = on_threads(group, apart(comm.size))
        ordered._messages.abort = aborted = mock.Mock()
        with ordered.streams.in_use():
            good = issue(ordered, LARGE)
            await_(good.is_completed)
            work = issue(ordered, count)
            assert not work.is_completed()
            await_(lambda: work.exception() is not None)
            assert work.is_completed()
            assert not work.is_success()
            time.sleep(3 * float(AFTER))
            aborted.assert_called_once()
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


def host_waits(comm, narrow):
    """What a rank is told whose host waits for what others have called."""
    with own_group(comm, timeout=datetime.timedelta(seconds=20)) as group:
        ordered = on_threads(group, apart(comm.size))
        with ordered.streams.in_use():
            began = time.monotonic()
            told, _ = failing(lambda: issue(ordered, LARGE, narrow).wait())
            if told is None:
                await_(lambda: ordered.failure is not None)
                told = ordered.failure
            return told, time.monotonic() - began


def test_a_host_that_waits_hears_who_called_what(pool):
    narrow = torch.bfloat16
    for told, seconds in pool(3).call(host_waits, PerRank([narrow, None, narrow])):
        assert type(told) is CollectiveMismatch, told
        assert "as bfloat16 where that is exact" in str(told)
        assert seconds < 10  # of 20, the group's timeout


def stays_away(comm):
    """Whether what is under way is ended once the host has waited for it in vain."""
    with own_group(comm, timeout=datetime.timedelta(seconds=1)) as group:
        if comm.rank == 1:
            comm.barrier()
            return None
        ordered = on_threads(group, apart(comm.size))
        ordered._messages.abort = aborted = mock.Mock()
        with ordered.streams.in_use():
            told, _ = failing(issue, ordered, LARGE, torch.bfloat16)
        aborted.assert_called()
        comm.barrier()
        return told


def test_what_a_host_has_waited_for_in_vain_is_ended(pool):
    first, _, third = pool(3).call(stays_away)
    for told in (first, third):
        assert isinstance(told, CollectiveError), told


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


def fails_by_itself(comm, sends, first):
    """Rank 1 has too little memory, before or behind what it sends. What ranks are told of it."""
    with own_group(comm, timeout=datetime.timedelta(seconds=6)) as group:
        ordered = on_threads(group, None if first else apart(comm.size))
        aborted = mock.Mock()
        ordered._messages.abort = aborted
        with ordered.streams.in_use():
            if comm.rank != 1:
                if first:  # the host waits for the ranks' hosts
                    return failing(issue, ordered, LARGE)[0]
                work = issue(ordered, LARGE)
                await_(lambda: work.exception() is not None)
                aborted.assert_called()
                return work.exception()
            where = (reduction, "reduce") if sends else (reduction, "lay_out")
            with mock.patch.object(*where, side_effect=RuntimeError("out of memory")):
                told, _ = failing(issue, ordered, LARGE)
            assert aborted.called is sends
            return told


@pytest.mark.parametrize(
    ("sends", "is_first"), [(False, False), (True, False), (False, True)], ids=str
)
def test_a_rank_that_has_given_up_says_so(pool, sends, is_first):
    first, own, third = pool(3).call(fails_by_itself, sends, is_first)
    what = "prepare" if is_first else f"all_reduce of {LARGE} float32 (sum)"
    assert type(own) is CollectiveError, own
    assert "out of memory" in str(own)
    for error in (first, third):
        assert type(error) is PeerFailure, error
        assert f"rank 1 has given up {what} as call 1: " in str(error)
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


@pytest.mark.storm  # Gloo's timeouts end on each rank when they like
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


def test_devices_are_not_asked_of_calls_that_may_go_on():
    """By the thread that looks for late calls: a program may capture a graph."""
    under_way, event = UnderWay(), mock.Mock(**{"query.return_value": False})
    under_way.add(Issued([], event, ()))
    (issued,) = under_way._issued
    assert under_way.late(issued.at - 1) is None
    event.query.assert_not_called()
    assert under_way.late(issued.at) is issued


def test_a_device_that_fails_leaves_the_watch_to_others():
    watch, seen = late._Watch(), threading.Event()
    broken = mock.Mock(after=60.0, **{"look.side_effect": RuntimeError("an illegal access")})
    sound = mock.Mock(after=0.01, **{"look.side_effect": lambda _: seen.set()})
    watch.add(broken)
    await_(lambda: broken.look.called)
    watch.add(sound)
    assert seen.wait(10)  # of 15, until it would look again
    watch.end()
    assert not watch._thread.is_alive()


def store_of_late_calls(comm):
    """How long the stores of a group and of its late calls wait: seconds."""
    with own_group(comm) as group:
        ordered = on_threads(group, apart(comm.size))
        theirs = group.get_group_store()
        before = theirs.timeout
        ordered._late.compare([Header(1, "prepare")], has_ended=True)
        return ordered._late._store.timeout.total_seconds(), theirs.timeout == before


def test_the_store_of_late_calls_answers_soon_or_never(pool):
    assert pool(2).call(store_of_late_calls) == [(2.0, True)] * 2


def has_the_messages_before(comm, count):
    """The result of a call to which no message comes, behind one to which they came, and what is
    said of both."""
    with own_group(comm) as group:
        ordered = OrderedGroup(group, CPU, StandInStreams())
        ordered._layout = Layout(ordered.rank, apart(comm.size))
        tensors = [torch.ones(count), torch.full((count,), 2.0)]
        told = []
        for number, x in enumerate(tensors):
            call = Call("all_reduce", "sum", x, x)
            with ExitStack() as patched:
                for name in EXCHANGES if number else ():  # the backend has ended them
                    patched.enter_context(mock.patch.object(DeviceMessages, name))
                try:
                    told.append(ordered.issue([call], x, [x]).exception())
                except CollectiveError as error:
                    told.append(error)
        return tensors[1], told


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_what_the_call_before_has_left_is_no_message(pool, count):
    outcomes = pool(2).call(has_the_messages_before, count)
    for rank, (result, (first, error)) in enumerate(outcomes):
        assert first is None
        # Of a large one this rank's shard; what it does not reduce does not come.
        mine = result if count == SMALL else result[rank * count // 2 :][: count // 2]
        assert mine.isnan().all()
        assert str(error).startswith(
            f"nothing has come from rank(s) {1 - rank} for all_reduce of {count} float32 (sum) as "
            "call 2: "
        )


def hears_nothing(comm, knows_layout):
    """What is said where the host waits for messages, and none has come."""
    with own_group(comm) as group:
        ordered = OrderedGroup(group, CPU, StandInStreams())
        if knows_layout:
            ordered._layout = Layout(ordered.rank, apart(comm.size))
        x = torch.ones(LARGE)
        call = Call("all_reduce", "sum", x, x, narrow=torch.bfloat16)
        with mock.patch.object(DeviceMessages, "all_gather"):  # the backend has ended it
            return failing(ordered.issue, [call], x, [x])[0]


@pytest.mark.parametrize("knows_layout", [False, True])
def test_the_host_does_not_take_silence_for_an_answer(pool, knows_layout):
    """Of who shares a host, or of whether leaves fit a narrow type."""
    for error in pool(2).call(hears_nothing, knows_layout):
        assert type(error) is CollectiveMismatch, error
        assert "as call 1" in str(error)
        assert "nothing that can be read" in str(error)


def lacks_its_own_row(comm):
    """What is said if every other rank's message has come."""
    with own_group(comm) as group:
        ordered = OrderedGroup(group, CPU, StandInStreams())
        ordered._layout = Layout(ordered.rank, apart(comm.size))
        gather = DeviceMessages.all_gather

        def without_own(messages, out, row):
            gather(messages, out, row)
            out[comm.rank] = 0

        with mock.patch.object(DeviceMessages, "all_gather", without_own):
            return issue(ordered, SMALL).exception()


def test_a_row_of_ones_own_that_does_not_come_is_named(pool):
    for rank, error in enumerate(pool(2).call(lacks_its_own_row)):
        assert str(error).startswith(f"nothing has come from rank(s) {rank} for all_reduce of ")


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(monkeypatch, said):
    monkeypatch.setenv("PYCOLLECTIVE_LATE_AFTER", said)
    with pytest.raises(ConfigurationError, match="PYCOLLECTIVE_LATE_AFTER is '"):
        late.seconds()
