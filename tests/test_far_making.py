"""Ranks of other hosts that end, stay away or are interrupted while groups are made."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import torch.distributed as dist  # what ranks are forked of has it

import pycollective as pc
from pycollective.transport import gloo
from pycollective.transport.gloo import GlooTransport
from tests.harness import results, run_ranks, thread_names
from tests.joining import failing

HOSTS = {"PYCOLLECTIVE_TOPOLOGY": "3x1"}
LONG = 60.0  # a timeout that no test waits for


def interrupt_soon():
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def connecting_threads():
    return list(thread_names().values()).count("pycoll-connect")


def torch_store(port):
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def split_beside_a_death(comm):
    comm.timeout = comm._world.transport._timeout = LONG
    comm.barrier()
    if comm.rank == 2:
        GlooTransport.split = lambda *_: os._exit(3)
    return *failing(comm.split, 0), comm.failure


def test_a_rank_that_dies_in_a_split_is_named_by_all():
    outcomes = run_ranks(split_beside_a_death, 3, variables=HOSTS)
    for outcome in outcomes[:2]:
        error, seconds, failure = outcome.result
        assert isinstance(error, pc.PeerFailure), error
        assert "rank 2 died or cannot be reached any more" in str(error)
        assert seconds < LONG / 3
        assert failure is not None  # of the communicator that was split


def stay_away(_self, _members, _across, poll):
    """In place of connecting: alive, until the group fails."""
    while True:
        poll()
        time.sleep(0.01)


def interrupted_in_a_split(comm):
    comm.timeout = comm._world.transport._timeout = LONG
    comm.barrier()
    if comm.rank == 0:
        interrupt_soon()
    else:
        GlooTransport.split = stay_away
    how = failing(comm.split, 0)
    end = time.monotonic() + LONG / 3
    while connecting_threads() and time.monotonic() < end:
        time.sleep(0.01)
    return *how, connecting_threads()


def test_ctrl_c_ends_a_split_and_all_are_told():
    first, *others = results(run_ranks(interrupted_in_a_split, 3, variables=HOSTS))
    assert isinstance(first[0], KeyboardInterrupt)
    assert first[1] < LONG / 3
    assert first[2] == 0  # nothing of it is left
    for error, seconds, _ in others:
        assert isinstance(error, pc.CollectiveAborted), error
        assert "rank 0 aborted" in str(error)
        assert "split was given up: KeyboardInterrupt" in str(error)
        assert seconds < LONG / 3


def init_beside_a_death(_):
    if os.environ["PYCOLLECTIVE_RANK"] == "2":
        GlooTransport.__init__ = lambda *_: os._exit(3)
    return failing(pc.init, timeout=LONG)


def test_a_rank_that_dies_in_init_is_named_where_the_store_is_our_own():
    outcomes = run_ranks(init_beside_a_death, 3, join=False, variables=HOSTS)
    for outcome in outcomes[:2]:
        error, seconds = outcome.result
        assert isinstance(error, pc.PeerFailure), error
        assert "rank 2 (process" in str(error)
        assert "died before all had joined" in str(error)
        assert seconds < LONG / 3


def split_beside_who_stays_away(comm):
    comm.timeout, comm._world.transport._timeout = LONG, 2
    if comm.rank == 3:
        GlooTransport.split = stay_away
    return failing(comm.split, comm.rank // 2)


def test_who_stays_away_from_a_split_is_named_by_its_number_there():
    hosts = {"PYCOLLECTIVE_TOPOLOGY": "4x1"}
    error, _ = results(run_ranks(split_beside_who_stays_away, 4, variables=hosts))[2]
    assert isinstance(error, pc.CollectiveTimeout), error
    assert "split timed out on rank 2" in str(error)
    assert "rank(s) 3 did not come" in str(error)
    assert error.rank == 2


def interrupted_alone(_, port):
    store = torch_store(port)
    interrupt_soon()
    return failing(pc.init, rank=0, size=2, store=store, timeout=LONG)


def test_ctrl_c_ends_an_init_that_waits_at_torchs_store():
    [(error, seconds)] = results(run_ranks(interrupted_alone, 1, free_port(), join=False))
    assert isinstance(error, KeyboardInterrupt), error
    assert seconds < 15  # torch's own wait begins anew after 30 s


def split_in_pairs(comm):
    sums = []
    for _ in range(2):
        with comm.split(comm.rank // 2) as pair:
            x = np.full(3, comm.rank + 1.0)
            pair.all_reduce(x)
            sums += [pair.size, *set(x.tolist())]
    return sums


def test_groups_of_one_split_and_of_the_next_meet_apart():
    hosts = {"PYCOLLECTIVE_TOPOLOGY": "4x1"}
    sums = results(run_ranks(split_in_pairs, 4, variables=hosts))
    assert sums == [[2, 3, 2, 3]] * 2 + [[2, 7, 2, 7]] * 2


def test_loopback_is_the_address_only_where_there_is_no_other(monkeypatch):
    ways = {socket.gethostname(): "127.0.1.1", gloo._OUTSIDE: "192.168.1.7"}
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(gloo, "_towards", lambda target: ways.get(target, ""))
    assert gloo.own_address() == "192.168.1.7"
    ways["master"] = "10.0.0.1"
    assert gloo.own_address("master") == "10.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    ways["elsewhere"] = "10.0.0.2"
    assert gloo.own_address("master") == "10.0.0.2"
    ways.clear()
    assert gloo.own_address() == "127.0.0.1"
