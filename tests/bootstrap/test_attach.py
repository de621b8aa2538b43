"""Attaching: what a hello must be, and what a descriptor must be, before anything is mapped."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing

import pytest

from pycollective import CollectiveTimeout, ConfigurationError, PeerFailure, _core
from pycollective.bootstrap import attach
from pycollective.bootstrap.attach import Listener, PeerAddress, ProcessNode, attach_peers
from tests.harness import await_

SEGMENT_BYTES = 256 << 20
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Rank:
    """One side of an attachment: all of a process that it takes."""

    def __init__(self, number):
        self.node, self.listener = _core.Node(), Listener()
        self.address = PeerAddress(number, self.node.token, self.listener.name, "here")

    def attach(self, *peers, seconds=10.0, raise_problem=lambda: None):
        lower = [peer.address for peer in peers if peer.address.rank < self.address.rank]
        higher = [peer.address for peer in peers if peer.address.rank > self.address.rank]
        deadline = time.monotonic() + seconds
        attach_peers(self.node, self.listener, lower, higher, deadline, raise_problem)


@pytest.fixture
def ranks():
    """Makes ranks; checks that nothing of them stays open but what their nodes hold."""
    with ExitStack() as stack:
        made = []

        def make(count):
            for number in range(count):
                made.append(Rank(number))
                stack.callback(made[-1].listener.close)
            return made

        yield make


def attach_all(ranks):
    with ThreadPoolExecutor(len(ranks)) as threads:
        jobs = [
            threads.submit(each.attach, *(other for other in ranks if other is not each))
            for each in ranks
        ]
        for job in jobs:
            job.result(20)


def knock(rank, hello, descriptors=()):
    """Say `hello` to a rank's listener; the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect("\0" + rank.listener.name)
    if descriptors:
        socket.send_fds(connection, [hello], descriptors)
    elif hello:
        connection.send(hello)
    return connection


def memfd(size=SEGMENT_BYTES, seals=SEALED):
    descriptor = os.memfd_create("pycollective-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def segment_of_another():
    node = _core.Node()
    return os.dup(node.fileno())


def test_each_rank_attaches_each_other_and_keeps_two_descriptors_of_it(ranks):
    three = ranks(3)
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    attach_all(three)
    for each in three:
        assert all(each.node.is_attached(other.node.token) for other in three)
    # Of each peer: a pidfd, to see its death, and its segment, to map shared arrays later.
    assert len(os.listdir("/proc/self/fd")) == before + 3 * 2 * 2


@pytest.mark.parametrize(
    "forge",
    [
        lambda own, peer, fd: (b"", []),
        lambda own, peer, fd: (b"x" * 31, [fd]),
        lambda own, peer, fd: (os.urandom(32), [fd]),
        lambda own, peer, fd: (os.urandom(16) + own, [fd]),
        lambda own, peer, fd: (own + own, [fd]),
        lambda own, peer, fd: (peer + os.urandom(16), [fd]),
        lambda own, peer, fd: (peer + own, []),
    ],
    ids=[
        *("silence", "too short", "random", "a stranger's token", "one's own token"),
        *("meant for another", "no descriptor"),
    ],
)
def test_a_forged_hello_is_a_strangers(ranks, forge):
    one, other = ranks(2)
    before = len(os.listdir("/proc/self/fd"))
    descriptor = memfd()
    hello, descriptors = forge(one.node.token, other.node.token, descriptor)
    with knock(one, hello, descriptors) as stranger:
        attach_all([one, other])
        assert stranger.recv(100) == b""  # closed, and nothing said
    os.close(descriptor)
    assert one.node.is_attached(other.node.token)
    assert len(os.listdir("/proc/self/fd")) == before + 4  # a pidfd and a segment each


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: os.open("/dev/null", os.O_RDWR), "not a sealed pycollective segment"),
        (lambda: memfd(seals=0), "not a sealed pycollective segment"),
        (lambda: memfd(seals=fcntl.F_SEAL_GROW), "not a sealed pycollective segment"),
        (lambda: memfd(size=4096), "not a sealed pycollective segment"),
        (memfd, "another layout or token"),
        (segment_of_another, "another layout or token"),
    ],
    ids=["no memfd", "no seals", "may shrink", "too small", "no segment", "another's segment"],
)
def test_a_descriptor_that_is_no_segment_of_the_peer_is_refused(ranks, make, said):
    one, other = ranks(2)
    before = len(os.listdir("/proc/self/fd"))
    descriptor = make()
    with (
        knock(one, other.node.token + one.node.token, [descriptor]),
        pytest.raises(ConfigurationError, match=said),
    ):
        one.attach(other)
    os.close(descriptor)
    assert not one.node.is_attached(other.node.token)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_has_gone_cannot_be_attached(ranks):
    one, other = ranks(2)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    with pytest.raises(ConfigurationError):
        one.node.attach(other.node.token, other.node.fileno(), pid)
    assert not one.node.is_attached(other.node.token)


