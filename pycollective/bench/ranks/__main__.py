"""One rank: obeys the driver until the channel closes.

Usage: python -m ranks LIBRARY ADDRESS [RANK RANKS [cuda]], the ranks where no MPI gives them; cuda:
on GPUs.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .case import Buffers, Bytes, Case, HostBuffers, Library, Prepared, Unsupported
from .channel import Channel, ChannelClosed, StartLine, connect

if TYPE_CHECKING:
    from pycollective.testing.places import Gpu


class RankProcess:
    """Carries out the driver's commands: one method each, named as the command."""

    def __init__(
        self, library: Library, rank: int, ranks: int, buffers: Buffers | None = None
    ) -> None:
        self._library, self._rank, self._ranks = library, rank, ranks
        self._buffers = buffers or HostBuffers()
        self._start_line: StartLine | None = None
        self._core: int | None = None
        self._case: Case | None = None
        self._buffer: Any = None
        self._initial: Bytes = np.empty(0, np.uint8)
        self._expected: Bytes = self._initial
        self._prepared: dict[str, Prepared] = {}

    def start_line(self, path: str, cores: list[int]) -> dict[str, Any]:
        """Open the start line, where this group's ranks wait for each other.

        `cores` are those of the ranks: where their calls are timed.
        """
        self._start_line = StartLine(path, self._rank, self._ranks)
        self._core = cores[self._rank]
        return {}

    def load(self, case: dict[str, Any], path: str) -> dict[str, Any]:
        """Take on a problem: its file holds each rank's initial buffer, then the answer."""
        self._prepared.clear()
        self._case = Case(**case)
        size = self._case.buffer
        rows = np.memmap(path, np.uint8, "r", shape=(self._ranks + 1, size))
        self._initial = rows[self._rank]
        self._expected = self._case.expected(rows, self._rank)
        offsets = self._case.offsets
        self._buffer = self._buffers.new(size, offsets[self._rank % len(offsets)])
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
        """Run what is timed once, and count the elements whose bits are not the reference's."""
        prepared = self._prepared[variant]
        self._restore()
        self._wait()
        if prepared.time is not None:
            prepared.time(1)
        else:
            prepared.call()
            prepared.finish()
        return self.left(variant)

    def left(self, variant: str) -> dict[str, Any]:
        """Count the wrong elements that the last call has left, which was this variant's."""
        assert self._case is not None, "load comes first"
        bits = np.dtype(f"u{self._case.item_size}")
        result = self._buffers.read(self._prepared[variant].result).view(bits)
        return {"wrong": int(np.count_nonzero(result != self._expected.view(bits)))}

    def run(self, variant: str, blocks: int, calls: int) -> dict[str, Any]:
        """Time `blocks` blocks of `calls` calls; each starts together, on restored inputs.

        With what they have sent to other hosts, where that is counted: bytes, and bytes unpacked.
        """
        assert self._core is not None, "start_line comes first"
        # This thread alone, and not earlier: a library's own threads run where they like. Pinned
        # too, Gloo's would spin for a lock on the core of the one that holds it.
        os.sched_setaffinity(0, {self._core})
        prepared = self._prepared[variant]
        call, clock = prepared.call, time.perf_counter
        seconds = []
        before = prepared.sent() if prepared.sent else (0, 0)
        for _ in range(blocks):
            self._restore()
            self._wait()
            if prepared.time is not None:
                seconds.append(prepared.time(calls) / calls)
                continue
            start = clock()
            for _ in range(calls):
                call()
            prepared.finish()
            seconds.append((clock() - start) / calls)
        if prepared.sent is None:
            return {"seconds": seconds}
        return {"seconds": seconds, "sent": list(map(operator.sub, prepared.sent(), before))}

    def _restore(self) -> None:
        self._buffers.fill(self._buffer, self._initial)

    def _wait(self) -> None:
        assert self._start_line is not None, "start_line comes first"
        self._start_line.wait()


def _gpu_of(rank: int) -> Gpu:
    """Return this rank's GPU: the host's in turn."""
    from pycollective.device_path import number_of
    from pycollective.testing.places import Gpu

    return Gpu(number_of("cuda", rank))


def _open_library(
    name: str,
    rank: int,
    ranks: int,
    request: Callable[[dict[str, Any]], dict[str, Any]],
    gpu: Gpu | None,
) -> Library:
    """Return the library of that name, its group formed."""
    if name.startswith("own"):
        from .library_own import OwnLibrary

        return OwnLibrary(rank, ranks, request, gpu, shared=name == "own-shared")
    from .library_torch import TorchLibrary

    return TorchLibrary(name, rank, ranks, request, gpu)


def _serve(channel: Channel, library: Library, gpu: Gpu | None, make: type[RankProcess]) -> None:
    """Obey until the driver says close.

    Raises:
        ChannelClosed: the driver has gone.
    """
    buffers = gpu or getattr(library, "buffers", None)
    process = make(library, library.rank, library.ranks, buffers)
    channel.send({"versions": library.versions})
    # A collection in the middle of a block would be timed; nothing here makes cycles.
    gc.disable()
    while True:
        message = channel.receive()
        command = message.pop("command")
        if command == "close":
            library.close()
            channel.send({})
            return
        channel.send(getattr(process, command)(**message))


def _tell_failure(channel: Channel, error: Exception) -> None:
    """Tell the driver why this rank ends, so that it can end the others at once."""
    traceback.print_exception(error)  # into the file from which the driver quotes
    sys.stderr.flush()
    failure = {"failed": type(error).__name__, "text": str(error), "at": time.monotonic()}
    with suppress(ChannelClosed):
        channel.send(failure)


def main(arguments: list[str] | None = None, make: type[RankProcess] = RankProcess) -> None:
    """Serve until the driver closes the channel, by a process of class `make`.

    An exception travels to the driver with its type and text, and ends the rank.
    """
    arguments = arguments or sys.argv[1:]
    name, address = arguments[:2]
    library: Library | None = None
    if name == "mpi":
        from .library_mpi import MpiLibrary

        library = MpiLibrary()  # first: only MPI knows which rank this is
        rank, ranks = library.rank, library.ranks
    else:
        rank, ranks = map(int, arguments[2:4])
    channel = connect(address)

    def request(message: dict[str, Any]) -> dict[str, Any]:
        channel.send(message)
        return channel.receive()

    # After a failure not through the libraries' exit handlers: those may wait for ranks that have
    # gone, or that wait for this one.
    try:
        channel.send({"rank": rank})
        gpu = _gpu_of(rank) if arguments[4:] == ["cuda"] else None
        _serve(channel, library or _open_library(name, rank, ranks, request, gpu), gpu, make)
    except ChannelClosed:
        os._exit(1)
    except Exception as error:
        _tell_failure(channel, error)
        os._exit(1)


if __name__ == "__main__":
    main()
