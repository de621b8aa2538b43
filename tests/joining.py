"""What tests of joining share; runs in tests and in their ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import pycollective as pc
from pycollective import _core


def works(comm):
    """Whether all ranks are there and in their places."""
    x = np.zeros(comm.size, np.int64)
    x[comm.rank] = comm.rank + 1
    comm.all_reduce(x)
    return x.tolist() == list(range(1, comm.size + 1))


def failing(call, *args, **options):
    """What a call raises, and how long that took (seconds)."""
    start = time.monotonic()
    try:
        call(*args, **options)
    except (RuntimeError, pc.ConfigurationError, KeyboardInterrupt) as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def free_unix():
    return f"unix:@pycollective-test-{os.getpid()}-{os.urandom(6).hex()}"


def free_place():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def await_listeners_of(pids):
    """The abstract sockets of these processes, once each has one: they wait for the others then."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = Path("/proc/net/unix").read_text().splitlines()
        starts = tuple(f"@pycollective-{pid}-" for pid in pids)
        found = [name for line in lines if (name := line.split()[-1]).startswith(starts)]
        if len(found) == len(pids):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not all of {pids} came to listen")


def clear_launch(variables):
    """Take out of an environment what launchers say in it."""
    names = ("PYCOLLECTIVE_", "MASTER_", "PMI", "OMPI_", "SLURM_", "TORCHELASTIC")
    for name in {*variables} - {"PYCOLLECTIVE_PLANTED"}:  # which bug is under test
        if name.startswith(names) or "RANK" in name or name == "WORLD_SIZE":
            del variables[name]


class NodeOfThread:
    """In place of the process's: each rank has a node of its own."""

    def __init__(self):
        self._own = threading.local()

    def get(self):
        if not hasattr(self._own, "node"):
            self._own.node = _core.Node()
        return self._own.node

    def forget(self):
        with suppress(AttributeError):
            del self._own.node


class CountingStore:
    """What a `torch.distributed.Store` offers, with a count of what each rank asks for."""

    def __init__(self):
        self._lock = threading.Lock()
        self._values, self._set = {}, {}
        self._counts = {}
        self.operations, self.bytes = {}, {}

    def _account(self, size):
        me = threading.current_thread().name
        self.operations[me] = self.operations.get(me, 0) + 1
        self.bytes[me] = self.bytes.get(me, 0) + size

    def _event(self, key):
        return self._set.setdefault(key, threading.Event())

    def set(self, key, value):
        value = value if isinstance(value, bytes) else value.encode()
        self._account(len(value))
        with self._lock:
            self._values[key] = value
            self._event(key).set()

    def get(self, key):
        with self._lock:
            event = self._event(key)
        assert event.wait(30), key
        self._account(len(self._values[key]))
        return self._values[key]

    def wait(self, keys, timeout):
        for key in keys:
            self._account(0)
            with self._lock:
                event = self._event(key)
            if not event.wait(timeout.total_seconds()):
                raise RuntimeError(f"{key} was not set in time")

    def check(self, keys):
        self._account(0)
        return all(key in self._values for key in keys)

    def add(self, key, amount):
        self._account(0)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]

    def compare_set(self, key, expected, desired):
        assert expected == ""
        with self._lock:
            value = self._values.setdefault(key, desired.encode())
            self._event(key).set()
        self._account(len(desired) + len(value))
        return value


class Minimal:
    """No more than a store must have."""

    def __init__(self, store):
        self.set, self.get = store.set, store.get
