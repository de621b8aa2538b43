"""Copies ranks' output to the launcher's own streams, each line in one piece.

Ranks write unbuffered, so a line and its end are two writes, and another rank's could come between.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from pycollective.errors import ConfigurationError

# Seconds after which the beginning of a line goes out by itself: a prompt, a progress bar.
_SLOW_LINE = 1.0
_LONG_LINE = 1 << 16  # bytes that are a line, whatever they are
_LEFT_OVER = 1 << 20  # bytes; more than a pipe usually holds


class Sink:
    """One of the launcher's own streams, to which output goes. Thread-safe.

    Attributes:
        place: the file, pipe or terminal behind the stream.
        lock: held for a whole write.
        tagged: whether each line begins with its rank.
    """

    def __init__(self, stream: TextIO, tagged: bool) -> None:
        stream.flush()
        self.tagged = tagged
        self._fd = stream.fileno()
        where = os.fstat(self._fd)
        self.place = where.st_dev, where.st_ino
        self.lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Write all of it in one piece; wait as long as its reader does.

        Raises:
            OSError: nobody reads it any more.
        """
        with self.lock:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:
                    _wait(self._fd, select.POLLOUT)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal; a closed one is not."""
    with suppress(ValueError):
        return stream is not None and stream.isatty()
    return False


def sink_of(stream: TextIO | None, copied: bool, tagged: bool | None) -> Sink | int | None:
    """Return where ranks' output goes: a sink, or `subprocess`'s DEVNULL, or None for the stream.

    Programs on a terminal send whole lines themselves, and want to know that it is one. So they get
    the terminal itself, unless all is to be copied.

    Args:
        stream: one of the launcher's own.
        copied: copy its output also where it is a terminal.
        tagged: whether lines begin with their rank; None: unless it is a terminal.
    """
    with suppress(OSError, ValueError, AttributeError):  # closed, or none of the system's
        if stream is not None:
            terminal = is_terminal(stream)
            if terminal and not copied:
                return None
            return Sink(stream, not terminal if tagged is None else tagged)
    return subprocess.DEVNULL  # else a file that a rank opens would be its stderr


def sinks_of(
    streams: Iterable[TextIO | None], copied: bool, tagged: bool | None
) -> list[Sink | int | None]:
    """Return the sink of each stream.

    Streams that lead to one place, such as a pipe behind ``2>&1``, share a lock: a pipe takes long
    lines piecemeal, so each write must wait for the one before.
    """
    sinks = [sink_of(stream, copied, tagged) for stream in streams]
    locks: dict[tuple[int, int], threading.Lock] = {}
    for sink in sinks:
        if isinstance(sink, Sink):
            sink.lock = locks.setdefault(sink.place, sink.lock)
    return sinks


def make_log_dir(folder: Path) -> None:
    """Make the folder that `open_logs` fills, if it is not there.

    Raises:
        ConfigurationError: it cannot be made, or holds something: no run writes over another's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(
                f"--log-dir {folder} is not empty, and may hold another run's output: name a new "
                "folder"
            )
    except OSError as error:
        raise ConfigurationError(f"--log-dir {folder}: {error.strerror}") from error


def open_logs(folder: Path, rank: int, number: int) -> tuple[BinaryIO, BinaryIO]:
    """Open the files of a rank's stdout and stderr, named as torchrun names them.

    Args:
        folder: that `make_log_dir` made.
        rank: whose.
        number: of the process; 0 is the rank's first, and later ones have it in the files' names.

    Raises:
        ConfigurationError: they cannot be made.
    """
    own, ending = folder / str(rank), f".{number}.log" if number else ".log"
    try:
        own.mkdir(exist_ok=number > 0)
        return (own / f"stdout{ending}").open("xb"), (own / f"stderr{ending}").open("xb")
    except OSError as error:
        raise ConfigurationError(f"--log-dir {own}: {error.strerror}") from error


class Copier(threading.Thread):
    """Copies one rank's output until the rank closes it.

    Args:
        source: the pipe that the rank writes to; the copier's own from now on.
        sink: where its lines go; None for nowhere.
        rank: stands before each line, in brackets, where the sink is tagged.
        log: gets the output as it comes; the copier's own from now on.
    """

    error: OSError | None = None  # why output is lost; a reader that has gone is no error

    def __init__(self, source: int, sink: Sink | None, rank: int, log: BinaryIO | None) -> None:
        # A daemon: what a rank has started in another session may hold its output open.
        super().__init__(name="pycollective-output", daemon=True)
        self._source, self._sink, self._log = source, sink, log
        self._tag = f"[{rank}] ".encode() if sink and sink.tagged else b""
        self._torchs_tag = re.compile(rb"^\[rank%d\]: ?" % rank)  # of an uncaught exception
        self._begun = b""  # the beginning of a line
        self._busy = False  # output that was read is on its way
        self._left: int | None = None  # bytes that it still reads once the rank has ended

    def run(self) -> None:
        """Copy until the end."""
        try:
            for line in self._lines():
                if self._sink:
                    if self._tag:
                        line = self._tag + self._torchs_tag.sub(b"", line).rstrip(b"\n") + b"\n"
                    self._sink.write(line)
        except BrokenPipeError:  # nobody reads: the rank is told by a closed pipe
            pass
        except OSError as error:
            self.error = error
        finally:
            os.close(self._source)
            self._close_log()

    def _keep(self, output: bytes) -> None:
        """Write to the log at once: a rank that hangs may have begun a line."""
        if self._log is None:
            return
        try:
            self._log.write(output)
            self._log.flush()
        except OSError as error:  # as of a full disk: the rank goes on, and its lines are shown
            self.error = OSError(error.errno, error.strerror, self._log.name)
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with suppress(OSError):  # said before: the same bytes are written once more
                self._log.close()
            self._log = None

    def is_behind(self) -> bool:
        """Return whether output is still to go out, after the rank has ended."""
        if self._left is None:
            self._left = _LEFT_OVER
        if not self.is_alive():
            return False
        with suppress(OSError):
            return bool(self._busy or self._begun or _wait(self._source, select.POLLIN, 0))
        return False

    def _lines(self) -> Iterator[bytes]:
        slow = 0.0  # when the beginning of a line goes out by itself
        while self._left is None or self._left > 0:
            # A tagged beginning waits until the rank has ended, and cannot go on with the line.
            seconds = max(0.0, slow - time.monotonic()) if self._begun else None
            if _wait(self._source, select.POLLIN, seconds):
                self._busy = True
                more = os.read(self._source, _LONG_LINE)
                self._keep(more)
                if self._left is not None:
                    self._left -= len(more)
                *lines, rest = (self._begun + more).split(b"\n")
                if lines or not self._begun:
                    slow = time.monotonic() + _SLOW_LINE
                self._begun = rest
                yield from (line + b"\n" for line in lines)
                if not more or len(rest) >= _LONG_LINE:
                    yield from self._by_itself()
                self._busy = False
                if not more:
                    return
            elif self._tag and self._left is None:
                slow = time.monotonic() + _SLOW_LINE
            else:
                yield from self._by_itself()
        yield from self._by_itself()

    def _by_itself(self) -> Iterator[bytes]:
        """Yield the beginning of a line."""
        if self._begun:
            yield self._begun
            self._begun = b""


def _wait(fd: int, events: int, seconds: float | None = None) -> bool:
    """Return whether it can be read or written, or is closed, within the time if limited."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))
