"""Process groups made and destroyed over and over: what of peers that are gone is let go of."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pycollective.torch  # noqa: F401  registers the backend
from tests.harness import results, run_ranks, thread_names

ROUNDS = 60
ROOM = 1024  # KiB


def footprint():
    """Open files, mappings of shared memory, threads of ours, and KiB of shared memory mapped."""
    maps = Path("/proc/self/maps").read_text().count("memfd:pycollective")
    status = Path("/proc/self/status").read_text()
    shared = int(status.split("RssShmem:")[1].split()[0])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "maps": maps,
        "threads": sum(name.startswith("pycoll") for name in thread_names().values()),
        "KiB": shared,
    }


def settled(bounds=None, limit=20.0):
    """The footprint once it is within `bounds`, or, without any, once it stays as it is for a
    while: threads that are ending take what time they need. Whatever it is at the limit."""
    deadline = time.monotonic() + limit
    seen, since = footprint(), time.monotonic()
    while time.monotonic() < deadline:
        if bounds is None:
            if time.monotonic() - since > 0.2:
                break
        elif all(seen[what] <= bound for what, bound in bounds.items()):
            break
        time.sleep(0.01)
        now = footprint()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def rounds(_, path):
    """Rank 2 comes with new shared memory each time; that of ranks 0 and 1 lives on in what they
    keep of the round before."""
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    kept = []
    seen = []
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
            seen.append(settled())
        elif turn == ROUNDS - 1:
            seen.append(settled({**seen[0], "KiB": seen[0]["KiB"] + ROOM}))
    return seen, len(kept)


def test_many_rounds_leave_nothing_whatever_is_kept(tmp_path):
    for rank, ((early, late), kept) in enumerate(
        results(run_ranks(rounds, 3, str(tmp_path), join=False))
    ):
        assert kept == (0 if rank == 2 else 3)
        assert late["files"] <= early["files"]
        assert late["maps"] <= early["maps"]
        assert late["threads"] <= early["threads"]
        assert late["KiB"] <= early["KiB"] + ROOM
