"""Real processes as ranks, for tests.

`run_ranks` starts some for one function, as forks of a process that has imported its module;
`RankPool` keeps some for many calls, as property tests need: fresh ones, unless it is given the
module. Both go through the library's own bootstrap, kill what outlives its time, and leave nothing
behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from pycollective.bootstrap.store import StoreServer
from tests.rank_server import Forked, RankServer

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    """How a rank ended: its result, or its exception, or neither where it was killed."""

    rank: int
    pid: int = 0
    result: Any = None
    error: BaseException | None = None
    exit_code: int | None = None  # negative: the signal
    ended: float = 0.0  # monotonic clock, when its answer came
    stderr: str = ""


class RankLost(AssertionError):
    """A rank died or stayed silent although the test did not ask for it."""


@dataclass
class _Rank:
    process: subprocess.Popen[bytes] | Forked
    pipe: Connection
    outcome: Outcome
    pidfd: int
    stderr: int  # of a file: a pipe that nobody reads meanwhile would stop a talkative rank


@dataclass
class Ranks:
    """Started ranks, each waiting for functions to call with its communicator."""

    size: int
    timeout: float = 60.0
    env: dict[str, str] = field(default_factory=dict)
    join: bool = True  # make a communicator in each before the first call
    operation_timeout: float = 30.0
    # Imported before the ranks are forked. Without it they are fresh processes; with an `env` too,
    # since much is read from it while Python and libraries start.
    module: str = ""
    # What only this library reads, when it is called: forks may have it.
    variables: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Ranks:
        self._address = f"unix:@pycollective-test-{os.getpid()}-{os.urandom(6).hex()}"
        self._store = StoreServer(self._address, self.variables.get("PYCOLLECTIVE_SECRET", ""))
        self._ranks: list[_Rank] = []
        try:
            for rank in range(self.size):
                self._ranks.append(self._start(rank))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self, rank: int) -> _Rank:
        here, there = Pipe()
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYCOLLECTIVE_RANK": str(rank),
            "PYCOLLECTIVE_SIZE": str(self.size),
            "PYCOLLECTIVE_STORE": self._address,
            **self.variables,
            **self.env,
        }
        arguments = [str(self.operation_timeout), "1" if self.join else "0"]
        stderr = os.memfd_create("stderr")
        process: subprocess.Popen[bytes] | Forked
        if self.module and not self.env:
            server = _server_for(self.module)
            process = server.start(self.module, env, arguments, there.fileno(), stderr)
        else:
            command = [sys.executable, "-m", "tests.rank_main", str(there.fileno()), *arguments]
            process = subprocess.Popen(
                command, env=env, cwd=ROOT, pass_fds=[there.fileno()], stderr=stderr
            )
        there.close()
        pidfd = os.pidfd_open(process.pid)
        return _Rank(process, here, Outcome(rank, process.pid), pidfd, stderr)

    def joined(self) -> Ranks:
        """Wait until all have their communicator, so that what happens next happens to a group."""
        results(self.call(_nothing))
        return self

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._ranks]

    @property
    def processes(self) -> list[subprocess.Popen[bytes] | Forked]:
        return [each.process for each in self._ranks]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """Call ``function(communicator, *args)`` in every rank; args may differ by `PerRank`."""
        for each in self._ranks:
            mine = [a.values[each.outcome.rank] if isinstance(a, PerRank) else a for a in args]
            each.outcome = Outcome(each.outcome.rank, each.process.pid)
            each.pipe.send_bytes(pickle.dumps((function, mine)))
        self._collect()
        return [each.outcome for each in self._ranks]

    def _collect(self) -> None:
        deadline = time.monotonic() + self.timeout
        missing = {each.pipe: each for each in self._ranks}
        while missing:
            for each in self._answers([*missing.values()], deadline):
                del missing[each.pipe]

    def _answers(self, missing: list[_Rank], deadline: float) -> list[_Rank]:
        """Wait for some of these; return those whose outcome is there now."""
        # The end of a process, too: its forked children may hold its pipe open.
        pipes: dict[Any, _Rank] = {each.pipe: each for each in missing}
        watched: dict[Any, _Rank] = {each.pidfd: each for each in missing}
        ready = wait([*pipes, *watched], max(0.0, deadline - time.monotonic()))
        if not ready:
            for each in missing:
                each.process.send_signal(signal.SIGABRT)  # faulthandler tells where it hangs
            time.sleep(0.5)
            stories = "\n".join(f"rank {r.outcome.rank}:\n{_stderr(r)}" for r in missing)
            # What another rank raised may be why.
            raised = (each.outcome.error for each in self._ranks)
            cause = next((error for error in raised if error), None)
            raise RankLost(f"no answer within {self.timeout:g} s from\n{stories}") from cause
        answered = {id(each): each for each in ((pipes | watched)[one] for one in ready)}
        for each in answered.values():
            try:
                if not each.pipe.poll():
                    raise EOFError
                each.outcome.result, each.outcome.error = pickle.loads(each.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                each.outcome.exit_code = each.process.wait(10)
            each.outcome.ended = time.monotonic()
            each.outcome.stderr = _stderr(each)
        return [*answered.values()]

    def __exit__(self, *exc: object) -> None:
        for each in self._ranks:
            each.pipe.close()
        for each in self._ranks:
            try:
                each.process.wait(5)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            except (OSError, RuntimeError):  # who forks the ranks is gone, and cannot be asked
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(each.pidfd, signal.SIGKILL)
            os.close(each.stderr)
            os.close(each.pidfd)
        self._store.close()


_servers: dict[str, RankServer] = {}


def _server_for(module: str) -> RankServer:
    """One for each package of tests: torch is not imported where it is not tested."""
    package = module.rpartition(".")[0]
    if package not in _servers or not _servers[package].alive:
        _servers[package] = RankServer(ROOT)
    return _servers[package]


def close_servers() -> None:
    """End the processes that fork ranks. They are started anew when they are needed again."""
    while _servers:
        _servers.popitem()[1].close()


def committed(communicator: Any) -> int:
    """Bytes of the rank's shared memory that hold something."""
    return os.fstat(communicator._node.fileno()).st_blocks * 512


