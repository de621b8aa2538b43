"""Starts the ranks of one host, watches them, and ends them together.

Each rank leads a process group, so that it and its children can be ended as one, and dies with the
launcher even if that is killed. (It leads no session: Linux schedules sessions as groups, and ranks
that share a core would wait for each other's time slices.) Rank 0 has the launcher's standard
input, that of the others is empty. The launcher serves the store in which the ranks meet, behind a
secret of this job.

Under --elastic a process that takes the place of one that has died has what that one had: the core,
the standard input and the tag of its output.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pycollective.bootstrap.store import (
    TOO_FEW_KEY,
    StoreServer,
    followed_key,
    job_secret,
    joined_key,
)
from pycollective.config import (
    ENV_ELASTIC,
    ENV_JOINS,
    ENV_RANK,
    ENV_SECRET,
    ENV_SIZE,
    ENV_STORE,
    MAX_RANKS_PER_HOST,
)
from pycollective.cores import one_each
from pycollective.errors import ConfigurationError
from pycollective.launch.output import (
    Copier,
    Sink,
    is_terminal,
    make_log_dir,
    open_logs,
    sinks_of,
)
from pycollective.launch.restart_policy import Fate, Process, Restarts
from pycollective.launch.terminal import Terminal
from pycollective.system_limits import start_thread

# Seconds for the other ranks to notice a failure and report it, and then to end on SIGTERM.
_NOTICE = 1.0
_GRACE = 5.0
# Seconds for the ranks that are left, where they are too few, to save what they have.
_SAVING = 30.0
# Seconds that processes which ranks started outside their process group may go on writing.
_LAST_OUTPUT = 1.0

_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it: no other process can get its number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is not None

    def was_stopped_by(self) -> int:
        """Return the signal that has stopped it since the last call, or 0."""
        with suppress(ChildProcessError):  # it has ended since somebody looked
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG)
            return found.si_status if found else 0
        return 0


def launch(
    program: Sequence[str],
    ranks: int,
    *,
    pin: bool = False,
    tag_output: bool | None = False,
    log_dir: Path | None = None,
    restarts: Restarts | None = None,
) -> int:
    """Run `ranks` processes of `program` until they end.

    Args:
        program: ``["prog.py", args…]``, ``["-m", "module", args…]`` or ``[executable, args…]``.
        ranks: how many, 1 to `config.MAX_RANKS_PER_HOST`.
        pin: keep each rank, its threads and its children on a core of its own (`cores.in_turn`).
        tag_output: begin each line of their output with ``[rank]``; None: where it goes anywhere
            but to a terminal.
        log_dir: a new or an empty folder, in which each rank's output is written to files, too.
        restarts: makes the job elastic: a rank's death does not end it, and others take its place.

    Returns:
        0, or the status of the first rank that failed: its own, or 128 + its signal. 128 + the
        signal if the launcher was told to stop by SIGINT or SIGTERM.

    Raises:
        ConfigurationError: no such program, one that cannot be executed, or a number of ranks
            that cannot be; more ranks than cores to pin them to; files that are there, or cannot be
            written; or this process may have no more threads.
    """
    if not 1 <= ranks <= MAX_RANKS_PER_HOST:
        raise ConfigurationError(
            f"{ranks} ranks are not 1 to {MAX_RANKS_PER_HOST}, the most on one host"
        )
    command = _command(list(program))
    cores = one_each(ranks) if pin else []
    address = f"unix:@pycollective-run-{os.getpid()}-{secrets.token_hex(4)}"
    # One that was given stays: ranks of several launches may meet by it.
    secret = job_secret() or secrets.token_hex(16)
    if log_dir is not None:
        make_log_dir(log_dir)
    # Ranks may connect at once; the serving thread starts after the first ones were forked.
    with StoreServer(address, secret, start=False) as store:
        copied = bool(tag_output or log_dir)
        threads = 1 if pin else max(1, len(os.sched_getaffinity(0)) // ranks)
        defaults = _defaults(threads, copied=copied or not is_terminal(sys.stdout))
        env = {**defaults, **os.environ, ENV_STORE: address, ENV_SECRET: secret}
        for name in (ENV_ELASTIC, ENV_JOINS):  # of a launch that this one is part of
            env.pop(name, None)
        if restarts:
            env[ENV_ELASTIC] = str(restarts.fewest)
        copied = copied or _is_unbuffered_python(command, env)
        sinks = sinks_of((sys.stdout, sys.stderr), copied, tag_output)
        job = _Job(command, ranks, cores, env, sinks, log_dir, store, restarts or Restarts())
        return job.run()


def _command(program: list[str]) -> list[str]:
    if not program:
        raise ConfigurationError("no program given")
    if program[0] == "-m" or program[0].endswith(".py"):
        if program[0] != "-m" and not os.path.exists(program[0]):
            raise ConfigurationError(f"there is no file {program[0]}")
        return [sys.executable, *program]
    if shutil.which(program[0]) is None:
        raise ConfigurationError(f"{program[0]} is neither a Python file nor an executable")
    return program


def _is_unbuffered_python(command: list[str], env: Mapping[str, str]) -> bool:
    """Return whether ranks are Python that writes a line and its end apart, also on a terminal."""
    if command[0] != sys.executable and not os.path.basename(command[0]).startswith("python"):
        return False
    options = _python_options(command[1:])
    if "u" in options:
        return True
    asked = env.get("PYTHONUNBUFFERED", "").strip("0")  # 0 is as if it were unset
    return bool(asked) and options.isdisjoint("EI")


def _python_options(arguments: Sequence[str]) -> set[str]:
    """Return the letters of the interpreter's own options, which stand before the program."""
    found: set[str] = set()
    words = iter(arguments)
    for word in words:
        if word in ("-", "--") or not word.startswith("-"):
            break
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "cm":  # the rest of the word or the next is the program
                return found
            if letter in "WX":  # so it is an argument
                if place == len(word):
                    next(words, None)
                break
            found.add(letter)
    return found


