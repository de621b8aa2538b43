"""One library's rank processes, as the driver sees them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from pycollective.bench.ranks.channel import Channel, ChannelClosed, ChannelListener
from pycollective.bench.ranks.start_line import StartLine

_START_SECONDS = 120.0  # importing torch on a busy machine takes a while
_CLOSE_SECONDS = 10.0


class RankLost(RuntimeError):
    """A rank process ended or fell silent; the message says whose, and what it wrote last."""


@dataclass(frozen=True)
class Launch:
    """How to start a group.

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
        self._channels: list[Channel] = []
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
        """Send `message` to every rank; their replies, in rank order.

        Raises:
            RankLost: a rank ended, or did not answer within `timeout` seconds.
        """
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(message)
            except ChannelClosed as error:
                raise self._lost(rank) from error
        return self._collect(timeout)

    def end(self) -> None:
        """End what is left of the processes and free everything. Idempotent."""
        for channel in self._channels:
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
            self._channels = self._accept(listener)
        finally:
            listener.close()
        for rank, reply in enumerate(self._collect(_START_SECONDS)):
            if rank == 0:
                self.versions = reply["versions"]
        path = f"/proc/{os.getpid()}/fd/{self._start_line}"
        self.ask({"command": "start_line", "path": path}, _START_SECONDS)

    def _accept(self, listener: ChannelListener) -> list[Channel]:
        channels: dict[int, Channel] = {}
        deadline = time.monotonic() + _START_SECONDS
        while len(channels) < self.ranks:
            channel = listener.accept(timeout=0.2)
            if channel is not None:
                channels[channel.receive()["rank"]] = channel
            elif any(process.poll() is not None for process in self._processes):
                raise self._lost(None)
            elif time.monotonic() > deadline:
                raise self._lost(None, f"not started within {_START_SECONDS:g} s")
        return [channels[rank] for rank in range(self.ranks)]

    def _collect(self, timeout: float) -> list[dict[str, Any]]:
        """One reply from each rank; serves what ranks ask of each other meanwhile."""
        replies: dict[int, dict[str, Any]] = {}
        waiting: list[tuple[int, str]] = []  # ranks that asked for a value not yet set
        deadline = time.monotonic() + timeout
        while len(replies) < self.ranks:
            pending = [rank for rank in range(self.ranks) if rank not in replies]
            ready = self._ready(pending, deadline - time.monotonic())
            if not ready:
                raise self._lost(pending[0], f"no answer within {timeout:g} s")
            for rank in ready:
                try:
                    reply = self._channels[rank].receive()
                    if "get" in reply:
                        waiting.append((rank, reply["get"]))
                    elif "set" in reply:
                        self._values[reply["set"]] = reply["value"]
                        self._channels[rank].send({})
                    else:
                        replies[rank] = reply
                except ChannelClosed as error:
                    raise self._lost(rank) from error
            waiting = [entry for entry in waiting if not self._answer(*entry)]
        return [replies[rank] for rank in range(self.ranks)]

    def _ready(self, pending: list[int], timeout: float) -> list[int]:
        """Those of `pending` that have sent something, within `timeout` seconds."""
        buffered = [rank for rank in pending if self._channels[rank].buffered]
        if buffered:
            return buffered
        channels = {self._channels[rank].fileno(): rank for rank in pending}
        ready, _, _ = select.select(list(channels), [], [], max(timeout, 0))
        return [channels[descriptor] for descriptor in ready]

    def _answer(self, rank: int, key: str) -> bool:
        """Answer a rank's `get`, if the value is there."""
        if key not in self._values:
            return False
        self._channels[rank].send({"value": self._values[key]})
        return True

    def _lost(self, rank: int | None, what: str = "ended") -> RankLost:
        """The error for a rank that is gone, with the last lines that its group wrote."""
        for process in self._processes:  # let a dying process finish its traceback
            if rank is not None:
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    break
        self._written.seek(0)
        lines = self._written.read().decode(errors="replace").strip().splitlines()
        who = "a rank" if rank is None else f"rank {rank}"
        tail = "\n  ".join(lines[-12:]) or "(nothing)"
        return RankLost(f"{who} of {self.name}: {what}; its group wrote\n  {tail}")
