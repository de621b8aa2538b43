"""Ordered calls by the thousand: buckets of any size, over two groups at once, with the program's
own collectives between them."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist

from pycollective import reference
from pycollective.torch import ordered
from tests.harness import PerRank, results, run_ranks
from tests.inputs import order_sensitive
from tests.torch.groups import join, to_torch
from tests.torch.ordered_groups import laid_out

RANKS = 3
HOSTS = (((0,), (1,), (2,)), ((0, 1), (2,)))
TYPES = ("float32", "bfloat16")
ELEMENTS = 300_000
UNDER_WAY = 40


def size_of_bucket(choose):
    """Bytes: most up to 64 KiB, many tiny, few in several pieces."""
    kind = choose.random()
    if kind < 0.4:
        return choose.randrange(1 << 10)
    if kind < 0.95:
        return choose.randrange(64 << 10)
    return choose.randrange(512 << 10)


def storm(comm, leaves, wanted, buckets):
    """How many elements of how many buckets were right; a bucket is a run of the leaves."""
    join(comm, "gloo", timeout=120)
    groups = [dist.new_group(backend="gloo") for _ in HOSTS]
    leaves = [to_torch(each) for each in leaves]
    wanted = [to_torch(each) for each in wanted]
    choose = random.Random(7)  # all ranks choose alike
    under_way = deque()
    right = 0

    def check():
        work, got, want = under_way.popleft()
        if work is not None:
            work.wait()
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        return got.numel()

    with ExitStack() as stack:
        for group, hosts in zip(groups, HOSTS, strict=True):
            stack.enter_context(laid_out(group, hosts, piece=100_000))
        for number in range(buckets):
            kind = choose.randrange(len(TYPES))
            count = size_of_bucket(choose) // leaves[kind].itemsize
            begin = choose.randrange(ELEMENTS - count)
            mine = leaves[kind][begin : begin + count].clone()
            want = wanted[kind][begin : begin + count]
            group = choose.choice(groups)
            asynchronous = choose.random() < 0.9
            if choose.random() < 0.5:
                work = ordered.all_reduce(mine, "avg", group, asynchronous)
                under_way.append((work, mine, want))
            else:
                part = count // RANKS
                mine = mine[: part * RANKS]
                out = torch.empty(part, dtype=mine.dtype)
                work = ordered.reduce_scatter(out, mine, "avg", group, asynchronous)
                want = want[comm.rank * part : (comm.rank + 1) * part]
                under_way.append((work, out, want))
            if choose.random() < 0.1:
                total = torch.full((choose.randrange(1, 3_000),), comm.rank + number)
                dist.all_reduce(total, group=choose.choice([None, *groups]))
                assert (total == RANKS * number + 3).all()
            while len(under_way) > choose.randrange(UNDER_WAY):
                right += check()
        while under_way:
            right += check()
    dist.destroy_process_group()
    return right


@contextmanager
def busy_cores(count):
    """Processes that do nothing, without a rest."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("buckets", "busy"), [(300, 0), pytest.param(10_000, 2, marks=pytest.mark.storm)]
)
def test_buckets_of_any_size_over_two_groups_at_once(buckets, busy):
    leaves = [order_sensitive(dtype, RANKS, ELEMENTS, 3) for dtype in TYPES]
    wanted = [reference.reduce(each, "avg") for each in leaves]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(RANKS)])
    with busy_cores(busy):
        outcomes = run_ranks(storm, RANKS, of_ranks, wanted, buckets, timeout=1_100)
    assert min(results(outcomes)) > 1_000 * buckets
