"""The collectives that are measured, with nccl-tests' definitions, and the inputs of a case."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core, reference
from pycollective.bench.ranks.case import Case
from pycollective.errors import ConfigurationError
from pycollective.testing.inputs import leaves


@dataclass(frozen=True)
class Operation:
    """One collective, for n ranks and a message of `size` bytes.

    `size` is the whole message: where ranks have shards, all shards together, and for all-to-all
    what a rank sends, or receives. As in nccl-tests, `count` is then of one shard.

    Attributes:
        name: as in `Communicator`.
        sharded: the message has a part for each rank.
        reduces: combines numbers, so it has a reduce operation.
        rooted: has a root.
    """

    name: str
    sharded: bool
    reduces: bool
    rooted: bool

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw: the bytes that have to reach a rank, for a byte of `size`."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self.sharded else 1.0

    def touched(self, ranks: int) -> float:
        """Return the bytes that the busiest rank reads or writes of its buffer, for one of `size`.

        What is in place counts once: its own shard, where a rank keeps it.
        """
        if self.name in ("all_reduce", "all_to_all"):
            return 2.0  # each byte is read once and written once
        if self.name == "reduce_scatter":
            return 1 + 1 / ranks
        return self.bus_factor(ranks) if self.rooted else 1.0

    def copied(self, ranks: int) -> tuple[float, int]:
        """Return the bytes that have to reach other ranks, for one of `size`, and how many ranks.

        All ranks receive `bus_factor` of the message, but for the root of broadcast. Of gather and
        scatter each byte reaches one rank.
        """
        if not self.rooted:
            return ranks * self.bus_factor(ranks), ranks
        if not self.sharded:
            return ranks - 1, ranks - 1
        return self.bus_factor(ranks), 1 if self.name == "gather" else ranks - 1

    def whole(self, size: int, item_size: int, ranks: int) -> int:
        """Return `size`, rounded down to equal shards if there are shards.

        Raises:
            ConfigurationError: not whole elements, or less than one element a shard.
        """
        if size % item_size:
            raise ConfigurationError(
                f"{size} bytes are not whole elements of {item_size} bytes: choose -b, -e, -i and "
                "-f so that every size is a multiple"
            )
        if not self.sharded:
            return size
        rounded = size // (item_size * ranks) * (item_size * ranks)
        if rounded == 0:
            raise ConfigurationError(
                f"{self.name} of {size} bytes is less than one element for each of {ranks} ranks: "
                f"start at -b {item_size * ranks} or more"
            )
        return rounded

    def count(self, size: int, item_size: int, ranks: int) -> int:
        """Return the count column: elements of the message, or of one shard."""
        return size // item_size // (ranks if self.sharded else 1)


def bandwidths(operation: Operation, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s, GB = 1e9 bytes."""
    algorithm_bandwidth = size / 1e9 / seconds
    return algorithm_bandwidth, algorithm_bandwidth * operation.bus_factor(ranks)


_TRAITS = {each.name: each for each in _core.operations()}
OPERATIONS = {
    name: Operation(
        name, _TRAITS[name].pieces != "cut", _TRAITS[name].reduces, _TRAITS[name].rooted
    )
    for name in (
        *("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
        *("gather", "scatter", "all_to_all"),
    )
}


def find_operation(name: str) -> Operation:
    """Return the operation called `name`.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in OPERATIONS:
        raise ConfigurationError(f"unknown operation {name!r}; there are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


# Longer messages repeat the first PERIOD elements. A prime, so that no power-of-two piece of a
# message equals another, and a piece put in the wrong place is still seen.
PERIOD = 1_048_573


class Problem:
    """The buffers of one `Case`: each rank's initial one, and the answer, in anonymous memory.

    Ranks read it as the file `path`, rows of `case.buffer` bytes: the initial buffer of each rank,
    in rank order, then the reference's answer. What is no input starts as garbage. The answer of
    all-to-all is in the other ranks' buffers. The memory goes back with `close`, or with this
    process.
    """

    def __init__(self, operation: Operation, case: Case, ranks: int, seed: int) -> None:
        self._descriptor = os.memfd_create("pycollective-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, (ranks + 1) * case.buffer)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        with mmap.mmap(self._descriptor, (ranks + 1) * case.buffer) as shared:
            rows = np.frombuffer(shared, np.uint8).reshape(ranks + 1, case.buffer)
            _fill(rows, operation, case, ranks, seed)
            del rows  # a map with a view of it cannot be closed

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)


def _fill(rows: NDArray[Any], operation: Operation, case: Case, ranks: int, seed: int) -> None:
    garbage = 0xA5
    period = min(PERIOD, case.size // case.item_size)
    inputs = leaves(case.dtype, case.reduce_op, ranks, period, seed)
    answer = rows[ranks]
    if operation.reduces:
        for rank, leaf in enumerate(inputs):
            _tile(rows[rank], leaf)
        _tile(answer, reference.reduce(inputs, case.reduce_op))
        return
    rows[:ranks] = garbage
    if operation.name == "all_to_all":
        for rank, leaf in enumerate(inputs):
            _tile(rows[rank][: case.size], leaf)
        return
    if operation.name in ("broadcast", "scatter"):
        _tile(answer, inputs[case.root])
        rows[case.root] = answer
        return
    for rank, leaf in enumerate(inputs):
        own = case.shard(rank, ranks)
        _tile(rows[rank][own], leaf)
        _tile(answer[own], leaf)


def _tile(target: NDArray[np.uint8], values: NDArray[Any]) -> None:
    """Fill `target` with the bytes of `values`, again and again."""
    source = np.ascontiguousarray(values).view(np.uint8)
    for start in range(0, len(target), len(source)):
        piece = target[start : start + len(source)]
        piece[:] = source[: len(piece)]
