"""Any user of a machine can reach the ranks' sockets: another user's get no place and no memory."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from pycollective import ConfigurationError, _core
from pycollective.bootstrap import attach
from pycollective.bootstrap.attach import Listener, PeerAddress, attach_peers


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
