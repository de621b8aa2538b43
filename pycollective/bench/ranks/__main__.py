"""One rank: obeys the driver until the channel closes.

Usage: python -m ranks LIBRARY ADDRESS [RANK RANKS], the last two where no MPI gives them.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import numpy as np

from .case import Bytes, Case, Library, Prepared, Unsupported
from .channel import Channel, ChannelClosed, connect
from .start_line import StartLine


class RankProcess:
    """Carries out the driver's commands: one method each, named as the command."""

    def __init__(self, library: Library, rank: int, ranks: int) -> None:
        self._library, self._rank, self._ranks = library, rank, ranks
        self._start_line: StartLine | None = None
        self._case: Case | None = None
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._initial: Bytes = self._buffer
        self._expected: Bytes = self._buffer
        self._prepared: dict[str, Prepared] = {}

    def start_line(self, path: str) -> dict[str, Any]:
        """Where this group's ranks wait for each other."""
        self._start_line = StartLine(path, self._rank, self._ranks)
        return {}

    def load(self, case: dict[str, Any], path: str) -> dict[str, Any]:
        """Take on a problem: its file holds each rank's initial buffer, then the answer."""
        self._prepared.clear()
        self._case = Case(**case)
        size = self._case.size
        rows = np.memmap(path, np.uint8, "r", shape=(self._ranks + 1, size))
        self._initial = rows[self._rank]
        self._expected = rows[self._ranks][self._case.result(self._rank, self._ranks)]
        self._buffer = _aligned(size)
        return {}

    def prepare(self, variant: str) -> dict[str, Any]:
        """Make the call; say why not, where the library has none."""
        assert self._case is not None, "load comes first"
        try:
            prepared = self._library.prepare(self._case, variant, self._buffer)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        self._prepared[variant] = prepared
        return {}

    def check(self, variant: str) -> dict[str, Any]:
        """Run what is timed once, and count the elements whose bits are not the oracle's."""
        assert self._case is not None, "load comes first"
        prepared = self._prepared[variant]
        self._restore()
        self._wait()
        if prepared.time is not None:
            prepared.time(1)
        else:
            prepared.call()
        bits = np.dtype(f"u{self._case.item_size}")
        return {
            "wrong": int(np.count_nonzero(prepared.result.view(bits) != self._expected.view(bits)))
        }

    def run(self, variant: str, blocks: int, calls: int) -> dict[str, Any]:
        """Time `blocks` blocks of `calls` calls; each starts together, on restored inputs."""
        prepared = self._prepared[variant]
        call, clock = prepared.call, time.perf_counter
        seconds = []
        for _ in range(blocks):
            self._restore()
            self._wait()
            if prepared.time is not None:
                seconds.append(prepared.time(calls) / calls)
                continue
            start = clock()
            for _ in range(calls):
                call()
            seconds.append((clock() - start) / calls)
        return {"seconds": seconds}

    def _restore(self) -> None:
        np.copyto(self._buffer, self._initial)

    def _wait(self) -> None:
        assert self._start_line is not None, "start_line comes first"
        self._start_line.wait()


def _aligned(size: int) -> Bytes:
    """A zeroed buffer that starts a page: alignment is one thing less that could differ."""
    page = 4096
    raw = np.zeros(size + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + size]


def _open_library(arguments: list[str]) -> tuple[Library, Channel]:
    """The library named on the command line, its group formed; and the channel to the driver."""
    name, address = arguments[:2]
    if name == "mpi":
        from .library_mpi import MpiLibrary

        mpi = MpiLibrary()  # first: only MPI knows which rank this is
        channel = connect(address)
        channel.send({"rank": mpi.rank})
        return mpi, channel
    rank, ranks = int(arguments[2]), int(arguments[3])
    channel = connect(address)
    channel.send({"rank": rank})

    def request(message: dict[str, Any]) -> dict[str, Any]:
        channel.send(message)
        return channel.receive()

    if name == "own":
        from .library_own import OwnLibrary

        return OwnLibrary(rank, ranks, request), channel
    from .library_torch import TorchLibrary

    return TorchLibrary(name, rank, ranks, request), channel


def main() -> None:
    """Serve until the driver closes the channel.

    An exception ends the rank with its traceback; the driver sees the channel close, quotes the
    traceback, and ends the group.
    """
    library, channel = _open_library(sys.argv[1:])
    process = RankProcess(library, library.rank, library.ranks)
    channel.send({"versions": library.versions})
    # A collection in the middle of a block would be timed; nothing here makes cycles.
    gc.disable()
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            # Not through the libraries' exit handlers: those may wait for ranks that have gone.
            os._exit(1)
        command = message.pop("command")
        if command == "close":
            library.close()
            channel.send({})
            return
        channel.send(getattr(process, command)(**message))


if __name__ == "__main__":
    main()
