"""The store: values, waits, deadlines; and strangers, who must not disturb anybody."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from pycollective import CollectiveTimeout, ConfigurationError
from pycollective.bootstrap.store import StoreClient, StoreServer, parse_address
from tests.harness import await_
from tests.joining import free_place, free_unix

SECRET = "5ec2e7"


@pytest.fixture(params=[free_unix, free_place], ids=["unix", "tcp"])
def address(request):
    return request.param()


@pytest.fixture
def server(address):
    with StoreServer(address, SECRET) as each:
        yield each


@pytest.fixture
def connect(address, server):
    """Makes clients, with the secret unless another is given, and closes them."""
    made = []

    def make(secret=SECRET, timeout=5.0):
        made.append(StoreClient(address, secret, timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def stranger(address):
    family, target = parse_address(address, SECRET)
    each = socket.socket(family, socket.SOCK_STREAM)
    each.settimeout(5)
    while True:
        try:
            each.connect(target)
            return each
        except BlockingIOError:  # the queue of an abstract socket is full for the moment
            time.sleep(0.01)


@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)), b"\n" * 70_000])
def test_a_value_reaches_another_client_byte_for_byte(connect, value):
    connect().set("a key / with spaces\n", value)
    assert connect().get("a key / with spaces\n") == value


def test_get_waits_until_the_key_is_set(server, connect):
    one, other = connect(), connect()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.get, "late")
        await_(lambda: server._waiting)
        assert not other.check(["late"])
        other.set("late", b"now")
        assert waiting.result(5) == b"now"
    assert other.check(["late"])
    assert not other.check(["late", "later"])
    other.set("late", b"again")  # who has its answer gets no other
    other.set("more", b"more")
    assert one.get("more") == b"more"


def test_a_wait_ends_at_its_deadline_and_the_client_stays_usable(connect):
    client = connect(timeout=5.0)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="'never'"):
        client.wait(["never"], timedelta(seconds=0.2))
    assert 0.15 < time.monotonic() - start < 2
    connect().set("never", b"late answer")
    connect().set("other", b"1")
    assert client.get("other") == b"1"  # and not the late answer to the first question


def test_counts_and_claims_are_one_for_all_clients(connect):
    clients = [connect() for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda each: each.add("n", 1), clients))
        claims = list(
            threads.map(lambda i: clients[i].compare_set("owner", "", f"client {i}"), range(8))
        )
    assert sorted(counts) == list(range(1, 9))
    assert len(set(claims)) == 1
    assert claims[0] == clients[0].get("owner")
    with pytest.raises(ConfigurationError):
        clients[0].add("n", 2)
    with pytest.raises(ConfigurationError):
        clients[0].compare_set("owner", "client 0", "client 1")


GARBAGE = {
    "silence": b"",
    "no line": b"x" * 1000,
    "too long a line": b"x" * (3 << 20),
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "wrong words": b"\n \n   \na b\n",
    "random": os.urandom(4096) + b"\n",
    "wrong secret": b"abc set a2V5 dg==\n",
    "unknown verb": b"5ec2e7 drop a2V5 dg==\n",
    "no base64": b"5ec2e7 set \xff\xfe \xff\n5ec2e7 count \xff \xff\n5ec2e7 get \xff \xff\n",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_strangers_disturb_nobody(address, server, connect, said):
    client = connect()
    with stranger(address) as silent, stranger(address) as rude:
        # It may be cut off while it still talks.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            rude.sendall(said)
        newcomer = connect()
        newcomer.set("key", b"right")
        assert client.get("key") == b"right"
        assert silent.fileno() >= 0
    client.set("after", b"1")
    assert newcomer.get("after") == b"1"


def test_more_strangers_than_there_is_room_for_keep_no_client_out(address, server, connect):
    first = connect()
    first.set("key", b"1")
    strangers = [stranger(address) for _ in range(400)]
    late = connect()
    assert late.get("key") == b"1"
    assert first.get("key") == b"1"
    for each in strangers:
        each.close()


def test_there_is_room_for_as_many_clients_as_it_was_made_for(address):
    with StoreServer(address, SECRET, clients=300) as server:
        clients = [StoreClient(address, SECRET, timeout=20) for _ in range(300)]
        assert [each.add("n", 1) for each in clients] == list(range(1, 301))
        clients[0].set("key", b"1")  # nobody had to make room for another
        assert all(each.get("key") == b"1" for each in clients)
        for each in clients:
            each.close()
        server.close(5.0, 300)


def test_more_clients_than_the_process_may_open_files_for_are_refused(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 4096))
    with pytest.raises(ConfigurationError, match=r"for 4096 ranks needs .* may open 1024.*ulimit"):
        StoreServer(free_unix(), SECRET, clients=4096)
    StoreServer(free_unix(), SECRET, clients=512).close()


def test_a_client_looks_elsewhere_while_it_waits(connect, address):
    class Enough(Exception):
        pass

    def enough():
        if time.monotonic() > start + 0.2:
            raise Enough

    start = time.monotonic()
    client = StoreClient(address, SECRET, 20.0, enough)
    with pytest.raises(Enough):
        client.get("never")
    assert 0.15 < time.monotonic() - start < 2
    connect().set("never", b"late answer")
    connect().set("other", b"1")
    assert client.get("other") == b"1"  # and not the late answer to the first question
    client.close()


def test_the_longest_value_can_be_read_and_a_longer_one_is_refused(connect):
    longest = b"x" * 98_000
    for client in [connect() for _ in range(20)]:
        client.set("key", longest)
        assert client.get("key") == longest
    with pytest.raises(ConfigurationError, match=r"set 'key': \d+ bytes are too long"):
        client.set("key", longest + longest)
    assert client.get("key") == longest


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_served(address, connect):
    client = connect()
    client.set("key", b"x" * 90_000)
    with stranger(address) as deaf:

        def ask(times):
            for _ in range(times):
                deaf.sendall(b"5ec2e7 get a2V5 \n")

        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ask(500)  # 60 MB of answers: more than any socket holds
        start = time.monotonic()
        assert client.check(["key"])
        assert time.monotonic() - start < 2
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask(1_000_000)


def test_a_wrong_secret_gets_nothing(connect):
    connect().set("key", b"1")
    for wrong in ("0bad", SECRET[:-1], SECRET + "0"):
        with pytest.raises(ConfigurationError, match="wants another secret"):
            connect(wrong).get("key")


def test_the_end_of_the_server_reaches_who_waits(address):
    server = StoreServer(address, SECRET)
    client = StoreClient(address, SECRET, timeout=30)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.get, "never")
        await_(lambda: server._waiting)
        server.close()
        with pytest.raises(ConfigurationError, match="it has ended"):
            waiting.result(5)


def test_a_server_that_stops_listening_keeps_its_clients(address):
    with StoreServer(address, SECRET) as server:
        client = StoreClient(address, SECRET, timeout=5)
        client.set("key", b"1")
        server.stop_listening()
        assert client.get("key") == b"1"
        with pytest.raises((CollectiveTimeout, ConfigurationError), match="no store"):
            StoreClient(address, SECRET, timeout=0.2)
        client.close()


def test_a_lingering_server_waits_for_its_clients(address):
    server = StoreServer(address, SECRET)
    client = StoreClient(address, SECRET, timeout=5)
    client.set("key", b"1")
    with ThreadPoolExecutor(1) as threads, stranger(address):
        closing = threads.submit(server.close, 5.0, 2)
        assert client.get("key") == b"1"
        client.close()
        await_(lambda: not server._known)
        with pytest.raises(TimeoutError):  # nobody is there, and one is still to come
            closing.result(0.1)
        late = StoreClient(address, SECRET, timeout=5)
        assert late.get("key") == b"1"
        late.close()
        start = time.monotonic()
        closing.result(5)
        assert time.monotonic() - start < 1


def test_a_client_may_come_before_a_tcp_server():
    address = free_place()
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(StoreClient, address, SECRET, 10.0)
        time.sleep(0.2)
        with StoreServer(address, SECRET):
            early.result(5).close()


def test_nothing_is_left_behind(address):
    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()
    for _ in range(20):
        with StoreServer(address, SECRET) as server:
            with stranger(address):
                client = StoreClient(address, SECRET, timeout=5)
                client.set("key", b"1")
                client.close()
            server.close()  # and once more at the end of the block
    never_started = StoreServer(address, SECRET, start=False)
    never_started.close()
    assert counts() == before


def test_a_place_that_is_taken_is_said(address, server):
    with pytest.raises(ConfigurationError, match="cannot serve"):
        StoreServer(address, SECRET)


def test_nobody_there_is_a_timeout_over_tcp_and_at_once_a_fault_over_unix():
    with pytest.raises(CollectiveTimeout, match=r"no store answers at tcp://127.0.0.1:\d+ within"):
        StoreClient(free_place(), SECRET, timeout=0.3)
    start = time.monotonic()
    # A launcher has a secret, and listens before its ranks start; a rank may come later.
    with pytest.raises(ConfigurationError, match="there is no store"):
        StoreClient(free_unix(), SECRET, timeout=30)
    assert time.monotonic() - start < 5
    with pytest.raises(CollectiveTimeout, match="no store answers at unix:"):
        StoreClient(free_unix(), timeout=0.3)


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp://", "tcp://host", "tcp://:80", "tcp://host:", "tcp://host:0"),
        *("tcp://host:65536", "tcp://host:-1", "host:80", "unix:/tmp/socket", "tcp://host:\u00b2"),
    ],
)
def test_a_wrong_address_is_said(address):
    with pytest.raises(ConfigurationError, match="is not tcp://host:port"):
        parse_address(address, SECRET)


def test_a_will_is_done_where_its_client_dies_and_nowhere_else(connect, server):
    dies, leaves, waits = connect(), connect(timeout=0.1), connect(timeout=20)
    dies.last_will(["death", "known"], b"it died")
    leaves.last_will(["end"], b"it died")
    with pytest.raises(CollectiveTimeout):  # which ends a connection, and is no death
        leaves.get("never")
    dies.set("known", b"before")
    leaves.set("left", b"1")
    dies._socket.close()  # without a word, as the kernel does it
    assert waits.get("death") == b"it died"
    assert waits.get("known") == b"before"
    leaves.close()
    await_(lambda: len(server._known) == 1)
    assert not waits.check(["end"])
    again = connect()
    again.last_will(["end"], b"it died")
    with pytest.raises(CollectiveTimeout):
        again.wait(["never"], timedelta(seconds=0.05))
    again.set("told", b"anew")  # and so is the will, on the next connection
    again._socket.close()
    assert waits.get("end") == b"it died"


def test_who_leaves_before_the_answer_has_not_died(address):
    """What it said before it left is read first, though an answer finds it gone."""
    family, target = parse_address(address, SECRET)
    with StoreServer(address, SECRET, start=False) as server:
        with socket.socket(family, socket.SOCK_STREAM) as leaves:
            leaves.connect(target)
            words = [(b"will", b"ZW5k", b"eA=="), (b"claim", b"YQ==", b"eA=="), (b"bye", b"", b"")]
            for each in words:
                leaves.sendall(b" ".join((SECRET.encode(), *each)) + b"\n")
        server.start()
        await_(lambda: server.has("a") and not server._known)
        assert not server.has("end")
