"""Every store of torch.distributed brings the ranks together, `init` after `init`."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

import pycollective as pc
from pycollective.bootstrap import joining

TIME = timedelta(seconds=20)


def file_store(place, size):
    return dist.FileStore(place, size)


def tcp_store(port, size):
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIME)


def prefix_store(port, size):
    return dist.PrefixStore("a/prefix", tcp_store(port, size))


def join_twice(comm, make, place, shift):
    """Ranks that are others than those of `comm`, twice through one store."""
    rank, size = (comm.rank + shift) % comm.size, comm.size
    store = make(place, size)
    sums = []
    for turn in (1, 2):
        joined = pc.init(rank=rank, size=size, store=store, timeout=20)
        x = np.full(1000, turn * (joined.rank + 1.0))  # the second is not the first once more
        joined.all_reduce(x)
        sums.append(x[-1])
        joined.close()
    return sums


@pytest.fixture
def port():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIME)
    yield server.port
    del server


@pytest.fixture(params=[tcp_store, prefix_store, file_store])
def store(request, port, tmp_path):
    """What makes a rank's, and its place."""
    return request.param, str(tmp_path / "store") if request.param is file_store else port


def test_ranks_meet_in_a_torch_store(pool, store):
    assert pool(3).call(join_twice, *store, 2) == [[6.0, 12.0]] * 3


def join_alone(comm, make, place):
    store = make(place, 2)
    errors = []
    for number in range(2):
        with pytest.raises(pc.CollectiveTimeout) as caught:
            joining.connect(store, 0, 2, 0.5, f"meeting {number}")
        errors.append(str(caught.value))
    return errors


def test_who_does_not_come_to_a_torch_store_is_named(pool, store):
    (errors,) = pool(1).call(join_alone, *store)
    assert len(errors) == 2
    for said in errors:
        assert "after 0.5 s: rank(s) 1" in said
        assert "did not come" in said


def test_a_hash_store_serves_the_threads_of_a_process():
    """Two ranks of one process share its memory: they meet, and need attach nobody."""
    store, answers = dist.HashStore(), {}

    def join(rank):
        with pc.init(rank=rank, size=2, store=store, timeout=20) as joined:
            x = np.full(1000, rank + 1.0)
            joined.all_reduce(x)
            answers[rank] = x[-1]

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert answers == {0: 3.0, 1: 3.0}
