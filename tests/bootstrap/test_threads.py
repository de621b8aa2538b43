"""Threads of a process that join at the same time, each with the same peers."""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack, closing

import numpy as np

import pycollective as pc
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.harness import Ranks, results

RANKS, THREADS = 3, 4


def join_at_once(_, addresses, seed):
    """All communicators at once, in any order; what each of them gives."""
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    came = {}

    def join(number):
        try:
            with closing(StoreClient(addresses[number], timeout=20)) as store:
                comm = pc.init(rank=rank, size=RANKS, store=store, timeout=10)
            x = np.full(3, 1.0 + number, np.float32)
            comm.all_reduce(x)
            came[number] = x.tolist()
            comm.close()
        except Exception as error:  # the test says which
            came[number] = repr(error)

    order = random.Random(seed * RANKS + rank).sample(range(THREADS), THREADS)
    threads = [threading.Thread(target=join, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def test_threads_join_with_the_same_peers_at_once():
    for seed in range(8):  # each with processes that have attached nobody yet
        with ExitStack() as stack:
            addresses = [
                f"unix:@pycollective-test-{os.getpid()}-{os.urandom(6).hex()}"
                for _ in range(THREADS)
            ]
            for address in addresses:
                stack.enter_context(StoreServer(address))
            ranks = stack.enter_context(Ranks(RANKS, module=__name__, join=False, timeout=40))
            for came in results(ranks.call(join_at_once, addresses, seed)):
                assert came == {n: [RANKS * (1.0 + n)] * 3 for n in range(THREADS)}
