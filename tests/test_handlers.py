"""Signal handlers that call a communicator while the call that they interrupt is blocked in it."""

from __future__ import annotations

import asyncio.runners  # noqa: F401  nobody asks about asyncio where it is not imported
import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import host_memory
from pycollective.bootstrap import shutdown
from tests.harness import Ranks, asleep, await_, committed, results

BLOCKED = {  # in which the handler finds the rank; what has been issued is added to `works`
    "a call": lambda comm, x, works: comm.all_reduce(x),
    "a wait": lambda comm, x, works: (
        works.append(comm.all_reduce(x, async_op=True)) or works[-1].wait()
    ),
    "a call behind another": lambda comm, x, works: (
        works.append(comm.all_reduce(x, async_op=True)) or comm.all_reduce(x)
    ),
    "a receive": lambda comm, x, works: comm.recv(x, pc.ANY_SOURCE),
}
ENDS = {
    "close": lambda comm, works: comm.close(),
    "abort and close": lambda comm, works: comm.abort("SIGTERM") or comm.close(),
    "close twice": lambda comm, works: comm.close() or comm.close(),
    "close and exit": lambda comm, works: comm.close() or sys.exit(3),
}
CALLS = {
    "barrier": lambda comm, works: comm.barrier(),
    "asynchronous": lambda comm, works: comm.barrier(async_op=True),
    "send": lambda comm, works: comm.send(np.zeros(1), 1),
    "recv": lambda comm, works: comm.recv(np.zeros(1), 1),
    "split": lambda comm, works: comm.split(0),
    "wait": lambda comm, works: works[-1].wait(),
}


def call_under_a_handler(comm, blocked, act, folder):
    """Rank 0's handler acts while it is blocked; rank 1 calls once the handler has returned.

    Returns what the rank's call came to, what the handler's did, and what was left of the group.
    """
    works, handled = [], []
    used = memory_of_a_group(comm)
    group = comm.split(0)
    x = np.full(100, comm.rank + 1.0)

    def handle(*_):
        try:
            (ENDS | CALLS)[act](group, works)
        except pc.ConfigurationError as error:
            handled.append(str(error))
        else:
            handled.append("closed" if group.closed else "")
        finally:
            (folder / "handled").touch()

    if comm.rank == 0:
        signal.signal(signal.SIGTERM, handle)
        (folder / "blocked").touch()
    else:
        await_((folder / "handled").exists)
    try:
        if comm.rank == 0 or blocked != "a receive":
            BLOCKED[blocked](group, x, works)
        else:
            group.send(x, 0)
        outcome = float(x[0])
    except (pc.CollectiveError, SystemExit) as error:
        outcome = f"{type(error).__name__}: {error}"
    if comm.rank == 1 or act in CALLS:  # else the call that was interrupted has closed it
        group.close()
    return outcome, handled, memory_of_a_group(comm) - used


def memory_of_a_group(comm):
    """What this rank's shared memory takes with one group more, which it no longer has."""
    comm.barrier()  # all have left the one before
    comm.split(0).close()
    return committed(comm)


def outcomes_of(blocked, act, folder):
    """What `call_under_a_handler` returns on each rank."""
    with Ranks(2, module=__name__) as ranks:
        pid = ranks.joined().pids[0]

        def interrupt():
            await_((folder / "blocked").exists)
            # Several times: on the way to its call it may wait for something else.
            await_(lambda: all(asleep(pid) and not time.sleep(0.01) for _ in range(10)))
            os.kill(pid, signal.SIGTERM)

        threading.Thread(target=interrupt).start()
        return results(ranks.call(call_under_a_handler, blocked, act, folder))


@pytest.mark.parametrize(
    ("act", "blocked"),
    [(act, "a call") for act in ENDS] + [("close", blocked) for blocked in BLOCKED][1:],
)
def test_a_handler_may_close_what_it_interrupts(act, blocked, tmp_path):
    (own, handled, kept), (others, _, also_kept) = outcomes_of(blocked, act, tmp_path)
    assert handled == (["closed"] if act != "close and exit" else [])
    assert own.startswith("SystemExit: 3" if act == "close and exit" else "CollectiveAborted")
    assert others.startswith("CollectiveAborted")
    why = "SIGTERM" if act.startswith("abort") else "a signal handler closed it"
    assert f"rank 0 aborted the communicator: {why}" in others
    assert kept == also_kept == 0  # of the memory of the group that was closed


@pytest.mark.parametrize("act", CALLS)
def test_other_calls_of_a_handler_are_refused_and_harm_nothing(act, tmp_path):
    blocked = "a wait" if act == "wait" else "a call"
    (own, handled, _), (others, *_) = outcomes_of(blocked, act, tmp_path)
    assert len(handled) == 1
    assert "in a signal handler" in handled[0]
    assert own == others == 3.0


def call_with_a_signal_amid_a_question(comm, asked, error, folder):
    """A signal reaches rank 0 in Python's code that its call runs; its handler raises `error`."""
    if comm.rank == 1:
        await_((folder / "asked").exists)
        x = np.full(100, 2.0)
    else:
        x = np.full(100, 1.0)
        module, name = {
            "wait": (shutdown, "is_abandoned_by_asyncio"),
            "send": (host_memory, "check"),
        }[asked]
        real = getattr(module, name)

        def raise_error(*_):
            raise error(7)

        def question(*args):
            setattr(module, name, real)
            (folder / "asked").touch()
            signal.raise_signal(signal.SIGTERM)
            return real(*args)

        signal.signal(signal.SIGTERM, raise_error)
        setattr(module, name, question)
    try:
        if asked == "wait":
            comm.all_reduce(x)
        elif comm.rank == 0:
            comm.send(x, 1)
    except (pc.CollectiveError, pc.ConfigurationError, SystemExit, TimeoutError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return float(x[0])


@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
@pytest.mark.parametrize("asked", ["wait", "send"])
def test_what_a_handler_raises_amid_a_question_of_the_core_is_kept(asked, error, tmp_path):
    with Ranks(2, module=__name__) as ranks:
        calls = ranks.joined().call(call_with_a_signal_amid_a_question, asked, error, tmp_path)
        assert results(calls)[0] == f"{error.__name__}: 7"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.Runner came with Python 3.11")
def test_blocked_threads_list_frames_for_asyncio_alone_and_never_amid_a_collection(monkeypatch):
    """In Python 3.11 a collection while frames are listed deadlocks with threads that begin."""
    collects = []
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or {})
    for name in ("a thread", "asyncio_0"):
        thread = threading.Thread(target=shutdown.is_abandoned_by_asyncio, name=name)
        thread.start()
        thread.join()
    assert collects == [False]
    assert gc.isenabled()