def counts() -> tuple[int, int, int]:
    """Of this process: threads, descriptors, mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().count("memfd:pycollective")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), maps


def thread_names() -> dict[int, str]:
    """Of this process's threads, by their ids; one that ends meanwhile is left out."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def _nothing(communicator: Any) -> None:
    pass


def await_(happened: Callable[[], bool], limit: float = 30.0) -> None:
    """Look until it has; what a test does next is about that, however slow the machine is."""
    deadline = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.001)


def asleep(pid: int) -> bool:
    """Whether its main thread sleeps: the first letter after its name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@dataclass(frozen=True)
class PerRank:
    """An argument that differs by rank."""

    values: list[Any]


def _stderr(rank: _Rank) -> str:
    """All that the rank has written to it so far."""
    # The rank writes at the offset that both share: it is left alone.
    size = os.fstat(rank.stderr).st_size
    return os.pread(rank.stderr, size, 0).decode(errors="replace")


def results(outcomes: list[Outcome]) -> list[Any]:
    """Every rank's result; raises what a rank raised first: what others raised may follow from it,
    as their timeouts do."""
    for each in sorted(outcomes, key=lambda each: each.ended):
        if each.error is not None:
            raise each.error
        if each.exit_code is not None:
            raise RankLost(f"rank {each.rank} ended with {each.exit_code}\n{each.stderr}")
    return [each.result for each in outcomes]


def run_ranks(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Outcome]:
    """Call ``function(communicator, *args)`` once in each of `size` new processes."""
    with Ranks(size, module=function.__module__, **options) as ranks:
        return ranks.call(function, *args)


class RankPool:
    """`Ranks` that stay for many calls; started anew when a call has cost their communicator."""

    def __init__(self, size: int, **options: Any) -> None:
        self._size = size
        self._options = options
        self._ranks: Ranks | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Every rank's result; raises what any rank raised."""
        if self._ranks is None:
            self._ranks = Ranks(self._size, **self._options).__enter__()
        try:
            return results(self._ranks.call(function, *args))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__(None, None, None)
            self._ranks = None
