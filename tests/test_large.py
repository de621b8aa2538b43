"""More elements than 32 bits count, through little memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.harness import results, run_ranks
from tests.segments import committed

MIB = 1 << 20


def big(comm):
    x = np.full(2**31 + 17, comm.rank + 1, np.uint8)
    comm.all_reduce(x)
    right = _all(x, 3)
    if comm.rank == 1:
        x[:] = 0
    comm.broadcast(x[: 2**31 + 5], root=0)
    right = right and _all(x[: 2**31 + 5], 3) and _all(x[2**31 + 5 :], 3 * (1 - comm.rank))
    return right, committed(comm)


def _all(x, value):
    """Whether all are; in parts, since the comparison makes an array of its own."""
    return all((x[i : i + 64 * MIB] == value).all() for i in range(0, x.size, 64 * MIB))


def test_messages_of_several_gib_in_bounded_memory():
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    for right, bytes_used in results(run_ranks(big, 2, timeout=100.0)):
        assert right
        assert bytes_used < 4 * MIB
