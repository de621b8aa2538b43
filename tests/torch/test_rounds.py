"""Process groups made and destroyed over and over: what of peers that are gone is let go of."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pycollective.torch  # noqa: F401  registers the backend
from tests.harness import await_, counts, results, run_ranks

ROUNDS = 60
ROOM = 1024  # KiB


def footprint():
    """Threads, open files, mappings of shared memory, and KiB of it."""
    status = Path("/proc/self/status").read_text()
    return *counts(), int(status.split("RssShmem:")[1].split()[0])


def steady():
    """The footprint once it stays as it is: threads that are ending take what time they need."""
    seen = None
    while seen != (seen := footprint()):
        time.sleep(0.2)
    return seen


def rounds(_, path):
    """Rank 2 comes with new shared memory each time; that of ranks 0 and 1 lives on in what they
    keep of the round before."""
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    kept = []
    for turn in range(ROUNDS):
        store = dist.FileStore(f"{path}/{turn}", 3)
        dist.init_process_group("pycollective", store=store, rank=rank, world_size=3)
        world = dist.group.WORLD
        pair = dist.new_group([0, 1])
        # Numbers that grow from round to round, and another sign in the pair: what an earlier call
        # has left is never right.
        mine = rank + 1.0 + 3 * turn
        tensor = torch.full((1 << 16,), mine)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        assert (tensor == 6 + 9 * turn).all()
        if rank < 2:
            tensor = torch.tensor([-mine])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == -(3 + 6 * turn)
        dist.destroy_process_group()
        kept = [] if rank == 2 else [world, pair, work]
        del world, pair, work, store
        if turn == 10:
            most = [each + more for each, more in zip(steady(), (0, 0, 0, ROOM), strict=True)]
    await_(lambda: all(now <= then for now, then in zip(footprint(), most, strict=True)))
    return len(kept)


def test_many_rounds_leave_nothing_whatever_is_kept(tmp_path):
    assert results(run_ranks(rounds, 3, str(tmp_path), join=False)) == [3, 3, 0]
