"""Copies straight from another rank's memory, and where Linux refuses them: the same bits."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pycollective as pc
from tests import seccomp
from tests.harness import results, run_ranks

COUNT = 200_000  # of a shard


def shard(rank, target=0):
    return np.arange(COUNT, dtype=np.int32) * 7 + 1000 * rank + target


def move(comm, refused):
    """Moves in every way; the rank `refused` may not read another's memory."""
    if comm is None:
        if os.environ["PYCOLLECTIVE_RANK"] == str(refused):
            seccomp.refuse(seccomp.PROCESS_VM_READV)
        comm = pc.init()
    ranks, me, root = range(comm.size), comm.rank, comm.size - 1
    mine = shard(me)
    mine.flags.writeable = False
    all_shards = np.concatenate([shard(rank) for rank in ranks])
    whole, one = np.zeros_like(all_shards), np.zeros_like(mine)

    np.testing.assert_array_equal(comm.all_gather(whole, mine), all_shards)
    whole[:] = 0
    comm.gather(whole if me == root else None, mine, root=root)
    np.testing.assert_array_equal(whole, all_shards if me == root else 0)
    for_each = np.concatenate([shard(me, target) for target in ranks])
    comm.all_to_all(whole, for_each)
    np.testing.assert_array_equal(whole, np.concatenate([shard(rank, me) for rank in ranks]))
    comm.scatter(one, for_each if me == root else None, root=root)
    np.testing.assert_array_equal(one, shard(root, me))
    np.testing.assert_array_equal(comm.broadcast(one, root=root), shard(root, root))
    sent = comm.send(mine, (me + 1) % comm.size, async_op=True)
    comm.recv(one, (me - 1) % comm.size)
    np.testing.assert_array_equal(one, shard((me - 1) % comm.size))
    sent.wait()
    comm.close()


def test_ranks_that_read_each_other():
    results(run_ranks(move, 3, None))


def test_one_rank_that_may_not_read_costs_all_only_time():
    try:
        results(run_ranks(move, 3, 1, join=False))
    except OSError as error:
        pytest.skip(f"no seccomp filter can be installed here: {error}")