ACCEPT_AND_GO = """
import sys
from pycollective.bootstrap import attach
from pycollective.bootstrap.attach import Listener
listener = Listener()
listener.socket.setblocking(True)
print(listener.name, flush=True)
connection, _ = listener.socket.accept()
sys.stdin.read()
"""


@pytest.mark.parametrize("said", ["", "rank 0: has no memory"])
@pytest.mark.parametrize("before", [True, False], ids=["before the hello", "after it"])
def test_who_accepts_an_attachment_and_ends_is_named(ranks, monkeypatch, before, said):
    """And what it has reported before is said instead."""

    def why():
        if said:
            raise ConfigurationError(said)

    (other,) = ranks(2)[1:]
    # A process of its own, which listens: the kernel says whose a connection is.
    process = subprocess.Popen(
        [sys.executable, "-c", ACCEPT_AND_GO], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    with process:
        gone = PeerAddress(0, os.urandom(16), process.stdout.readline().decode().strip(), "here")
        send = attach._send

        def send_beside_an_end(*args):
            if not before:
                send(*args)
            process.stdin.close()
            process.wait(10)
            if before:
                send(*args)

        monkeypatch.setattr(attach, "_send", send_beside_an_end)
        until = time.monotonic() + 10
        kind = ConfigurationError if said else PeerFailure
        with pytest.raises(kind, match=said or "rank 0 has ended while it joined"):
            attach_peers(other.node, other.listener, [gone], [], until, why)


def close_unanswered(rank, sent):
    """As a thread does that finds its peer attached by another thread."""
    rank.listener.socket.setblocking(True)
    connection, _ = rank.listener.socket.accept()
    assert sent.wait(10)
    connection.close()
    return connection


def test_a_peer_that_another_thread_attaches_may_close_at_any_time(ranks, monkeypatch):
    """Two peers, beside each other: one closes before it is sent the hello, the other after."""
    monkeypatch.setattr(attach, "_ANSWERED_WITHIN", 0.1)
    made = ranks(4)
    pairs = {"the close": (made[0], made[1]), "the hello": (made[2], made[3])}
    sent = {first: threading.Event() for first in pairs}
    closed = {first: threading.Event() for first in pairs}
    sent["the close"].set()
    send = attach._send

    def send_beside_a_close(connection, node, wanted):
        first = "the close" if node is made[1].node else "the hello"
        if first == "the close":
            assert closed[first].wait(10)
        send(connection, node, wanted)
        sent[first].set()

    monkeypatch.setattr(attach, "_send", send_beside_a_close)
    with ThreadPoolExecutor(4) as threads:
        joining, closing = {}, {}
        for first, (one, other) in pairs.items():
            closing[first] = threads.submit(close_unanswered, one, sent[first])
            closing[first].add_done_callback(lambda _, first=first: closed[first].set())
            joining[first] = threads.submit(other.attach, one)
        for each in closing.values():
            each.result(10)
        # However long the other thread takes.
        assert wait(joining.values(), 0.5).done == set(), joining
        for first, (one, other) in pairs.items():
            other.node.attach(one.node.token, one.node.fileno(), os.getpid())
            joining[first].result(5)


def receive(rank, connection, peer):
    """What a rank does with the hello of a peer that has connected."""
    assert attach._receive(rank.node, connection, {peer.node.token: peer.address}) is not None
    attach._send(connection, rank.node, peer.node.token)


def test_what_one_thread_needs_does_not_lie_unread_in_anothers_socket(ranks, monkeypatch):
    """The first rank answers one thread and closes on the other, the second the other way round."""
    first, second, third = ranks(3)
    take, taken = attach._Attaching._take_answer, []
    monkeypatch.setattr(
        *(attach._Attaching, "_take_answer"), lambda *args: taken.append(take(*args))
    )
    listeners = {}
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        for rank in (first, second):
            for thread in "ab":
                listener = stack.enter_context(closing(Listener()))
                listener.socket.setblocking(True)
                listeners[rank, thread] = listener
        jobs = []
        for thread in "ab":
            lower = [
                PeerAddress(rank.address.rank, rank.node.token, listeners[rank, thread].name, "")
                for rank in (first, second)
            ]
            own = stack.enter_context(closing(Listener()))
            until = time.monotonic() + 5
            attaching = attach_peers, third.node, own, lower, [], until, lambda: None
            jobs.append(threads.submit(*attaching))
        came = {key: each.socket.accept()[0] for key, each in listeners.items()}
        for key in ((first, "b"), (second, "a")):
            came[key].recv(64)
            came[key].close()
        await_(lambda: len(taken) == 2)  # both have seen it
        for rank, thread in ((first, "a"), (second, "b")):
            with came[rank, thread] as connection:
                receive(rank, connection, third)
        for job in jobs:
            job.result(10)


def test_what_has_come_for_a_thread_that_fails_is_not_lost(ranks, monkeypatch):
    first, second, third = ranks(3)
    send = attach._send
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(first.attach, third)

        def fail_to_ask_the_second(connection, node, wanted):
            if wanted == second.node.token and node is third.node:
                answering.result(10)
                raise OSError(errno.EMFILE, "too many open files")
            send(connection, node, wanted)

        monkeypatch.setattr(attach, "_send", fail_to_ask_the_second)
        with pytest.raises(ConfigurationError, match="too many open files"):
            third.attach(first, second)
    assert third.node.is_attached(first.node.token)  # another thread may wait for it


def test_who_refuses_may_have_been_attached_by_another_thread(ranks, monkeypatch):
    monkeypatch.setattr(attach, "_ANSWERED_WITHIN", 20)
    one, other = ranks(2)
    one.listener.close()  # it has joined, and with this store waits for nobody
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(other.attach, one)
        with pytest.raises(TimeoutError):
            joining.result(0.5)
        other.node.attach(one.node.token, one.node.fileno(), os.getpid())
        joining.result(5)


def attach_in_some_order(node, addresses, listener, seconds):
    """As one rank of a communicator does: without whom its process has attached."""
    own = next(each.rank for each in addresses if each.token == node.token)
    missing = [each for each in addresses if not node.is_attached(each.token)]
    lower, higher = ([e for e in missing if e.rank * s < own * s] for s in (1, -1))
    attach_peers(node, listener, lower, higher, time.monotonic() + seconds, lambda: None)


@pytest.mark.parametrize("seed", range(20))
def test_threads_wait_for_none_that_waits_for_them(seed, monkeypatch):
    """Communicators of the same four processes at once, each with ranks in an order of its own."""
    # Who is attached by another thread waits for it.
    monkeypatch.setattr(attach, "_LOOK_FOR_PROBLEMS", 0.05)
    turns = random.Random(seed)
    nodes = [_core.Node() for _ in range(4)]
    with ExitStack() as stack, ThreadPoolExecutor(16) as threads:
        jobs = []
        for _ in range(4):
            listeners = [stack.enter_context(closing(Listener())) for _ in nodes]
            order = turns.sample(range(4), 4)
            addresses = [
                PeerAddress(rank, nodes[at].token, listeners[at].name, "here")
                for rank, at in enumerate(order)
            ]
            jobs += [
                (attach_in_some_order, node, addresses, listener, 5)
                for node, listener in zip(nodes, listeners, strict=True)
            ]
        turns.shuffle(jobs)
        for job in [threads.submit(*each) for each in jobs]:
            job.result(20)


def test_what_another_rank_reports_ends_the_wait(ranks):
    one, other, _ = ranks(3)
    asked = []

    def report():
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise ConfigurationError("rank 2: has no memory")

    start = time.monotonic()
    with pytest.raises(ConfigurationError, match="rank 2: has no memory"):
        one.attach(other, raise_problem=report)
    assert time.monotonic() - start < 5


def test_both_directions_have_a_deadline(ranks):
    one, middle, last = ranks(3)
    with pytest.raises(CollectiveTimeout, match=r"rank\(s\) 1, 2 have come but did not attach"):
        one.attach(middle, last, seconds=0.2)
    with pytest.raises(CollectiveTimeout, match=r"rank\(s\) 0, 1 have come but did not attach"):
        last.attach(one, middle, seconds=0.2)


def test_the_node_is_found_again_while_somebody_has_it_and_until_it_is_forgotten() -> None:
    finder = ProcessNode()
    node = finder.get()
    assert finder.get() is node
    finder.forget()  # its owner has it still
    token = node.token
    node = finder.get()
    assert node.token != token
    assert finder.get() is node
    token = node.token
    del node
    gc.collect()
    assert finder.get().token != token  # the finder kept nothing alive


def test_a_fork_finds_one_of_its_own() -> None:
    finder = ProcessNode()
    node = finder.get()
    child = os.fork()
    if not child:
        alike = 3
        try:
            own = finder.get()
            alike = int(own is node) + int(own.token == node.token) + int(finder.get() is not own)
        finally:
            os._exit(alike)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert finder.get() is node


@pytest.fixture
def another_user(monkeypatch):
    """Whose sockets begin with this name, as the kernel would say."""
    name = f"\0pycollective-another-user-{os.urandom(4).hex()}-"
    ask = attach.credentials

    def credentials(connection):
        pid, user = ask(connection)
        far = connection.getpeername()
        far = far.decode() if isinstance(far, bytes) else far
        return pid, user + far.startswith(name)

    monkeypatch.setattr(attach, "credentials", credentials)
    return name


def test_another_users_processes_take_no_place(another_user):
    """A peer has connected and is slow to speak: it is not pushed out."""
    mine, peers = _core.Node(), _core.Node()
    with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        listener = stack.enter_context(closing(Listener()))

        def connect():
            each = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            each.settimeout(10)
            return each

        slow = connect()
        slow.connect("\0" + listener.name)
        peer = PeerAddress(1, peers.token, "", "here")
        until = time.monotonic() + 20
        joining = threads.submit(attach_peers, mine, listener, [], [peer], until, lambda: None)
        strangers = [connect() for _ in range(attach._MOST_STRANGERS + 10)]
        for number, each in enumerate(strangers):
            each.bind(f"{another_user}{number}")
            each.connect("\0" + listener.name)
        assert all(each.recv(1) == b"" for each in strangers)  # refused, each of them
        attach._send(slow, peers, mine.token)
        assert slow.recv(64) != b""  # the answer
        joining.result(10)
    assert mine.is_attached(peers.token)


def test_another_users_listener_is_sent_no_memory(another_user):
    mine = _core.Node()
    with closing(Listener()) as own, closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(another_user)
        listener.listen()
        peer = PeerAddress(0, os.urandom(16), another_user[1:], "here")
        with pytest.raises(ConfigurationError, match=r"rank 0 runs as user .* must be of one user"):
            attach_peers(mine, own, [peer], [], time.monotonic() + 20, lambda: None)
        came, _ = listener.accept()
        with came:
            came.settimeout(10)
            assert came.recv(64) == b""