def _stdin_of(rank: int) -> int:
    """Return a file for the rank's standard input, as `subprocess` takes it."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or none of the system's
        if rank == 0:
            return sys.stdin.fileno()
    return subprocess.DEVNULL


def _defaults(threads: int, copied: bool) -> dict[str, str]:
    """Return the variables that ranks get unless the environment sets them.

    Args:
        threads: that each rank has cores for.
        copied: their stdout is, and is not a terminal.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        # On a terminal Python writes line by line, and each in one piece; into a pipe, late.
        **({"PYTHONUNBUFFERED": "1"} if copied else {}),
        # More computing threads than cores make every rank wait for the slowest.
        "OMP_NUM_THREADS": str(threads),
        # For programs that call torch.distributed.init_process_group().
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class _Job:
    def __init__(
        self,
        command: list[str],
        size: int,
        cores: Sequence[int],
        env: dict[str, str],
        sinks: Sequence[Sink | int | None],
        log_dir: Path | None,
        store: StoreServer,
        restarts: Restarts,
    ) -> None:
        self._command, self._size, self._env = command, size, env
        self._cores = cores
        self._sinks, self._log_dir = sinks, log_dir
        self._store, self._restarts = store, restarts
        self._terminal = Terminal()
        self._alive: dict[int, _Rank] = {}
        self._copiers: list[Copier] = []
        self._stop_signal = 0  # the first that came
        self._stops = 0  # how many have come
        self._ending = False  # what ends from now on ends because it was told to

    def run(self) -> int:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup, or a shell's background
        }
        # The end of a rank wakes this process: no pidfds, which some containers deny.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # by a supervisor
        # A signal that comes between two waits must still end the next one.
        old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            for rank in range(self._size):
                self._start(rank)
            self._store.start()
            self._start_copiers()
            self._watch(wake_read)
        finally:
            self._signal_all(signal.SIGKILL)
            for each in self._alive.values():
                each.process.wait()
                self._terminal.take_back(each.process.pid)
            self._terminal.close()
            self._let_output_end()
            signal.set_wakeup_fd(old_wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(wake_read)
            os.close(wake_write)
        if self._stop_signal:
            return 128 + self._stop_signal
        lost = next((copier.error for copier in self._copiers if copier.error), None)
        if lost:
            self._say(f"output is lost: {lost}")
        return self._report() if self._restarts.fate is Fate.FAILED else int(lost is not None)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop_signal = self._stop_signal or number
        self._stops += 1

    def _start(self, rank: int) -> None:
        number = self._restarts.started[rank]
        env = {
            **self._env,
            ENV_RANK: str(rank),
            ENV_SIZE: str(self._size),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            **({ENV_JOINS: "1"} if number else {}),
        }
        logs = open_logs(self._log_dir, rank, number) if self._log_dir else (None, None)
        pipes = [
            subprocess.PIPE if isinstance(sink, Sink) or log else sink
            for sink, log in zip(self._sinks, logs, strict=True)
        ]
        try:
            process = subprocess.Popen(
                self._command,
                env=env,
                stdin=_stdin_of(rank),
                stdout=pipes[0],
                stderr=pipes[1],
                preexec_fn=_prepare(os.getpid(), self._cores[rank] if self._cores else None),
            )
        except (OSError, subprocess.SubprocessError) as error:  # the latter: its core is gone
            raise ConfigurationError(f"{self._command[0]} cannot be started: {error}") from error
        self._alive[rank] = _Rank(rank, process)
        streams = process.stdout, process.stderr
        for stream, sink, log in zip(streams, self._sinks, logs, strict=True):
            if stream is not None:
                shown = sink if isinstance(sink, Sink) else None
                self._copiers.append(Copier(os.dup(stream.fileno()), shown, rank, log))
                stream.close()

    def _start_copiers(self) -> None:
        for copier in self._copiers:
            if copier.ident is None:
                start_thread(copier)

    def _replace(self, rank: int, now: float) -> None:
        """Start another process in the place of one that has died."""
        died = next(each for each in reversed(self._restarts.failures) if each.rank == rank)
        try:
            self._start(rank)
            self._start_copiers()
        except (ConfigurationError, OSError) as error:  # as when there may be no more processes
            self._say(f"{self._end_of(died)}; nothing could be started in its place: {error}")
            if rank in self._alive:  # without copiers; its end is seen as any
                _signal_group(self._alive[rank].process.pid, signal.SIGKILL)
            else:
                self._restarts.plan(rank, False, now)
                self._settle([], now)
            return
        self._say(
            f"{self._end_of(died)}; pid {self._alive[rank].process.pid} takes its place (restart "
            f"{self._restarts.started.total()} of {self._restarts.limit})"
        )

    def _watch(self, wake: int) -> None:
        """Wait until all have ended. After a failure or a signal: notice, SIGTERM, SIGKILL."""
        steps: list[tuple[float, int]] = []  # when to send what to those still alive
        stops_seen = 0
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            while self._alive:
                times = [*(when for when, _ in steps[:1]), *self._restarts.planned.values()]
                waits = [max(0.0, when - time.monotonic()) for when in times]
                if selector.select(min(waits + self._terminal.lend(), default=None)):
                    os.read(wake, 4096)
                ended = []
                for each in [*self._alive.values()]:
                    if each.has_ended():
                        self._ended(each)
                        ended.append(each)
                    elif number := each.was_stopped_by():
                        self._terminal.stopped(each.process.pid, number)
                now = time.monotonic()
                if not self._stops and not self._ending:
                    if ended:
                        self._settle(ended, now)
                    while (rank := self._restarts.take(now)) is not None:
                        self._replace(rank, now)
                if (stops := self._stops) > stops_seen:  # another may come meanwhile
                    if stops_seen == 0:
                        self._signal_all(self._stop_signal)
                        steps = [(now + _GRACE, signal.SIGTERM), (now + 2 * _GRACE, signal.SIGKILL)]
                    else:  # whoever asks twice does not want to wait
                        steps = [(now, signal.SIGKILL)]
                    stops_seen = stops
                elif self._restarts.fate is not Fate.GOES_ON and not steps:
                    failed = self._restarts.fate is Fate.FAILED
                    told = now + failed * (_SAVING if self._restarts.too_few else _NOTICE)
                    steps = [(told, signal.SIGTERM), (told + _GRACE, signal.SIGKILL)]
                while steps and steps[0][0] <= now:
                    self._signal_all(steps.pop(0)[1])
                    if not steps:
                        steps = [(now + _GRACE, signal.SIGKILL)]

    def _let_output_end(self) -> None:
        """Wait for output that is read slowly, unless the launcher is told to stop."""
        deadline = time.monotonic() + _LAST_OUTPUT
        for copier in self._copiers:
            while copier.is_alive():
                copier.join(0.02)
                late = time.monotonic() > deadline
                if late and (self._stop_signal or not copier.is_behind()):
                    break

    def _ended(self, each: _Rank) -> None:
        # What it started must not outlive it. Its group is its own; until the rank is reaped no
        # other process can have its number.
        _signal_group(each.process.pid, signal.SIGKILL)
        code = each.process.wait()
        del self._alive[each.rank]
        if self._terminal.take_back(each.process.pid) and code == -signal.SIGINT:
            self._on_signal(signal.SIGINT, None)  # Ctrl-C is for all, whoever had the terminal

    def _settle(self, ended: Sequence[_Rank], now: float) -> None:
        """Decide what the ends mean for the job. Under --elastic say what no later line says."""
        restarts, went_on = self._restarts, self._restarts.fate is Fate.GOES_ON
        seen = self._seen(ended)
        restarts.settle(seen, self._seen(self._alive.values()), now)
        if restarts.too_few:
            self._store.put(TOO_FEW_KEY)
        if restarts.fate is Fate.DONE:
            for each in self._seen(self._alive.values()):
                self._say(f"{self._named(each)} had not joined when the others ended: it is ended")
        if not went_on or (restarts.fate is Fate.FAILED and not restarts.reason):
            return
        for each in seen:
            if not each.code:
                continue
            elif each.rank not in restarts.planned:
                self._say(f"{self._end_of(each)}; its place stays empty")
            elif not each.joined:
                delay = restarts.planned[each.rank] - now
                self._say(
                    f"{self._end_of(each)} before it had joined; another process starts in "
                    f"{delay:g} s"
                )

    def _seen(self, ranks: Iterable[_Rank]) -> list[Process]:
        elastic, found = ENV_ELASTIC in self._env, []
        for each in ranks:
            pid, code = each.process.pid, each.process.returncode or 0
            joined = elastic and self._store.has(joined_key(pid))
            found.append(Process(each.rank, pid, joined, code))
        return found

    def _report(self) -> int:
        """Name the rank that failed first and not because of another's failure."""
        failures, reason = self._restarts.failures, self._restarts.reason
        own = [each for each in failures if not self._store.has(followed_key(each.pid))]
        first = (own or failures)[0]
        self._say(f"{self._end_of(first)}; the job has ended{reason and f': {reason}'}")
        code = first.code
        return 128 - code if code < 0 else code

    def _named(self, process: Process) -> str:
        return f"rank {process.rank} of {self._size} (pid {process.pid})"

    def _end_of(self, process: Process) -> str:
        """Return how a process has ended, in words."""
        code = process.code
        if code < 0:  # those for real time have no name
            name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        how = f"was ended by {name}" if code < 0 else f"ended with status {code}"
        return f"{self._named(process)} {how}"

    def _say(self, text: str) -> None:
        """Write a line to stderr; among what copiers write there, as one of them."""
        line, sink = f"pycollective run: {text}\n", self._sinks[1]
        with suppress(OSError):
            if isinstance(sink, Sink):
                sink.write(line.encode())
            elif sink is None:  # a terminal
                print(line, end="", file=sys.stderr, flush=True)

    def _signal_all(self, number: int) -> None:
        self._ending = True
        self._restarts.planned.clear()
        for each in self._alive.values():
            _signal_group(each.process.pid, number)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return  # all of it has ended


def _prepare(parent: int, core: int | None) -> Callable[[], None]:
    """Return what the child runs first: it gets its own group, SIGKILL with its parent, its core.

    Nothing here imports, or takes a lock that Python does not free in a child: the launcher may
    have threads when it forks. It forks from its main thread: with that one the child shall die.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up before: the loader's lock may be another thread's

    def prepare() -> None:
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)
        if core is not None:
            os.sched_setaffinity(0, {core})

    return prepare
