"""More elements than 32 bits count, through little memory."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective.host_memory import headroom
from tests.harness import committed, results, run_ranks

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
    """Whether all are; in parts, since the comparison makes an array of its own, and eight at once,
    since that is what takes longest here."""
    end = x.size // 8 * 8
    words, word = x[:end].view(np.uint64), int.from_bytes(bytes([value]) * 8, "little")
    parts = (words[i : i + 8 * MIB] for i in range(0, words.size, 8 * MIB))
    return all((part == word).all() for part in parts) and bool((x[end:] == value).all())


def test_messages_of_several_gib_in_bounded_memory():
    if headroom().bytes < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    for right, bytes_used in results(run_ranks(big, 2, timeout=250.0, operation_timeout=100.0)):
        assert right
        assert bytes_used < 4 * MIB
