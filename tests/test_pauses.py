"""A rank that is stopped for longer than its timeout (SIGSTOP, as a debugger or a freezer does)."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.harness import Ranks, asleep, await_, results

TIMEOUT = 3.5
LONGER = TIMEOUT + 0.5
LOOKS = 0.2  # several looks of a blocked thread


def reduce_amid_a_pause(comm, folder):
    """Rank 0 waits in three ways, and is stopped; rank 1 calls once it is told to."""
    groups = [comm.split(0) for _ in range(3)]
    for group in groups[:2]:
        group.timeout = TIMEOUT
    xs = [np.full(1000, comm.rank + 1.0) for _ in groups]
    comm.barrier()
    if comm.rank == 1:
        await_((folder / "go").exists)
        for group, x in zip(groups, xs, strict=True):
            group.all_reduce(x)
        (folder / "done").touch()
        return [float(x[-1]) for x in xs]

    unwaited = groups[1].all_reduce(xs[1], async_op=True)
    waited = groups[2].all_reduce(xs[2], async_op=True)
    thread = threading.Thread(target=waited.wait, args=(TIMEOUT,))
    thread.start()
    (folder / "waits").touch()
    groups[0].all_reduce(xs[0])
    thread.join()
    unwaited.wait()
    return [float(x[-1]) for x in xs]


@pytest.mark.storm
@pytest.mark.parametrize(
    ("stopped", "hosts"),
    [([0], "2"), ([0, 1], "1,1")],
    ids=["of one rank", "of both, on two hosts"],
)
def test_a_pause_is_not_lateness(stopped, hosts, tmp_path):
    with Ranks(2, module=__name__, variables={"PYCOLLECTIVE_TOPOLOGY": hosts}) as ranks:
        pids = ranks.joined().pids

        def pause():
            await_((tmp_path / "waits").exists)
            await_(lambda: asleep(pids[0]))
            time.sleep(LOOKS)
            for rank in stopped:
                os.kill(pids[rank], signal.SIGSTOP)
            time.sleep(LONGER)
            (tmp_path / "go").touch()
            if 1 not in stopped:
                await_((tmp_path / "done").exists)
            for rank in stopped:
                os.kill(pids[rank], signal.SIGCONT)

        thread = threading.Thread(target=pause)
        thread.start()
        assert results(ranks.call(reduce_amid_a_pause, tmp_path)) == [[3.0] * 3] * 2
        thread.join()
