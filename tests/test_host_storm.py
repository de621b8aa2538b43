"""Calls on one host in any order, by every path, that end at any moment: a call that is done has
what it should have, whatever its callers then do with their arrays, and one error ends all."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from tests.harness import Ranks, await_

MOST = 300_000  # elements of a shard; with shared arrays of five ranks also beyond 4 MiB


def leaf(number, rank, count):
    """Of no other call and no other rank; sums of it wrap."""
    return np.arange(count, dtype=np.int32) * np.int32(2 * number + 1) + np.int32(rank << 24)


def leaves(number, size, count):
    return [leaf(number, rank, count) for rank in range(size)]


class Caller:
    """A rank's calls. What all ranks draw is alike; where a rank's arrays lie it draws alone."""

    def __init__(self, comm, seed):
        self.comm, self.size, self.rank = comm, comm.size, comm.rank
        self.alike, self.own = random.Random(seed), random.Random(f"{seed} {comm.rank}")
        most = self.size * MOST + 16
        self.places = [
            [np.empty(most, np.int32), comm.empty(most, np.int32)] for _ in ("input", "output")
        ]

    def array(self, which, values):
        """An array with these values: the rank's own or a shared one, from anywhere on."""
        first = self.own.randrange(16)
        array = self.own.choice(self.places[which])[first : first + values.size]
        array[:] = values
        return array

    def call(self, number):
        """One call, or some in flight; looks at what it has made."""
        count = int(MOST ** self.alike.random())
        root = self.alike.randrange(self.size)
        kind = self.alike.choice([self.in_flight, self.in_a_ring, *[self.collective] * 6])
        kind(number, count, root)

    def in_flight(self, number, count, _):
        count %= 3000
        arrays = [leaf(number + each, self.rank, count) for each in range(30)]
        works = [self.comm.all_reduce(array, async_op=True) for array in arrays]
        for each, (work, array) in enumerate(zip(works, arrays, strict=True)):
            work.wait()
            self.check("all_reduce", array, sum(leaves(number + each, self.size, count)))

    def in_a_ring(self, number, count, _):
        x = self.array(0, leaf(number, self.rank, count))
        out = self.array(1, np.zeros(count, np.int32))
        work = self.comm.send(x, (self.rank + 1) % self.size, async_op=True)
        self.comm.recv(out, before := (self.rank - 1) % self.size)
        self.check("recv", out, leaf(number, before, count))
        work.wait()
        x[:] = -1

    def collective(self, number, count, root):
        name = self.alike.choice(
            [
                *("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
                *("gather", "scatter", "all_to_all"),
            ]
        )
        size, rank, is_root = self.size, self.rank, self.rank == root
        whole = size * count
        is_whole = name in ("reduce_scatter", "scatter", "all_to_all")
        x = self.array(0, leaf(number, rank, whole if is_whole else count))
        makes_whole = name in ("all_gather", "gather", "all_to_all")
        out = self.array(1, np.full(whole if makes_whole else count, -7, np.int32))
        mine = slice(rank * count, (rank + 1) * count)
        if name == "all_reduce":
            out, want = self.comm.all_reduce(x), sum(leaves(number, size, count))
        elif name == "broadcast":
            out, want = self.comm.broadcast(x, root), leaf(number, root, count)
        elif name == "reduce_scatter":
            self.comm.reduce_scatter(out, x)
            want = sum(leaves(number, size, whole))[mine]
        elif name == "scatter":
            self.comm.scatter(out, x if is_root else None, root)
            want = leaf(number, root, whole)[mine]
        elif name == "gather":
            self.comm.gather(out if is_root else None, x, root)
            want = np.concatenate(leaves(number, size, count)) if is_root else np.int32(-7)
        elif name == "all_gather":
            self.comm.all_gather(out, x)
            want = np.concatenate(leaves(number, size, count))
        else:
            self.comm.all_to_all(out, x)
            want = np.concatenate([each[mine] for each in leaves(number, size, whole)])
        if out is not x:
            x[:] = -1  # the caller's again
        self.check(name, out, want)

    def check(self, name, out, want):
        assert (out == want).all(), f"{name} of {out.size} elements is done, and wrong"


def call_until_the_end(comm, folder, seed, end, culprit):
    """The error that ends the calls."""
    caller = Caller(comm, seed)
    last = caller.alike.randrange(40)
    if end == "timeout":
        comm.timeout = 0.5
    number = 0
    try:
        (folder / str(comm.rank)).touch()
        while True:
            if number == last and end == "mismatch":
                count = int(MOST ** caller.alike.random())
                comm.all_reduce(np.ones(count + (comm.rank == culprit), np.int32))
            if number == last and comm.rank == culprit:
                if end == "close":
                    return comm.close()
                if end == "abort":
                    comm.abort("it had enough")
            caller.call(1000 * number)
            number += 1
    except KeyboardInterrupt as error:
        if comm.failure is None:  # between two calls
            comm.abort("an interrupt")
        return type(error)
    except pc.CollectiveError as error:
        return type(error)
    finally:
        for each in caller.places:
            each[0][:] = each[1][:] = -2  # who still reads them must not call that a result
        (folder / f"{comm.rank} has ended").touch()


# What the culprit gets, and the others.
ENDS = {
    "kill": (None, pc.PeerFailure),
    "interrupt": (KeyboardInterrupt, pc.CollectiveAborted),
    "timeout": (pc.CollectiveTimeout, pc.CollectiveTimeout),
    "mismatch": (pc.CollectiveMismatch, pc.CollectiveMismatch),
    "abort": (pc.CollectiveAborted, pc.CollectiveAborted),
    "close": (None, pc.PeerFailure),
}


def harm(pid, end, others, choose):
    """From outside, at some moment."""
    time.sleep(choose.random() * 0.1)
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    elif end == "interrupt":
        os.kill(pid, signal.SIGINT)
    elif end == "timeout":
        os.kill(pid, signal.SIGSTOP)
        try:
            await_(lambda: all(each.exists() for each in others))
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.storm
@pytest.mark.parametrize("turn", range(15))
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("end", ENDS)
def test_calls_that_end_at_any_moment(tmp_path, end, size, turn):
    choose = random.Random(seed := f"{end} {size} {turn}")
    culprit = choose.randrange(size)
    with Ranks(size, module=__name__) as ranks:
        pid = ranks.joined().pids[culprit]

        def look():
            await_(lambda: all((tmp_path / str(rank)).exists() for rank in range(size)))
            others = [tmp_path / f"{rank} has ended" for rank in range(size) if rank != culprit]
            harm(pid, end, others, choose)

        thread = threading.Thread(target=look)
        thread.start()
        outcomes = ranks.call(call_until_the_end, tmp_path, seed, end, culprit)
        thread.join()
    of_culprit, of_others = ENDS[end]
    for each in outcomes:
        if each.rank == culprit and end == "kill":
            assert each.exit_code == -signal.SIGKILL
            continue
        assert each.error is None, each.error
        assert each.result is (of_culprit if each.rank == culprit else of_others), each
