"""A rank that may start no more threads (`ulimit -u`, a pids cgroup) says so to all, at once."""

from __future__ import annotations

import os
import resource
import threading

import numpy as np
import pytest
import torch.distributed

import pycollective as pc
from pycollective.transport import gloo as c10d
from tests.harness import Ranks, results, run_ranks
from tests.joining import failing, free_place

NOBODY = 65534
CURE = "raise the limit of processes and threads (ulimit -u, or pids.max of the cgroup)"
WITHIN = 20.0  # seconds; a third of the ranks' own timeout
TIMEOUT = 60.0


def reach_the_limit():
    """Let this process start no more threads from now on: whether that could be done.

    As another user where this one is root, whom the limit does not bind.
    """
    if os.getuid() == 0:
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:  # a namespace without that user
            return False
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False


def between_hosts(function, **options):
    """Its answers on two ranks, each as on a host of its own."""
    variables = {"PYCOLLECTIVE_TOPOLOGY": "2x1"}
    options = {"operation_timeout": TIMEOUT, "timeout": 2 * TIMEOUT, **options}
    with Ranks(2, module=__name__, variables=variables, **options) as ranks:
        answers = results(ranks.call(function))
    if None in answers:
        pytest.skip("no limit of threads can be reached here")
    return answers


def call_with_no_thread_left(comm):
    comm.all_reduce(np.ones(64, np.float32))
    if comm.rank == 0 and not reach_the_limit():
        comm.abort("no limit can be reached")
        return None
    # Receives that nobody answers take threads that are free, and keep them.
    waiting = [comm.recv(np.empty(1), 1 - comm.rank, tag=tag, async_op=True) for tag in range(16)]
    # One that comes free in time is enough, so a call may end well: then the next is tried.
    for algorithm in ("ring", "tree", "halving_doubling", "direct") * 5:
        error, took = failing(comm.all_reduce, np.ones(1 << 20, np.float32), algorithm=algorithm)
        if error is not None:
            break
    del waiting
    return error, took


@pytest.mark.alone  # how soon is part of it
def test_a_call_that_needs_more_threads_than_there_can_be():
    (error, took), (told, heard) = between_hosts(call_with_no_thread_left)
    for each in (error, told):
        assert isinstance(each, pc.CollectiveAborted)
        assert "rank 0 failed: no thread could be started" in str(each)
        assert CURE in str(each)
    assert max(took, heard) < WITHIN


def join_and_have_no_thread_for_messages(comm):
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    limited = []
    if rank == 0:
        connect = c10d._connect

        def connect_and_have_no_thread(*args):
            link = connect(*args)
            limited.append(reach_the_limit())
            return link

        c10d._connect = connect_and_have_no_thread
    comm = pc.init(timeout=TIMEOUT)
    if limited == [False]:
        comm.abort("no limit can be reached")
        return None
    return failing(comm.all_reduce, np.ones(64, np.float32))


@pytest.mark.alone
def test_who_has_no_thread_for_messages_at_all_tells_it_nevertheless():
    (error, took), (told, heard) = between_hosts(join_and_have_no_thread_for_messages, join=False)
    for each in (error, told):
        assert isinstance(each, pc.CollectiveAborted)
        assert "rank 0 could not carry out all_reduce number 1: no thread" in str(each)
        assert CURE in str(each)
    assert max(took, heard) < WITHIN


def join_with_no_thread_left(comm):
    limited = []
    if os.environ["PYCOLLECTIVE_RANK"] == "0":
        make_store = c10d.MessageStore

        def make_store_and_no_thread(*args):
            limited.append(reach_the_limit())
            return make_store(*args)

        c10d.MessageStore = make_store_and_no_thread
    answer = failing(pc.init, timeout=TIMEOUT)
    return None if limited == [False] else answer


def test_ranks_that_connect_hosts_with_no_thread_left():
    for rank, (error, _) in enumerate(between_hosts(join_with_no_thread_left, join=False)):
        assert isinstance(error, pc.ConfigurationError)
        assert str(error).startswith("rank 0: ") == (rank == 1)
        assert "no thread could be started for a store" in str(error)
        assert CURE in str(error)


def serve_with_no_thread_left(comm):
    if not reach_the_limit():
        return None
    os.environ["PYCOLLECTIVE_SECRET"] = "0123abcd"
    files = len(os.listdir("/proc/self/fd"))
    error, took = failing(pc.init, rank=0, size=2, store=free_place(), timeout=TIMEOUT)
    return error, took, len(os.listdir("/proc/self/fd")) - files


def test_a_store_with_no_thread_left():
    (answer,) = results(run_ranks(serve_with_no_thread_left, 1, join=False))
    if answer is None:
        pytest.skip("no limit of threads can be reached here")
    error, took, more_files = answer
    assert isinstance(error, pc.ConfigurationError)
    assert "no thread could be started for pycollective-store" in str(error)
    assert CURE in str(error)
    assert took < WITHIN
    assert more_files == 0


class Nowhere:
    """A `MessageStore` of a rank whose address is no host's."""

    device = "192.0.2.1"
    torch = torch.distributed.HashStore()


def test_what_else_keeps_hosts_from_connecting_is_said_as_ever():
    with pytest.raises(pc.ConfigurationError, match=r"cannot be connected.*GLOO_SOCKET_IFNAME"):
        c10d._connect(Nowhere(), "", 0, range(2), 5.0, lambda: None, "init")
