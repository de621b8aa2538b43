"""One library's rank processes, as the driver sees them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from pycollective.bench.ranks.channel import Channel, ChannelClosed, ChannelListener, StartLine
from pycollective.cores import cores_of
from pycollective.errors import ConfigurationError

_START_SECONDS = 120.0  # importing torch on a busy machine takes a while
_CLOSE_SECONDS = 10.0
# After a rank has failed, for the others to say so too: which was first, and whether all say it.
_SETTLE_SECONDS = 0.2
# After a rank has refused a call, for the others to refuse it too; else they wait for it in it.
_REFUSE_SECONDS = 10.0


class RankLost(RuntimeError):
    """A rank process failed, ended or fell silent; the message says whose, and what it wrote."""


@dataclass(frozen=True)
class Launch:
    """The commands that start a group.

    Attributes:
        commands: one a process to start: one a rank, or a single mpiexec. ``{address}`` in an
            argument becomes the address of the control channel.
        environment: of those processes, whole.
        settings: what was set for this library, in words, for the record.
    """

    commands: list[list[str]]
    environment: dict[str, str]
    settings: str


class Group:
    """The ranks of one library, started on entry and ended on exit of a `with` block."""

    def __init__(self, name: str, ranks: int, launch: Launch) -> None:
        self.name = name
        self.ranks = ranks
        self.settings = launch.settings
        self.versions: dict[str, str] = {}
        self._launch = launch
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, Channel] = {}  # by rank
        self._failures: dict[int, dict[str, Any]] = {}  # what ranks have failed of, by rank
        self._values: dict[str, Any] = {}  # what ranks set for each other while they start
        self._written: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by end()
        self._start_line = os.memfd_create("pycollective-bench-start", os.MFD_CLOEXEC)
        os.ftruncate(self._start_line, StartLine.bytes(ranks))

    def __enter__(self) -> Group:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._channels:
                self.ask({"command": "close"}, _CLOSE_SECONDS)
                for process in self._processes:
                    # All is measured: one that lingers is no failure, `end` ends it.
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_CLOSE_SECONDS)
        finally:
            self.end()

    def ask(self, message: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Send `message` to every rank; return their replies, in rank order.

        Raises:
            ConfigurationError: a rank has raised one, or refused alone what the others do.
            RankLost: a rank has failed or ended, or did not answer within `timeout` seconds.
        """
        for rank in range(self.ranks):
            try:
                self._channels[rank].send(message)
            except ChannelClosed as error:
                raise self._lost(rank) from error
        return self._collect(timeout)

    def end(self) -> None:
        """End what is left of the processes and free everything. Idempotent."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec passes it on to its ranks
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()
        self._written.close()
        if self._start_line >= 0:
            os.close(self._start_line)
            self._start_line = -1

    def _start(self) -> None:
        listener = ChannelListener()
        try:
            for command in self._launch.commands:
                self._processes.append(
                    subprocess.Popen(
                        [part.replace("{address}", listener.address) for part in command],
                        env=self._launch.environment,
                        cwd="/",  # `-m` imports from there first: nothing of the user's
                        stdin=subprocess.DEVNULL,
                        stdout=self._written,
                        stderr=self._written,
                        # A process group of its own: Ctrl-C reaches the driver alone, which ends
                        # these. Not a session: Linux schedules each as a unit of its own, and
                        # Gloo's threads then wake up to five times later.
                        preexec_fn=os.setpgrp,
                    )
                )
            self._accept(listener)
        finally:
            listener.close()
        for rank, reply in enumerate(self._collect(_START_SECONDS)):
            if rank == 0:
                self.versions = reply["versions"]
        path = f"/proc/{os.getpid()}/fd/{self._start_line}"
        start_line = {"command": "start_line", "path": path, "cores": cores_of(self.ranks)}
        self.ask(start_line, _START_SECONDS)

    def _accept(self, listener: ChannelListener) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._channels) < self.ranks:
            channel = listener.accept(timeout=0.2)
            if channel is not None:
                self._channels[channel.receive()["rank"]] = channel
            elif any(process.poll() is not None for process in self._processes):
                raise self._lost(None)
            elif time.monotonic() > deadline:
                raise self._lost(None, f"not started within {_START_SECONDS:g} s")

    def _collect(self, timeout: float) -> list[dict[str, Any]]:
        """Return one reply from each rank; serve what ranks ask of each other meanwhile."""
        replies: dict[int, dict[str, Any]] = {}
        waiting: list[tuple[int, str]] = []  # ranks that asked for a value not yet set
        refused: int | None = None  # the first that did
        deadline = time.monotonic() + timeout
        while len(replies) < self.ranks:
            pending = [rank for rank in range(self.ranks) if rank not in replies]
            ready = self._ready(pending, deadline - time.monotonic())
            if not ready and refused is not None:
                raise ConfigurationError(
                    f"rank {refused} of {self.name}: {replies[refused]['unsupported']} (rank "
                    f"{pending[0]} does not say so, and waits for it)"
                )
            if not ready:
                raise self._lost(pending[0], f"no answer within {timeout:g} s")
            for rank in ready:
                try:
                    reply = self._channels[rank].receive()
                except ChannelClosed as error:
                    raise self._lost(rank) from error
                if "failed" in reply:
                    self._failures[rank] = reply
                    raise self._lost(rank)
                if "get" in reply:
                    waiting.append((rank, reply["get"]))
                elif "set" in reply:
                    self._values[reply["set"]] = reply["value"]
                    self._send(rank, {})
                else:
                    replies[rank] = reply
                    if "unsupported" in reply and refused is None:
                        refused = rank
                        deadline = min(deadline, time.monotonic() + _REFUSE_SECONDS)
            waiting = [entry for entry in waiting if not self._answer(*entry)]
        return [replies[rank] for rank in range(self.ranks)]

    def _ready(self, some: Collection[int], timeout: float) -> list[int]:
        """Return the ranks among `some` that have sent something, within `timeout` seconds."""
        buffered = [rank for rank in some if self._channels[rank].buffered]
        if buffered:
            return buffered
        channels = {self._channels[rank].fileno(): rank for rank in some}
        ready, _, _ = select.select(list(channels), [], [], max(timeout, 0))
        return [channels[descriptor] for descriptor in ready]

    def _answer(self, rank: int, key: str) -> bool:
        """Answer a rank's `get`, if the value is there."""
        if key not in self._values:
            return False
        self._send(rank, {"value": self._values[key]})
        return True

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._channels[rank].send(message)
        except ChannelClosed as error:
            raise self._lost(rank) from error

    def _lost(self, rank: int | None, what: str = "ended") -> ConfigurationError | RankLost:
        """Return the error for a rank that is gone: what it said, or the last lines of its group.

        Of several ranks that say why, the one that failed first is named.
        """
        self._hear_failures()
        if self._failures:
            rank, failure = min(self._failures.items(), key=lambda each: each[1]["at"])
            if failure["failed"] == ConfigurationError.__name__:
                same = [each for each in self._failures.values() if each["text"] == failure["text"]]
                # A mistake that all ranks make alike is the user's, not a rank's.
                who = "" if len(same) == self.ranks else f"rank {rank} of {self.name}: "
                return ConfigurationError(f"{who}{failure['text']}")
            what = f"{failure['failed']}: {failure['text']}"
        for process in self._processes:  # let a dying process finish its traceback
            if rank is not None:
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    break
        self._written.seek(0)
        lines = self._written.read().decode(errors="replace").strip().splitlines()
        whose = "a rank" if rank is None else f"rank {rank}"
        tail = "\n  ".join(lines[-12:]) or "(nothing)"
        return RankLost(f"{whose} of {self.name}: {what}; its group wrote\n  {tail}")

    def _hear_failures(self) -> None:
        """Read what ranks have failed of, and what others say a moment later."""
        open_ones = set(self._channels) - set(self._failures)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while open_ones:
            ready = self._ready(open_ones, deadline - time.monotonic())
            if not ready:
                return
            for rank in ready:
                try:
                    message = self._channels[rank].receive()
                except ChannelClosed:
                    open_ones.remove(rank)
                    continue
                if "failed" in message:
                    self._failures[rank] = message
                    open_ones.remove(rank)
