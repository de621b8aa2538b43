"""Attempts of a launch that meet in one store: those who live find each other, whatever the dead
have left there."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pycollective import CollectiveTimeout, ConfigurationError
from pycollective.bootstrap import restarts
from pycollective.bootstrap.rendezvous import Rendezvous
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.joining import free_unix


@pytest.fixture
def store(monkeypatch):
    """The address of torchrun's store; each thread is a process."""
    monkeypatch.setattr(restarts, "process_identity", lambda: threading.current_thread().name)
    with StoreServer(address := free_unix()):
        yield address


class Launch:
    """Starts ranks, which are threads, one after the other."""

    def __init__(self, store: str, size: int) -> None:
        self.store, self.size = store, size

    def _process(self, rank: int, delay: float, timeout: float):
        threading.current_thread().name = os.urandom(8).hex()
        time.sleep(delay)
        client = StoreClient(self.store, timeout=20)
        try:
            return restarts.find_start(client, rank, self.size, timeout)
        except CollectiveTimeout as error:
            return error
        finally:
            client.close()

    def start(self, ranks, timeout=20.0):
        """What came of each rank, by rank; they come in this order."""
        with ThreadPoolExecutor(self.size) as threads:
            began = [
                threads.submit(self._process, rank, 0.01 * place, timeout)
                for place, rank in enumerate(ranks)
            ]
            return dict(sorted(zip(ranks, (each.result() for each in began), strict=True)))


def test_there_is_one_attempt_where_torchrun_keeps_no_store(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    client = StoreClient(store, timeout=20)
    assert restarts.Restarts().prefix(client, 0, 3, 20) == ""
    client.close()


@pytest.fixture
def torchrun(monkeypatch):
    """Of rank 0 of 2."""
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "0",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)


class Inner:
    """A store with a prefix, as torch's groups have them."""

    def __init__(self, store: StoreClient, prefix: str) -> None:
        self.underlying_store = store
        self._prefix = prefix

    def __getattr__(self, name):
        act = getattr(self.underlying_store, name)
        return lambda key, *more: act(self._prefix + key, *more)


def test_a_process_finds_its_attempt_once(store, torchrun):
    client = StoreClient(store, timeout=20)
    mine = restarts.Restarts()
    with ThreadPoolExecutor(1) as other:
        there = other.submit(Launch(store, 2).start, [1])
        assert mine.prefix(Inner(client, "a/"), 0, 2, 20) == "attempt0of2/"
        assert there.result() == {1: 0}
    # Nobody else comes, in whatever group or store.
    assert mine.prefix(Inner(client, "b/"), 0, 2, 20) == "attempt0of2/"
    assert mine.prefix(client, 1, 2, 20) == mine.prefix(client, 3, 5, 20) == "attempt0of2/"
    client.close()


def test_a_fork_finds_its_attempt_itself(store, torchrun, monkeypatch):
    client = StoreClient(store, timeout=20)
    mine = restarts.Restarts()
    mine._prefix, lock = "attempt0of2/", mine._lock
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(CollectiveTimeout):
        mine.prefix(client, 0, 2, 0.1)
    assert mine._lock is not lock  # which a thread of the parent may have held
    client.close()


def test_whoever_gave_up_tries_again_in_the_next(store, torchrun):
    client = StoreClient(store, timeout=20)
    mine = restarts.Restarts()
    with pytest.raises(CollectiveTimeout):
        mine.prefix(client, 0, 2, 0.2)
    with ThreadPoolExecutor(1) as other:
        there = other.submit(Launch(store, 2).start, [1])
        assert mine.prefix(client, 0, 2, 20) == "attempt1of2/"
        assert there.result() == {1: 1}
    client.close()


def test_what_a_living_process_gave_up_its_latecomers_hear_at_once(store, monkeypatch):
    first = Launch(store, 2).start([0], timeout=0.2)
    monkeypatch.setattr(restarts, "is_alive", lambda identity: True)
    begun = time.monotonic()
    late = Launch(store, 2).start([1])
    assert time.monotonic() - begun < 5
    assert "init timed out on rank 0" in str(first[0])
    assert str(late[1]) == f"rank 0: {first[0]}"


