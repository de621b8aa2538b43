"""Order-sensitive inputs and the reference's answer, where every library's ranks can read them."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import reference
from pycollective.bench.operations import Operation
from pycollective.bench.ranks.case import Case
from pycollective.testing.inputs import leaves

# Longer messages repeat the first PERIOD elements. A prime, so that no power-of-two piece of a
# message equals another, and a piece put in the wrong place is still seen.
PERIOD = 1_048_573


class Problem:
    """The buffers of one `Case`: each rank's initial one, and the answer, in anonymous memory.

    Ranks read it as the file `path`, rows of `case.size` bytes: the initial buffer of each rank, in
    rank order, then the reference's answer. The buffer of a rank without input starts as garbage.
    The memory goes back with `close`, or with this process.
    """

    def __init__(self, operation: Operation, case: Case, ranks: int, seed: int) -> None:
        self._descriptor = os.memfd_create("pycollective-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, (ranks + 1) * case.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        with mmap.mmap(self._descriptor, (ranks + 1) * case.size) as shared:
            rows = np.frombuffer(shared, np.uint8).reshape(ranks + 1, case.size)
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
    if operation.sharded:
        for rank, leaf in enumerate(inputs):
            own = case.shard(rank, ranks)
            _tile(rows[rank][own], leaf)
            _tile(answer[own], leaf)
        return
    _tile(rows[case.root], inputs[case.root])
    _tile(answer, inputs[case.root])


def _tile(target: NDArray[np.uint8], values: NDArray[Any]) -> None:
    """Fill `target` with the bytes of `values`, again and again."""
    source = np.ascontiguousarray(values).view(np.uint8)
    for start in range(0, len(target), len(source)):
        piece = target[start : start + len(source)]
        piece[:] = source[: len(piece)]
