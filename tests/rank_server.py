"""Ranks that start at once: forks of a process that has imported what they need.

To start Python and to import torch costs a rank more than most tests do, and so does taking it all
down: of a fork with torch 0.22 s of 0.24, for the memory it shares with the others is copied. So
forks end, as those of multiprocessing do, once their threads have ended and their exit handlers
have run. What forks cannot show, because they are alike (addresses of memory, seeds of hashes) and
end so, launchers' ranks show, and those with an `env` or without a module: they are processes of
their own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import NoReturn

from tests import rank_main

_LARGEST = 1 << 20  # bytes of a request: environment and names
_LIMIT = 100.0  # seconds until it must have been answered: the first may import torch


class Forked:
    """A forked rank, with as much of `subprocess.Popen` as the harness needs."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status once it has ended; negative: the signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self._status is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            self._status = self._server.ask(("status", self.pid), [])
            os.close(self._pidfd)
        return self._status

    def send_signal(self, number: int) -> None:
        """Send it, unless the rank has been waited for."""
        if self._status is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class RankServer:
    """The process that forks; it ends when this one does."""

    def __init__(self, root: Path) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_LIMIT)
        with there:
            command = [sys.executable, "-m", "tests.rank_server", str(there.fileno())]
            env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, env=env, cwd=root, pass_fds=[there.fileno()])

    def start(
        self, module: str, env: dict[str, str], arguments: list[str], pipe: int, stderr: int
    ) -> Forked:
        """A rank with these of `rank_main`'s arguments, once `module` is imported."""
        return Forked(self, self.ask(("start", module, env, arguments), [pipe, stderr]))

    def ask(self, request: tuple, descriptors: list[int]) -> int:
        """The answer to it."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            answer = self._socket.recv(_LARGEST)
        except OSError:
            self.close()  # a late answer would be taken for the next one's
            raise
        if not answer:
            self.close()
            raise RuntimeError("the process that forks ranks has ended; its stderr says why")
        return pickle.loads(answer)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Serves until nobody asks any more."""
    place = socket.socket(fileno=int(sys.argv[1]))
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who started it
    while True:
        data, descriptors, _, _ = socket.recv_fds(place, _LARGEST, 2)
        if not data:
            return
        what, *arguments = pickle.loads(data)
        if what == "status":
            answer = os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1])
        else:
            importlib.import_module(arguments[0])
            gc.freeze()  # what is there now is never looked at again, in no rank
            for each in list(weakref.finalize._registry):
                each.atexit = False  # torch would forget its operators one by one, in every rank
            answer = os.fork()
            if answer == 0:
                place.close()
                signal.signal(signal.SIGINT, interrupts)
                become_rank(arguments[1], arguments[2], *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        place.send(pickle.dumps(answer))


def become_rank(env: dict[str, str], arguments: list[str], pipe: int, stderr: int) -> NoReturn:
    """What a process has from its start on; then what ranks do; and its end."""
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = [str(pipe), *arguments]
    status = 1
    try:
        rank_main.main()
        status = 0
    except (Exception, KeyboardInterrupt) as error:
        sys.last_type, sys.last_value = type(error), error  # as exit handlers find it
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