@pytest.mark.parametrize("turn", range(3))
def test_whoever_died_before_the_others_came(store, turn):
    """In each attempt some ranks come, in any order, and end while they wait for the others. Four
    launches beside each other, since all they do is wait."""
    addresses = [f"{store}-{seed}" for seed in range(4 * turn, 4 * turn + 4)]
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        for address in addresses:
            stack.enter_context(StoreServer(address))
        for done in [threads.submit(attempt_again_and_again, each) for each in addresses]:
            done.result()


def attempt_again_and_again(store):
    order = random.Random(int(store.rpartition("-")[2]))
    launch = Launch(store, 4)
    seen = set()
    for _ in range(order.randint(1, 4)):
        came = order.sample(range(4), order.randint(1, 4))
        found = launch.start(came, timeout=0.2)
        if len(came) == 4:
            seen.update(found.values())
        else:
            assert all(isinstance(each, CollectiveTimeout) for each in found.values())
    found = launch.start(order.sample(range(4), 4))
    assert len(set(found.values())) == 1, found
    assert found[0] not in seen


def test_an_attempt_may_have_another_size(store):
    Launch(store, 4).start([0, 1, 2, 3])
    Launch(store, 4).start([0, 2], timeout=0.3)  # in which they claim it
    assert set(Launch(store, 2).start([0, 1]).values()) == {0}
    four = set(Launch(store, 4).start([3, 2, 1, 0]).values())
    assert four in ({2}, {3})


def test_who_does_not_come_is_named(store, monkeypatch):
    monkeypatch.setattr(restarts, "is_alive", lambda identity: True)
    found = Launch(store, 3).start([0, 2], timeout=0.5)
    for error in found.values():
        assert "rank(s) 1 of 3 did not come" in str(error)


def test_a_second_living_process_of_a_rank_is_refused(store, monkeypatch):
    monkeypatch.setattr(restarts, "is_alive", lambda identity: identity == "another")
    client = StoreClient(store, timeout=20)
    assert Rendezvous(client, 0, 2, 20, "attempt0of2").claim_rank_for("another") == "another"
    with pytest.raises(ConfigurationError, match=r"another and .* both claim rank 0"):
        restarts.find_start(client, 0, 2, 20)
    client.close()


def test_the_way_through_attempts_has_an_end(store, monkeypatch):
    monkeypatch.setattr(restarts, "_MOST", 50)
    client = StoreClient(store, timeout=20)
    for number in range(50):
        assert (
            Rendezvous(client, 0, 2, 20, f"attempt{number}of2").claim_rank_for("another")
            == "another"
        )
    with pytest.raises(ConfigurationError, match="rank 0 was claimed 50 times"):
        restarts.find_start(client, 0, 2, 20)
    with pytest.raises(CollectiveTimeout, match="on its way through"):
        restarts.find_start(client, 0, 2, 0)
    client.close()


def identity_of_a_fork():
    """Of a process that has ended, and is not waited for yet; and its pid."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, restarts.process_identity().encode())
        os._exit(0)
    child = os.read(read, 1000).decode()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(read)
    os.close(write)
    return child, pid


def test_who_is_alive_here():
    mine = restarts.process_identity()
    assert restarts.is_alive(mine)
    assert not restarts.is_alive(mine.replace("tick ", "tick 1"))
    assert not restarts.is_alive(mine.replace(" on ", " on another"))
    child, pid = identity_of_a_fork()
    assert child != mine
    assert not restarts.is_alive(child)  # it has ended, and nobody has waited for it
    os.waitpid(pid, 0)
    assert not restarts.is_alive(child)


def test_a_process_is_told_from_a_later_one_of_the_same_number():
    def started(identity):
        return identity.partition(" (started")[2]

    mine = restarts.process_identity()
    assert mine == restarts.process_identity()
    time.sleep(0.03)  # more than a tick
    child, pid = identity_of_a_fork()
    os.waitpid(pid, 0)
    assert started(child) != started(mine) != ""
