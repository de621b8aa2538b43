"""Copies straight from another rank's memory, and where Linux refuses them: the same bits."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import pycollective as pc
from tests import seccomp
from tests.harness import Ranks, asleep, await_, results, run_ranks

COUNT = 200_000  # of a shard


def shard(rank, target=0):
    return np.arange(COUNT, dtype=np.int32) * 7 + 1000 * rank + target


def move(comm, refused):
    """Moves in every way; the rank `refused` may not read another's memory."""
    if comm is None:
        if os.environ["PYCOLLECTIVE_RANK"] == str(refused):
            seccomp.refuse(seccomp.PROCESS_VM_READV)
        comm = pc.init()
    move_in_each_way(comm)
    comm.close()


def move_in_each_way(comm):
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


def test_ranks_that_read_each_other():
    results(run_ranks(move, 3, None))


def move_often(comm):
    """Moves until rank 0 has tried both paths several times, and may have changed its mind."""
    for _ in range(80):
        move_in_each_way(comm)
    comm.close()


def test_ranks_choose_one_path():
    results(run_ranks(move_often, 3))


def test_one_rank_that_may_not_read_costs_all_only_time():
    try:
        results(run_ranks(move, 3, 1, join=False))
    except OSError as error:
        pytest.skip(f"no seccomp filter can be installed here: {error}")


LARGE = 8 << 20  # elements: nearly all the time goes into copies


def give_until_failure(comm, folder, name, ends):
    """The error of rank 0, which is read from and gives up, and of rank 1, which reads."""
    x, out = np.ones(LARGE, np.int32), np.zeros(2 * LARGE, np.int32)
    if comm.rank == 0 and ends == "timeout":
        comm.timeout = 0.3
    call = {
        "all_gather": lambda: comm.all_gather(out, x),
        "send": lambda: comm.recv(out[:LARGE], 0) if comm.rank else comm.send(x, 1),
    }[name]
    while True:
        out[:] = 0
        try:
            call()
        except (pc.CollectiveError, KeyboardInterrupt) as error:
            x[:] = 2  # it is the caller's again
            (folder / f"{comm.rank} has raised").touch()
            return type(error)
        if comm.rank == 1:
            assert (out[:LARGE] == 1).all(), "a message that is torn, and called done"
        (folder / f"{comm.rank} is at it").touch()


@pytest.mark.parametrize("ends", ["interrupt", "timeout"])
@pytest.mark.parametrize("name", ["all_gather", "send"])
def test_who_gives_up_while_it_is_read_from_takes_nothing_back(tmp_path, name, ends):
    """The reader stands still in its copy until the other's memory has changed."""
    with Ranks(2, module=__name__) as ranks:
        pids = ranks.joined().pids

        def end():
            await_((tmp_path / "1 is at it").exists)
            os.kill(pids[1], signal.SIGSTOP)
            try:
                await_(lambda: asleep(pids[0]))
                if ends == "interrupt":
                    os.kill(pids[0], signal.SIGINT)
                await_((tmp_path / "0 has raised").exists)
            finally:
                os.kill(pids[1], signal.SIGCONT)

        thread = threading.Thread(target=end)
        thread.start()
        giver, reader = results(ranks.call(give_until_failure, tmp_path, name, ends))
        thread.join()
    told = {
        "interrupt": (KeyboardInterrupt, pc.CollectiveAborted),
        "timeout": (pc.CollectiveTimeout, pc.CollectiveTimeout),
    }
    assert (giver, reader) == told[ends]
