"""More elements than 32 bits count, through little memory."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective.host_memory import headroom
from tests.harness import committed, results, run_ranks

MIB = 1 << 20


def big(comm, operation):
    x = np.full(2**31 + 17, comm.rank + 1, np.uint8)
    if operation == "all_reduce":
        comm.all_reduce(x)
        right = _all(x, 3)
    else:
        comm.broadcast(x[: 2**31 + 5], root=0)
        right = _all(x[: 2**31 + 5], 1) and _all(x[2**31 + 5 :], comm.rank + 1)
    return right, committed(comm)


def _all(x, value):
    """Whether all are; in parts, since the comparison makes an array of its own, and eight at once,
    since that is what takes longest here."""
    end = x.size // 8 * 8
    words, word = x[:end].view(np.uint64), int.from_bytes(bytes([value]) * 8, "little")
    parts = (words[i : i + 8 * MIB] for i in range(0, words.size, 8 * MIB))
    return all((part == word).all() for part in parts) and bool((x[end:] == value).all())


@pytest.mark.storm
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_messages_of_several_gib_in_bounded_memory(operation):
    if headroom().bytes < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    outcomes = run_ranks(big, 2, operation, timeout=250.0, operation_timeout=100.0)
    for right, bytes_used in results(outcomes):
        assert right
        assert bytes_used < 4 * MIB
